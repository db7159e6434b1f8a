"""Give jobs back to the front of their queues, uncharged, as soon as Redis answers.

A job in `Holdings.returning` is not renewed any more. Both calls go through the same desk, one
after the other: a renewal that overtook the return of its job would lease to us what we have
forgotten.
"""

import asyncio
import contextlib
from functools import partial

from common.crashpoints import reached
from common.errors import RedisFullError, RedisUnusableError
from common.models import KeptTurns
from common.queue import Jobs
from workers.engine.desk import Bell, RedisDesk
from workers.engine.holdings import GoingBack, Holdings
from workers.prompt.job import JobKey

AGAIN_S = 1.0


class Returns:
    """Sends `Holdings.returning` to Redis."""

    def __init__(self, jobs: Jobs, holdings: Holdings, desk: RedisDesk) -> None:
        self._jobs = jobs
        self._holdings = holdings
        self._desk = desk
        self._bell = Bell()
        self._sending = asyncio.Lock()

    def add(self, key: JobKey, *, died: bool) -> None:
        """Give a job back that has left its slot.

        Args:
            key: The job.
            died: The server died with it, which is counted.
        """
        self._holdings.returning[key] = GoingBack(died=died)
        self._bell.ring()

    def add_ready(self) -> None:
        """Give back everything that is leased and has no slot yet."""
        for key in self._holdings.take_ready():
            self.add(key, died=False)

    async def run(self) -> None:
        """Give back as it comes, for ever."""
        while True:
            await self._bell.wait(AGAIN_S)
            if not await self._send():
                await asyncio.sleep(self._desk.wait_s())

    async def flush(self, limit_s: float) -> bool:
        """Give back what is left; False when Redis has not taken it all by then."""
        try:
            async with asyncio.timeout(limit_s):
                while not await self._send():  # noqa: ASYNC110 - Redis is asked, not an event
                    await asyncio.sleep(self._desk.wait_s())
        except TimeoutError:
            return False
        return True

    async def _send(self) -> bool:
        async with self._sending:
            for died in (False, True):
                batch = {
                    key: going
                    for key, going in self._holdings.returning.items()
                    if going.died is died
                }
                if not batch:
                    continue
                keys = list(batch)
                turns = [self._holdings.turns[key] for key in keys if key in self._holdings.turns]
                try:
                    await self._desk.ask(partial(self._give_back, keys, died=died, turns=turns))
                except RedisUnusableError:
                    return False
                for key, going in batch.items():
                    self._holdings.returned(key, going)
                for kept in turns:
                    self._holdings.forget_turns(kept)
        return True

    def _give_back(self, keys: list[JobKey], *, died: bool, turns: list[KeptTurns]) -> None:
        """Keep what is finished of them first: whoever claims them goes on behind it."""
        if turns:
            # A full Redis takes jobs back and no turns: those are generated again.
            with contextlib.suppress(RedisFullError):
                self._jobs.keep_turns(turns)
            reached("return.turns")
        self._jobs.give_back(keys, died=died)
        reached("return.given")
