"""Say every few seconds how this worker group is: to Redis for status, to RQ for its tools."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from common.errors import RedisUnusableError
from common.group_figures import GroupFigures
from common.pins import identity_of
from workers.engine.core import Core
from workers.engine.finisher import Finisher
from workers.engine.keeper import Keeper
from workers.engine.marking import Marking
from workers.engine.sizing import Sizing
from workers.engine.telemeter import Telemeter

LOOKS = 12
"""How often occupancy is looked at between two publications."""

OCCUPANCY_S = 60.0


class Showing:
    """Publishes one process's figures, design.md §5.

    Args:
        core: What is shown of.
        on_beat: Called with (busy, completed, failed) each time, in the desk's thread.
    """

    def __init__(
        self,
        core: Core,
        *,
        keeper: Keeper,
        finisher: Finisher,
        on_beat: Callable[[bool, int, int], None],
    ) -> None:
        self._core = core
        self._keeper = keeper
        self._finisher = finisher
        self._on_beat = on_beat
        self._marking = Marking(core)
        self._telemeter = Telemeter(core, self.figures)
        self._began_s = self._ready_s = time.monotonic()
        self._sizing = Sizing()
        self._occupied: deque[tuple[float, int, int]] = deque(maxlen=240)

    async def run(self) -> None:
        """Publish and sample for ever."""
        await asyncio.gather(self._publish(), self._telemeter.run())

    async def _publish(self) -> None:
        while True:
            with contextlib.suppress(RedisUnusableError):
                # Of one instant: the thread may be busy until the server is another one.
                told = self.figures(), self._core.watch.restarts
                await self._core.beat.ask(partial(self._say, *told))
            for _ in range(LOOKS):
                self._occupied.append(
                    (time.monotonic(), len(self._core.holdings.open), self._keeper.slots)
                )
                await asyncio.sleep(self._core.options.timing.publish_every_s / LOOKS)

    async def withdraw(self) -> None:
        """Say that this process has ended."""
        await self._core.beat.ask(lambda: self._core.groups.withdraw(self._core.jobs.epoch))
        await self._core.beat.ask(self._marking.leave)

    def figures(self) -> GroupFigures:
        """Say how this process is now."""
        watch, identity = self._core.watch, self._core.watch.identity
        now_s = time.monotonic()
        told = watch.telemetry.figures(now_s)
        load = told.load
        sized = self._sizing.diagnosis(identity.facts if identity else None, load)
        state, detail = self._state()
        if watch.ready or self._core.draining.stands:
            self._ready_s = now_s
        return GroupFigures(
            group=self._core.jobs.group,
            epoch=self._core.jobs.epoch,
            host=self._core.options.host,
            pid=self._core.options.pid,
            server=self._core.options.server,
            state=state,
            detail=detail,
            in_flight=len(self._core.holdings.open),
            leased=len(self._core.holdings),
            bound=self._core.bound() if identity and state != "drained" else 0,
            cap=self._core.cap,
            running=load.running,
            queued=load.queued,
            gen_tokens_per_s=told.gen_tokens_per_s,
            kv_usage=load.token_usage,
            mamba_usage=load.mamba_usage,
            retracted=told.retracted,
            cached_share=told.cached_share,
            told_s=told.told_s,
            strategy=(identity and identity.strategy) or watch.telemetry.log.strategy,
            server_version=identity.version if identity else None,
            model=identity.model if identity else None,
            left_out=self._core.eligible.left_out(identity),
            identity=identity_of(identity) if identity else None,
            occupancy=self._occupancy(now_s),
            oldest_s=self._core.holdings.oldest_s(now_s),
            ages_s=self._core.holdings.ages_s(now_s),
            up_s=now_s - self._began_s,
            unready_s=now_s - self._ready_s,
            binds=sized.binds if sized else "",
            sizing=sized.words if sized else "",
            advice=sized.advice if sized else "",
            better=sized.better or "" if sized else "",
            completed=self._finisher.completed,
        )

    def _state(self) -> tuple[str, str]:
        watch = self._core.watch
        if self._core.stop.asked.is_set():
            return "draining", watch.detail
        if self._core.draining.stands:
            empty = not self._core.holdings.in_slots
            return "drained" if empty else "draining", self._core.draining.detail
        if watch.ready and self._core.eligible.wrong_model:
            return "wrong_model", self._core.eligible.wrong_model
        return watch.state, watch.detail

    def _say(self, figures: GroupFigures, restarts: int) -> None:
        self._marking.look(figures, restarts)
        self._core.groups.publish(figures)
        self._core.eligible.refresh()
        self._on_beat(bool(figures.in_flight), self._finisher.completed, self._finisher.failed)
        self._marking.tell(figures)

    def _occupancy(self, now_s: float) -> float | None:
        since_s = now_s - OCCUPANCY_S
        seen = [(used, slots) for at_s, used, slots in self._occupied if at_s >= since_s and slots]
        return sum(used / slots for used, slots in seen) / len(seen) if seen else None
