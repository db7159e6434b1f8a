"""One worker group's process: claims, slots, requests and results in one event loop.

    claim ──► ready ──(slot, ramp)──► open ──► unsent ──► recorded in Redis
                 └──────────────┴────────────► given back (server fault, stop)

Every job is in exactly one of these places (`Holdings`), and its lease is renewed until it has left
them. Nothing here decides what is done: that is the finish script.

When something fails:
    server            `ServerWatch` stops claims; open requests end by themselves or are cancelled on
                      a hang; their jobs go back with a server death, the others uncharged
    Redis away, full  what is open goes on, results wait, nothing is claimed
    this process      leases run out and another group reaps them; the next process of this name
                      aborts its requests and takes over at once
    its parent        it drains: nobody would start it again
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from common.errors import HeadraceError, RedisUnusableError
from common.models import Claim, Result
from common.queue import ClaimReply, Groups, Jobs
from common.queue.ledger import request_timeout_s
from workers.capacity import bound_of
from workers.desk import Bell, RedisDesk
from workers.eligible import Eligible
from workers.endings import Endings
from workers.finisher import Finisher
from workers.holdings import Holdings, Open
from workers.keeper import Keeper
from workers.options import GroupOptions
from workers.pace import Ramp, Throughput, prefetch_target
from workers.returns import Returns
from workers.rids import Rids
from workers.serve import Prompter, Returned
from workers.sglang import SGLangClient
from workers.showing import Showing
from workers.stopping import StopRequest, WindDown
from workers.watch import ServerWatch

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.25
PARENT_POLL_S = 1.0
MOST_CLAIMED = 256


class Engine:
    """Runs one worker group until told to stop.

    Args:
        options: Who this is and how it should behave.
        jobs, groups: The queue, from this process's side.
        eligible: Which runs this server may serve.
        on_beat: Called every few seconds with (busy, completed, failed) for RQ's own records.

    Attributes:
        stop: What ends it.
    """

    def __init__(
        self,
        options: GroupOptions,
        *,
        jobs: Jobs,
        groups: Groups,
        eligible: Eligible,
        on_beat: Callable[[bool, int, int], None],
    ) -> None:
        self._options = options
        self._jobs = jobs
        self._eligible = eligible
        self._tasks: asyncio.TaskGroup | None = None
        self._fatal: HeadraceError | None = None
        self._work_bell = Bell()
        self._room_bell = Bell()
        self.stop = StopRequest()
        self.holdings = Holdings()
        self._work = RedisDesk("queue")
        self._beat = RedisDesk("heartbeat")
        self._rids = Rids(jobs.epoch)
        self._client = SGLangClient(
            options.server, slots=options.most_connections, api_key=options.api_key
        )
        self.watch = ServerWatch(
            self._client,
            on_change=self._ring,
            timing=options.timing,
            start_limit_s=options.start_limit_s,
        )
        self._finisher = Finisher(jobs, self.holdings, self._work)
        self._returns = Returns(jobs, self.holdings, self._beat)
        self._endings = Endings(
            self._client,
            self.holdings,
            finisher=self._finisher,
            returns=self._returns,
            spawn=self._spawn,
        )
        self._prompter = Prompter(self.watch, self, self._rids)
        self._ramp = Ramp(options.ramp, time.monotonic())
        self._opened = Throughput(time.monotonic())
        self.keeper = Keeper(
            jobs=jobs,
            holdings=self.holdings,
            desk=self._beat,
            client=self._client,
            watch=self.watch,
            rids=self._rids,
            host=options.host,
            bound=self.bound,
            timing=options.timing,
            on_change=self._ring,
            endings=self._endings,
        )
        self.showing = Showing(
            options,
            jobs,
            groups=groups,
            eligible=eligible,
            holdings=self.holdings,
            keeper=self.keeper,
            watch=self.watch,
            finisher=self._finisher,
            desk=self._beat,
            on_beat=on_beat,
            bound=self.bound,
            stopping=self.stop.asked.is_set,
        )

    def bound(self) -> int:
        """How many requests may be open at the server, over all processes."""
        identity, load = self.watch.identity, self.watch.load
        cap = (load and load.cap) or (identity and identity.cap) or None
        return bound_of(self._options.concurrency, cap)

    def ask_to_stop(self, signal: int | None = None) -> None:
        """Begin to drain; the second call does not wait for what is open."""
        self.stop.ask(signal)
        self._ring()

    async def charge(self, claim: Claim, reason: str, *, before: int) -> int:
        """Count an attempt in Redis (`serve.Charger`)."""
        return await self._work.ask(
            lambda: self._jobs.charge(claim.run, claim.key, reason, before=before)
        )

    async def run(self) -> None:
        """Work until told to stop, then drain.

        Raises:
            BackendError: Another worker group drives this server, or the server refuses us.
        """
        try:
            async with self._client, asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                loops = [
                    tasks.create_task(
                        self._fatal_ends(self.watch.run(self._on_hang)), name="watch"
                    ),
                    tasks.create_task(self._fatal_ends(self.keeper.keep_slots()), name="slots"),
                    tasks.create_task(self.keeper.keep_leases(), name="leases"),
                    tasks.create_task(self.keeper.reap(), name="reap"),
                    tasks.create_task(self._finisher.run(), name="finish"),
                    tasks.create_task(self._returns.run(), name="return"),
                    tasks.create_task(self.showing.run(), name="show"),
                    tasks.create_task(self._watch_parent(), name="parent"),
                ]
                claiming = tasks.create_task(self._claim(), name="claim")
                opener = tasks.create_task(self._open_ready(), name="open")
                await self.stop.asked.wait()
                opener.cancel()
                await self._wind_down().run(claiming)
                for task in loops:
                    task.cancel()
        finally:
            self._work.close()
            self._beat.close()
        if self._fatal is not None:
            raise self._fatal

    def _wind_down(self) -> WindDown:
        return WindDown(
            self._options,
            stop=self.stop,
            holdings=self.holdings,
            endings=self._endings,
            returns=self._returns,
            finisher=self._finisher,
            keeper=self.keeper,
            showing=self.showing,
            bell=self._work_bell,
        )

    async def _fatal_ends(self, loop: Coroutine[Any, Any, None]) -> None:
        """Run a loop whose errors of ours end the process: what is held goes back first."""
        try:
            await loop
        except HeadraceError as error:
            self._fatal = error
            self.ask_to_stop()
            self.ask_to_stop()

    async def _watch_parent(self) -> None:
        """Drain when whoever would start us again is gone."""
        parent = self._options.parent_pid
        while parent is not None and os.getppid() == parent:
            await asyncio.sleep(PARENT_POLL_S)
        if parent is not None:
            log.warning("the process that watched this worker group is gone: stopping")
            self.ask_to_stop()

    def _ring(self) -> None:
        """Something changed: there may be something to open, or room for more."""
        self._work_bell.ring()
        self._room_bell.ring()

    def _spawn(self, work: Coroutine[Any, Any, object]) -> "asyncio.Task[Any]":
        if self._tasks is None:
            raise AssertionError("nothing is spawned before run")
        return self._tasks.create_task(work)

    # --- claiming ---------------------------------------------------------------------------------

    async def _claim(self) -> None:
        while not self.stop.asked.is_set():
            count = self._claimable()
            if not count:
                await self._room_bell.wait(IDLE_POLL_S)
                continue
            try:
                reply = await self._work.ask(partial(self._claim_once, count))
            except RedisUnusableError:
                await asyncio.sleep(self._work.wait_s())
                continue
            if reply is None or not reply.claims:
                await asyncio.sleep(IDLE_POLL_S if reply is None or reply.why != "ok" else 0)
                continue
            for claim in reply.claims:
                self.holdings.add_ready(claim, alone=reply.alone)
            self._work_bell.ring()

    def _claimable(self) -> int:
        """How many jobs to claim now: none while anything is in the way, else a worthwhile batch."""
        slots = self.keeper.slots
        if not slots or not self.watch.ready or self._finisher.blocked:
            return 0
        if self.holdings.has_suspect():
            return 0
        open_now = self.holdings.in_slots
        per_s = self._opened.per_s(time.monotonic())
        target = prefetch_target(slots=slots, open_requests=open_now, per_s=per_s)
        missing = target - len(self.holdings.ready)
        worthwhile = max(1, target // 2)
        return min(missing, MOST_CLAIMED) if missing >= worthwhile else 0

    def _claim_once(self, count: int) -> ClaimReply | None:
        runs = self._eligible.names(self.watch.identity)
        if not runs:
            return None
        return self._jobs.claim(
            count,
            runs=runs,
            stream_mark_bytes=self._eligible.stream_mark_bytes(),
            worker_name=self._options.worker_name,
            alone=not len(self.holdings),
            lease_ms=self._options.timing.lease_ms,
        )

    # --- requests ---------------------------------------------------------------------------------

    async def _open_ready(self) -> None:
        while True:
            wait_s = self._open_what_fits()
            self._room_bell.ring()
            await self._work_bell.wait(wait_s)

    def _open_what_fits(self) -> float:
        """Open requests while there are jobs, slots and ramp; returns when to look again."""
        if not self.watch.ready:
            self._ramp.restart(time.monotonic())
        while self.holdings.ready and self.watch.ready:
            slots = self.keeper.slots
            if not slots:
                # Whoever has slots shall have these jobs.
                self._returns.add_ready()
                return 1.0
            if self.holdings.in_slots >= slots:
                return 1.0
            now_s = time.monotonic()
            wait_s = max(
                self._ramp.wait_s(now_s, open_requests=self.holdings.in_slots),
                self.watch.rest_s(),
            )
            if wait_s > 0:
                return wait_s
            self._opened.note(now_s)
            claim, alone = self.holdings.ready.popleft()
            job = Open(claim, alone=alone, slot=self._rids.take_slot(), since_s=now_s)
            self.holdings.open[job.key] = job
            job.task = self._spawn(self._serve(job))
        return 1.0

    async def _serve(self, job: Open) -> None:
        claim = job.claim
        record = self._eligible.record(claim.run)
        ended: Result | Returned = Returned()
        try:
            if record is not None and record.uid == claim.uid:
                timeout_s = request_timeout_s(record.params)
                ended = await self._prompter.serve(job, record.params, timeout_s)
        except asyncio.CancelledError:
            # Whoever cancels (`Endings`) has already said what becomes of the job.
            return
        finally:
            self.holdings.left(job)
            self._rids.free_slot(job.slot)
            self._work_bell.ring()
        self._endings.settle(job, ended)
        if isinstance(ended, Returned) and ended.fault:
            self.watch.report(ended.fault, config=ended.config)
            self._ramp.restart(time.monotonic())
            self._returns.add_ready()

    def _on_hang(self) -> None:
        self._ramp.restart(time.monotonic())
        self._endings.hang()
