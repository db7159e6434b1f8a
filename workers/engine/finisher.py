"""Record what has ended: results in batches, by one atomic call each, repeated until Redis has it.

A result stays in `Holdings.unsent`, its lease renewed, until Redis has answered. A call whose
answer was lost is repeated and says so, so that nothing is counted twice.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from common.crashpoints import reached
from common.errors import RedisUnusableError
from common.models import Result
from common.queue import Jobs
from workers.engine.desk import RedisDesk
from workers.engine.holdings import Holdings
from workers.prompt.noticing import SAY_S, Noticing, Tally

if TYPE_CHECKING:
    from workers.prompt.job import JobKey

log = logging.getLogger(__name__)

LINGER_S = 0.005
"""How long a result waits for others: below what a slot notices."""

MOST_RESULTS = 256
MOST_BYTES = 8 * 1024 * 1024
FULL_BYTES = 32 * 1024 * 1024
"""Rows that wait beyond this stop the opening of requests: Redis takes them more slowly."""

UNKNOWN_WAIT_S = 2.0

_KEPT = {"unknown", "untaught"}


class Finisher:
    """Sends `Holdings.unsent` to Redis.

    Args:
        jobs, holdings: The queue, and what waits for it.
        desk: Makes the calls.
        on_room: Called when `full` has ended.

    Attributes:
        blocked: Redis has not taken a result, or does not know its run yet: claim nothing.
        full: So much waits that no request shall be opened, whatever is free.
        completed, failed: What this process has recorded.
    """

    def __init__(
        self, jobs: Jobs, holdings: Holdings, desk: RedisDesk, *, on_room: Callable[[], None]
    ) -> None:
        self._jobs = jobs
        self._on_room = on_room
        self._waiting_bytes = 0
        self._holdings = holdings
        self._desk = desk
        self._wake = asyncio.Event()
        # One batch at a time: the same results in two would count as duplicates.
        self._sending = asyncio.Lock()
        self.blocked = False
        self._said_s = float("-inf")
        self.completed = 0
        self.failed = 0
        self._noticing = Noticing(jobs.group)
        self._failures = Tally("prompts failed", jobs.group)
        self._drops = Tally("results dropped", jobs.group, level=logging.INFO)

    @property
    def full(self) -> bool:
        """Whether rows wait beyond `FULL_BYTES`."""
        return self._waiting_bytes > FULL_BYTES

    def add(self, result: Result) -> None:
        """Take over a result; its job gives up its slot now."""
        self._forget(result.run, result.key)
        self._holdings.turns.pop((result.run, result.key), None)
        self._holdings.unsent[result.run, result.key] = result
        self._waiting_bytes += len(result.row)
        self._wake.set()

    async def run(self) -> None:
        """Send results as they come, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(LINGER_S)
            while self._holdings.unsent:
                await self._send_batch()
            for tally in (self._failures, self._drops):
                tally.tell()

    async def flush(self, deadline_s: float) -> bool:
        """Send what is left; False when Redis has not taken it all by then."""
        try:
            async with asyncio.timeout(deadline_s):
                while self._holdings.unsent:
                    await self._send_batch()
        except TimeoutError:
            return False
        finally:
            for tally in (self._failures, self._drops):
                tally.tell(now=True)
        return True

    async def _send_batch(self) -> None:
        async with self._sending:
            wait_s = await self._send()
        if wait_s:
            await asyncio.sleep(wait_s)

    async def _send(self) -> float:
        """Send one batch; returns how long to wait before the next."""
        batch = self._next_batch()
        if not batch:
            return 0.0
        try:
            words = await self._desk.ask(lambda: self._jobs.finish(batch))
        except RedisUnusableError:
            self.blocked = True
            self._mark_repeated(batch)
            return self._desk.wait_s()
        except asyncio.CancelledError:
            # It may have been made all the same.
            self._mark_repeated(batch)
            raise
        reached("finish.recorded")
        kept = 0
        for result, word in zip(batch, words, strict=True):
            if word in _KEPT:
                kept += 1
                self._put_behind(result)
                continue
            self._note(result, word)
        self.blocked = kept > 0
        if not kept:
            return 0.0
        # A wiped Redis is taught again by whoever reaches the store; these wait for it.
        if time.monotonic() - self._said_s >= SAY_S:
            self._said_s = time.monotonic()
            log.warning("%d results wait: Redis does not know their run yet", kept)
        return UNKNOWN_WAIT_S

    def _next_batch(self) -> list[Result]:
        batch: list[Result] = []
        size_bytes = 0
        for result in self._holdings.unsent.values():
            if batch and (len(batch) >= MOST_RESULTS or size_bytes + len(result.row) > MOST_BYTES):
                break
            batch.append(result)
            size_bytes += len(result.row)
        return batch

    def _mark_repeated(self, batch: list[Result]) -> None:
        for result in batch:
            if self._waits(result):
                key: JobKey = (result.run, result.key)
                self._holdings.unsent[key] = msgspec.structs.replace(result, repeat=True)

    def _put_behind(self, result: Result) -> None:
        """Let the others go first: results of other runs need not wait for this one's."""
        if self._waits(result):
            key: JobKey = (result.run, result.key)
            self._holdings.unsent[key] = self._holdings.unsent.pop(key)

    def _waits(self, result: Result) -> bool:
        """Whether what an answer is about is still what waits: its job may have ended anew since.

        A request that was given up is answered all the same now and then, and a run of this name
        may have been made anew: the later result has to be sent by itself.
        """
        return self._holdings.unsent.get((result.run, result.key)) is result

    def _note(self, result: Result, word: str) -> None:
        was_full = self.full
        if self._waits(result):
            self._forget(result.run, result.key)
        if was_full and not self.full:
            self._on_room()
        if word not in {"ok", "repeated"}:
            log.debug("dropped a result of run %s, key %s: %s", result.run, result.key.hex(), word)
            self._drops.note(result.run, word)
            return
        if result.outcome == "completed":
            self.completed += 1
            self._noticing.note(result.run, result.flags)
        else:
            self.failed += 1
            self._failures.note(result.run, result.reason or result.outcome)

    def _forget(self, run: str, key: bytes) -> None:
        known = self._holdings.unsent.pop((run, key), None)
        if known is not None:
            self._waiting_bytes -= len(known.row)
