"""One worker group's process: claims, slots, requests and results in one event loop.

    claim ──► ready ──(slot, ramp)──► open ──► unsent ──► recorded in Redis
                 └──────────────┴────────────► given back (server fault, stop)

Every job is in exactly one of these places (`Holdings`), and its lease is renewed until it has
left them. Nothing here decides what is done: that is the finish script.

When something fails:
    server            `ServerWatch` stops claims; open requests end by themselves or are cancelled
                      on a hang; their jobs go back with a server death, the others uncharged
    Redis away, full  what is open goes on, results wait, nothing is claimed
    this process      leases run out and another group reaps them; the next process of this name
                      aborts its requests and takes over at once
    a task of ours    by an error that nobody foresaw: all stops, what is held goes back, exit 1
    its parent        it drains: nobody would start it again
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from common.crashpoints import reached
from common.errors import HeadraceError, RedisUnusableError
from common.mishaps import mishap, stack_of
from common.models import Claim, KeptTurns, Result
from common.queue import ClaimReply, Groups, Jobs
from common.queue.ledger import request_timeout_s
from workers.engine.caretaker import Caretaker
from workers.engine.core import Core
from workers.engine.desk import Bell
from workers.engine.eligible import Eligible
from workers.engine.emptying import Emptying
from workers.engine.endings import Endings
from workers.engine.finisher import Finisher
from workers.engine.keeper import Keeper
from workers.engine.pace import Ramp, Throughput, prefetch_target
from workers.engine.returns import Returns
from workers.engine.showing import Showing
from workers.engine.stopping import WindDown
from workers.engine.turnkeeper import TurnKeeper
from workers.lives import parent_gone
from workers.options import GroupOptions
from workers.prompt.job import Open, Ready
from workers.prompt.outcomes import Returned
from workers.prompt.serve import Prompter

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.25
MOST_CLAIMED = 256


class Engine:
    """Runs one worker group until told to stop.

    Args:
        options: Who this is and how it should behave.
        jobs, groups: The queue, from this process's side.
        eligible: Which runs this server may serve.
        caretaker: Looks after the runs while there is nothing to do.
        on_beat: Called every few seconds with (busy, completed, failed) for RQ's own records.

    Attributes:
        stop: Asked, it drains; hurried, it does not wait for what is open.
    """

    def __init__(
        self,
        options: GroupOptions,
        *,
        jobs: Jobs,
        groups: Groups,
        eligible: Eligible,
        caretaker: Caretaker,
        on_beat: Callable[[bool, int, int], None],
    ) -> None:
        self._work_bell = Bell()
        self._room_bell = Bell()
        self._core = core = Core(
            options,
            jobs=jobs,
            groups=groups,
            eligible=eligible,
            on_change=self._ring,
            may_send=lambda: self._keeper.slots > 0,
        )
        self.stop = core.stop
        self._caretaker = caretaker
        self._holdings = core.holdings
        self._watch = core.watch
        self._tasks: asyncio.TaskGroup | None = None
        self._fatal: HeadraceError | None = None
        self._finisher = Finisher(jobs, core.holdings, core.work, on_room=self._ring)
        self._returns = Returns(jobs, core.holdings, core.beat)
        self._endings = Endings(
            core, finisher=self._finisher, returns=self._returns, spawn=self._spawn
        )
        self._turns = TurnKeeper(jobs, core.holdings, core.work)
        self._prompter = Prompter(core.watch, self, core.rids, turns=self, slots=self)
        self._keeper = Keeper(core, self._endings)
        self._emptying = Emptying(core, self._endings, self._returns)
        self._showing = Showing(
            core, keeper=self._keeper, finisher=self._finisher, on_beat=on_beat
        )
        now_s = time.monotonic()
        self._ramp = Ramp(options.ramp, now_s)
        self._opened = Throughput(now_s)

    async def charge(self, claim: Claim, reason: str, *, before: int | None) -> int:
        """Count an attempt in Redis (`needs.Charger`)."""
        charged = await self._core.work.ask(
            lambda: self._core.jobs.charge(claim.run, claim.key, reason, before=before)
        )
        reached("charge.counted")
        return charged

    async def keep(self, kept: KeptTurns) -> str:
        """Keep finished turns in Redis (`needs.TurnStore`)."""
        return await self._turns.keep(kept)

    def may_go_on(self) -> bool:
        """Whether a slot that has ended a request may open the next (`needs.SlotHolder`)."""
        if self.stop.asked.is_set() or not self._watch.ready or self._finisher.full:
            return False
        return self._holdings.in_slots <= self._keeper.slots

    def held_since(self, instant_s: float) -> bool:
        """Whether slots were held without a gap since then (`needs.SlotHolder`)."""
        return self._keeper.held_since(instant_s)

    async def run(self) -> None:
        """Work until told to stop, then drain.

        Raises:
            BackendError: Another worker group drives this server, or the server refuses us.
            InternalError: Some part of ours failed; what was held has been given back.
        """
        asyncio.get_running_loop().set_exception_handler(self._on_stray)
        try:
            async with self._core.client, asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                loops = [self._spawn(work, name) for name, work in self._loops().items()]
                claiming = self._spawn(self._claim(), "claim")
                opener = self._spawn(self._open_ready(), "open")
                await self.stop.asked.wait()
                self._ring()
                opener.cancel()
                wind_down = self._wind_down()
                await wind_down.run(claiming)
                for task in loops:
                    task.cancel()
                await wind_down.leave()
        finally:
            self._core.close()
            self._caretaker.close()
        if self._fatal is not None:
            raise self._fatal

    def _wind_down(self) -> WindDown:
        return WindDown(
            self._core,
            endings=self._endings,
            returns=self._returns,
            finisher=self._finisher,
            keeper=self._keeper,
            showing=self._showing,
            bell=self._work_bell,
        )

    def _loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Name what runs until all that was held has gone."""
        return {
            "watch": self._watch.run(self._on_hang),
            "slots": self._keeper.keep_slots(),
            "leases": self._keeper.keep_leases(),
            "reap": self._keeper.reap(),
            "drain": self._emptying.run(),
            "finish": self._finisher.run(),
            "turns": self._turns.run(),
            "return": self._returns.run(),
            "show": self._showing.run(),
            "parent": self._watch_parent(),
            "care": self._caretaker.run(),
        }

    async def _guarded(self, work: Coroutine[Any, Any, object], name: str) -> None:
        """Run a task whose error ends the process: half alive, it would keep what it holds."""
        try:
            await work
        except HeadraceError as error:
            self._end_with(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, what is held goes back first
            self._end_with(mishap(f"the task `{name}`", error))

    def _end_with(self, error: HeadraceError) -> None:
        self._fatal = self._fatal or error
        self.stop.hurry()

    def _on_stray(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Take note of an error that no task has seen; without memory nothing can be relied on."""
        error = context.get("exception")
        if not isinstance(error, BaseException):
            loop.default_exception_handler(context)
        elif isinstance(error, MemoryError):
            self._end_with(mishap("the event loop", error))
        else:
            log.error("stray %s:\n%s", type(error).__name__, stack_of(error))

    async def _watch_parent(self) -> None:
        """Drain when whoever would start us again is gone."""
        await parent_gone(self._core.options.parent_pid)
        log.warning("the process that watched this worker group is gone: stopping")
        self.stop.ask(teller="watched")

    def _ring(self) -> None:
        """Something changed: there may be something to open, or room for more."""
        self._work_bell.ring()
        self._room_bell.ring()

    def _spawn(self, work: Coroutine[Any, Any, object], name: str = "request") -> Any:
        if self._tasks is None:
            raise AssertionError("nothing is spawned before run")
        return self._tasks.create_task(self._guarded(work, name), name=name)

    # --- claiming ---

    async def _claim(self) -> None:
        while not self.stop.asked.is_set():
            count = self._claimable()
            if not count:
                await self._room_bell.wait(IDLE_POLL_S)
                continue
            try:
                reply = await self._core.work.ask(partial(self._claim_once, count))
            except RedisUnusableError:
                await asyncio.sleep(self._core.work.wait_s())
                continue
            self._caretaker.note("ok" if reply is None or reply.claims else reply.why)
            if reply is not None and reply.why == "drained":
                self._keeper.look_now()
            if reply is None or not reply.claims:
                await asyncio.sleep(IDLE_POLL_S if reply is None or reply.why != "ok" else 0)
                continue
            for claim in reply.claims:
                self._endings.admit(Ready(claim, reply.suspects, reply.alone))
            self._work_bell.ring()

    def _claimable(self) -> int:
        """Say how many to claim: none while anything is in the way, else a worthwhile batch."""
        slots = self._keeper.slots
        if not slots or not self._watch.ready or self._finisher.blocked:
            return 0
        if self._holdings.has_suspect():
            return 0
        open_now = self._holdings.in_slots
        per_s = self._opened.per_s(time.monotonic())
        target = prefetch_target(slots=slots, open_requests=open_now, per_s=per_s)
        missing = target - len(self._holdings.ready)
        worthwhile = max(1, target // 2)
        return min(missing, MOST_CLAIMED) if missing >= worthwhile else 0

    def _claim_once(self, count: int) -> ClaimReply | None:
        runs = self._core.eligible.names(self._watch.identity)
        if not runs:
            return None
        reply = self._core.jobs.claim(
            count,
            runs=runs,
            stream_mark_bytes=self._core.eligible.stream_mark_bytes(),
            worker_name=self._core.options.worker_name,
            alone=not len(self._holdings),
            lease_ms=self._core.options.timing.lease_ms,
        )
        if reply.claims:
            reached("claim.leased")
        return reply

    # --- requests ---

    async def _open_ready(self) -> None:
        while True:
            wait_s = self._open_what_fits()
            self._room_bell.ring()
            await self._work_bell.wait(wait_s)

    def _open_what_fits(self) -> float:
        """Open requests while there are jobs, slots and ramp; returns when to look again."""
        if not self._watch.ready:
            self._ramp.restart(time.monotonic())
            # A claim may have been answered after the fault: others shall have those jobs.
            self._returns.add_ready()
        while self._holdings.ready and self._watch.ready:
            slots = self._keeper.slots
            if not slots:
                # Whoever has slots shall have these jobs.
                self._returns.add_ready()
                return 1.0
            if self._holdings.in_slots >= slots or self._finisher.full:
                return 1.0
            now_s = time.monotonic()
            wait_s = max(
                self._ramp.wait_s(now_s, open_requests=self._holdings.in_slots),
                self._watch.rest_s(),
            )
            if wait_s > 0:
                return wait_s
            self._opened.note(now_s)
            ready = self._holdings.next_ready()
            job = Open(ready, slot=self._core.rids.take_slot(), since_s=now_s)
            self._holdings.open[job.key] = job
            job.task = self._spawn(self._serve(job))
        return 1.0

    async def _serve(self, job: Open) -> None:
        claim = job.claim
        record = self._core.eligible.record(claim.run)
        ended: Result | Returned = Returned()
        try:
            if record is not None and record.uid == claim.uid:
                timeout_s = request_timeout_s(record.params)
                ended = await self._prompter.serve(job, record.params, timeout_s)
        except asyncio.CancelledError:
            # Whoever cancels (`Endings`) has already said what becomes of the job.
            return
        finally:
            self._holdings.left(job)
            self._core.rids.free_slot(job.slot)
            self._work_bell.ring()
        self._endings.settle(job, ended)
        if isinstance(ended, Returned) and ended.misfit:
            self._core.eligible.leave_out(claim, self._watch.identity, ended.misfit)
            self._returns.add_ready()
        if isinstance(ended, Returned) and ended.fault:
            self._watch.report(ended.fault, config=ended.config)
            self._ramp.restart(time.monotonic())
            self._returns.add_ready()

    def _on_hang(self) -> None:
        self._ramp.restart(time.monotonic())
        self._endings.hang()
