"""Say every few seconds how this worker group is: to Redis for `producer status`, to RQ for its tools."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from common.errors import RedisUnusableError
from common.queue import GroupFigures, Groups, Jobs
from workers.desk import RedisDesk
from workers.eligible import Eligible
from workers.finisher import Finisher
from workers.holdings import Holdings
from workers.keeper import Keeper
from workers.options import GroupOptions
from workers.watch import ServerWatch

LOOKS = 12
"""How often occupancy is looked at between two publications."""

OCCUPANCY_S = 60.0


class Showing:
    """Publishes one process's figures, design.md §5.

    Args:
        groups: Where they go.
        on_beat: Called with (busy, completed, failed) each time, in the desk's thread.
        bound: How many requests may be open at the server.
        stopping: Whether this process has been told to stop.
    """

    def __init__(
        self,
        options: GroupOptions,
        jobs: Jobs,
        *,
        groups: Groups,
        eligible: Eligible,
        holdings: Holdings,
        keeper: Keeper,
        watch: ServerWatch,
        finisher: Finisher,
        desk: RedisDesk,
        on_beat: Callable[[bool, int, int], None],
        bound: Callable[[], int],
        stopping: Callable[[], bool],
    ) -> None:
        self._options = options
        self._jobs = jobs
        self._groups = groups
        self._eligible = eligible
        self._holdings = holdings
        self._keeper = keeper
        self._watch = watch
        self._finisher = finisher
        self._desk = desk
        self._on_beat = on_beat
        self._bound = bound
        self._stopping = stopping
        self._began_s = time.monotonic()
        self._occupied: deque[tuple[float, int, int]] = deque(maxlen=240)

    async def run(self) -> None:
        """Publish for ever."""
        while True:
            with contextlib.suppress(RedisUnusableError):
                await self._desk.ask(partial(self._say, self.figures()))
            for _ in range(LOOKS):
                self._occupied.append(
                    (time.monotonic(), len(self._holdings.open), self._keeper.slots)
                )
                await asyncio.sleep(self._options.timing.publish_every_s / LOOKS)

    async def withdraw(self) -> None:
        """Say that this process has ended."""
        await self._desk.ask(lambda: self._groups.withdraw(self._jobs.epoch))

    def figures(self) -> GroupFigures:
        """Say how this process is now."""
        watch, load, identity = self._watch, self._watch.load, self._watch.identity
        now_s = time.monotonic()
        state, detail = self._state()
        return GroupFigures(
            group=self._jobs.group,
            epoch=self._jobs.epoch,
            host=self._options.host,
            pid=self._options.pid,
            server=self._options.server,
            state=state,
            detail=detail,
            in_flight=len(self._holdings.open),
            leased=len(self._holdings),
            bound=self._bound() if identity else 0,
            cap=(load and load.cap) or (identity and identity.cap) or None,
            running=load.running if load else None,
            queued=load.queued if load else None,
            gen_tokens_per_s=watch.gen_tokens_per_s,
            kv_usage=load.token_usage if load else None,
            mamba_usage=load.mamba_usage if load else None,
            strategy=identity.strategy if identity else None,
            server_version=identity.version if identity else None,
            model=identity.model if identity else None,
            occupancy=self._occupancy(now_s),
            oldest_s=self._holdings.oldest_s(now_s),
            ages_s=self._holdings.ages_s(now_s),
            up_s=now_s - self._began_s,
            completed=self._finisher.completed,
        )

    def _state(self) -> tuple[str, str]:
        watch = self._watch
        if self._stopping():
            return "draining", watch.detail
        if watch.ready and self._eligible.wrong_model:
            return "wrong_model", self._eligible.wrong_model
        return watch.state, watch.detail

    def _say(self, figures: GroupFigures) -> None:
        self._groups.publish(figures)
        self._eligible.refresh()
        self._on_beat(bool(figures.in_flight), self._finisher.completed, self._finisher.failed)

    def _occupancy(self, now_s: float) -> float | None:
        since_s = now_s - OCCUPANCY_S
        seen = [(used, slots) for at_s, used, slots in self._occupied if at_s >= since_s and slots]
        return sum(used / slots for used, slots in seen) / len(seen) if seen else None
