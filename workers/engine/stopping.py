"""Stop a worker group in two stages: no claims and the grace for what is open, then back with it.

A second request to stop skips the grace. Redis or the server may be away meanwhile: whatever
cannot be said to them within a few seconds is left to leases and to the next process of this name.
A part of ours that fails on the way keeps none of the others from what they have to give back.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from typing import Any

from common.errors import RedisUnusableError
from common.mishaps import mishap
from workers.engine.core import Core
from workers.engine.desk import Bell
from workers.engine.endings import Endings
from workers.engine.finisher import Finisher
from workers.engine.keeper import Keeper
from workers.engine.returns import Returns
from workers.engine.showing import Showing

log = logging.getLogger(__name__)

LOOK_S = 0.2
ABORTS_S = 1.5
"""What aborts get before the connections are closed, which a server understands too.

With what Redis gets, all of a stop ends within 5 s of the grace, whoever hangs: whatever stops us
(Kubernetes, Slurm) kills after 30 s, and the default grace is 25.
"""


class WindDown:
    """The orderly end of one process, once it claims no more."""

    def __init__(
        self,
        core: Core,
        *,
        endings: Endings,
        returns: Returns,
        finisher: Finisher,
        keeper: Keeper,
        showing: Showing,
        bell: Bell,
    ) -> None:
        self._options = core.options
        self._stop = core.stop
        self._holdings = core.holdings
        self._endings = endings
        self._returns = returns
        self._finisher = finisher
        self._keeper = keeper
        self._showing = showing
        self._bell = bell
        self._redis_until_s = 0.0

    async def run(self, claiming: "asyncio.Task[None]") -> None:
        """Wind down.

        Args:
            claiming: The last claim, which has been asked to end: what it brings goes back as
            well.
        """
        deadline_s = time.monotonic() + self._options.grace_s
        log.info(
            "stopping: %d open requests get %.0f s, %d held jobs go back",
            len(self._holdings.open),
            self._options.grace_s,
            len(self._holdings.ready),
        )
        self._returns.add_ready()
        await asyncio.wait([claiming], timeout=self._options.timing.redis_limit_s)
        claiming.cancel()
        self._returns.add_ready()
        while self._busy() and time.monotonic() < deadline_s and not self._stop.hurried.is_set():
            await self._bell.wait(LOOK_S)
        await self._whatever_happens(self._end_open())
        self._redis_until_s = time.monotonic() + self._options.timing.redis_limit_s
        for step in (self._give_back, self._record):
            await self._whatever_happens(step())

    async def leave(self) -> None:
        """Give up the slots and say goodbye, once nothing is left that would renew either."""
        await self._whatever_happens(self._say_goodbye())

    @staticmethod
    async def _whatever_happens(step: Coroutine[Any, Any, None]) -> None:
        try:
            await step
        except Exception as error:  # noqa: BLE001 - what the other steps give back counts more
            mishap("the stop", error)

    async def _give_back(self) -> None:
        if not await self._returns.flush(self._limit_s):
            log.warning("%d jobs could not be given back", len(self._holdings.returning))

    async def _record(self) -> None:
        if not await self._finisher.flush(self._limit_s):
            log.warning(
                "%d results could not be recorded: they will be redone", len(self._holdings.unsent)
            )

    async def _say_goodbye(self) -> None:
        with contextlib.suppress(RedisUnusableError, TimeoutError):
            async with asyncio.timeout(self._limit_s):
                await self._keeper.release()
                await self._showing.withdraw()

    @property
    def _limit_s(self) -> float:
        """What the next call to Redis gets: of all that they get together, at most half."""
        left_s = self._redis_until_s - time.monotonic()
        return max(LOOK_S, min(left_s, self._options.timing.redis_limit_s / 2))

    def _busy(self) -> bool:
        """Whether anything is worth waiting for: a running request, a result not recorded yet."""
        self._endings.stop([job for job in self._holdings.open.values() if job.resting])
        return bool(self._holdings.open or self._holdings.unsent)

    async def _end_open(self) -> None:
        """Abort what is still open and give it back."""
        self._endings.stop(self._holdings.open.values())
        deadline_s = time.monotonic() + ABORTS_S
        while self._holdings.leaving and time.monotonic() < deadline_s:
            await self._bell.wait(LOOK_S)
