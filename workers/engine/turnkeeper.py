"""Keep finished turns on their jobs, in batches, repeated until Redis has them.

A turn waits for nobody else: while one call is under way the next batch gathers. Whoever serves
the prompt waits for the answer, so that a kill costs the turn that is open and no finished one;
when Redis does not answer, the serving goes on and the turns are sent again, or go with the job
when it is given back (`returns`). What ends as a result carries its turns itself.
"""

import asyncio

from common.crashpoints import reached
from common.errors import RedisUnusableError
from common.models import KeptTurns
from common.queue import Jobs
from workers.engine.desk import Bell, RedisDesk
from workers.engine.holdings import Holdings
from workers.prompt.job import JobKey
from workers.prompt.turns import USELESS

MOST_TURNS = 256
MOST_BYTES = 8 * 1024 * 1024
AGAIN_S = 2.0
IDLE_S = 60.0

NOT_KEPT = frozenset({"unknown", "untaught", "removed"})
"""Redis does not know the prompt just now: a rebuild, or the audit, brings it back."""


class TurnKeeper:
    """Sends `Holdings.turns` to Redis."""

    def __init__(self, jobs: Jobs, holdings: Holdings, desk: RedisDesk) -> None:
        self._jobs = jobs
        self._holdings = holdings
        self._desk = desk
        self._bell = Bell()
        self._waiters: dict[JobKey, asyncio.Future[str]] = {}
        self._refused: set[JobKey] = set()

    async def keep(self, kept: KeptTurns) -> str:
        """Keep the turns so far of a prompt; cancelled, they are kept all the same.

        Returns:
            What Redis said (`Jobs.keep_turns`), or `away`: they are sent again by and by.
        """
        key = kept.run, kept.key
        self._holdings.turns[key] = kept
        self._bell.ring()
        if self._desk.away:
            return "away"
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[key] = waiter
        try:
            word: str = await waiter
        finally:
            if self._waiters.get(key) is waiter:
                del self._waiters[key]
        return word

    async def run(self) -> None:
        """Send turns as they come, for ever."""
        while True:
            if not self._holdings.turns:
                await self._bell.wait(IDLE_S)
                continue
            if not await self._send():
                await asyncio.sleep(self._desk.wait_s())
            elif self._waiting_for_others():
                await self._bell.wait(AGAIN_S)

    async def _send(self) -> bool:
        """Send one batch; False when Redis did not answer."""
        batch = self._next_batch()
        try:
            words = await self._desk.ask(lambda: self._jobs.keep_turns(batch))
        except RedisUnusableError:
            for key in list(self._waiters):
                self._tell(key, "away")
            return False
        reached("turn.kept")
        for kept, word in zip(batch, words, strict=True):
            self._note(kept, word)
        return True

    def _note(self, kept: KeptTurns, word: str) -> None:
        key = kept.run, kept.key
        newest = self._holdings.turns.get(key)
        if word in NOT_KEPT:
            self._refused.add(key)
            if newest is not None:
                # Behind the others: turns of other runs need not wait for this one's.
                self._holdings.turns[key] = self._holdings.turns.pop(key)
        else:
            self._refused.discard(key)
            if newest is not kept and word not in USELESS:
                return  # a longer one waits, and so does whoever sent it
            self._holdings.turns.pop(key, None)
        self._tell(key, word)

    def _waiting_for_others(self) -> bool:
        """Whether all that is left was refused: until Redis has been taught."""
        self._refused &= self._holdings.turns.keys()
        return len(self._refused) == len(self._holdings.turns) > 0

    def _next_batch(self) -> list[KeptTurns]:
        batch: list[KeptTurns] = []
        size_bytes = 0
        for kept in self._holdings.turns.values():
            size_bytes += len(kept.turns)
            if batch and (len(batch) >= MOST_TURNS or size_bytes > MOST_BYTES):
                break
            batch.append(kept)
        return batch

    def _tell(self, key: JobKey, word: str) -> None:
        waiter = self._waiters.get(key)
        if waiter is not None and not waiter.done():
            waiter.set_result(word)
