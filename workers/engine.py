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
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

from common.errors import HeadraceError, RedisUnusableError
from common.models import Claim, Result
from common.queue import GroupFigures, Groups, Jobs
from common.queue.ledger import request_timeout_s
from workers.aborts import abort_all
from workers.capacity import bound_of
from workers.desk import Bell, RedisDesk
from workers.eligible import Eligible
from workers.faults import Kind, Verdict
from workers.finisher import Finisher
from workers.holdings import Holdings, JobKey, Open
from workers.keeper import Keeper
from workers.options import GroupOptions
from workers.pace import Ramp, Throughput, prefetch_target
from workers.rids import Rids
from workers.serve import Prompter, Returned, failed
from workers.sglang import SGLangClient
from workers.watch import ServerWatch

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.25
PUBLISH_EVERY_S = 3.0
FLUSH_S = 5.0
MOST_CLAIMED = 256


class Engine:
    """Runs one worker group until told to stop.

    Args:
        options: Who this is and how it should behave.
        jobs, groups: The queue, from this process's side.
        eligible: Which runs this server may serve.
        on_beat: Called every few seconds with (busy, completed, failed) for RQ's own records.
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
        self._groups = groups
        self._eligible = eligible
        self._on_beat = on_beat
        self._work_bell = Bell()
        self._room_bell = Bell()
        self._return_bell = Bell()
        self._tasks: asyncio.TaskGroup | None = None
        self._drain = asyncio.Event()
        self._hurry = asyncio.Event()
        self.holdings = Holdings()
        self._work = RedisDesk("queue")
        self._beat = RedisDesk("heartbeat")
        self._rids = Rids(jobs.epoch)
        self._client = SGLangClient(
            options.server, slots=options.most_connections, api_key=options.api_key
        )
        self.watch = ServerWatch(self._client, on_change=self._ring)
        self._finisher = Finisher(jobs, self.holdings, self._work)
        self._prompter = Prompter(self.watch, self, self._rids)
        self._ramp = Ramp(options.ramp)
        self._opened = Throughput(time.monotonic())
        self._occupied: deque[tuple[float, int, int]] = deque(maxlen=240)
        self.keeper = Keeper(
            jobs=jobs,
            holdings=self.holdings,
            desk=self._beat,
            client=self._client,
            watch=self.watch,
            rids=self._rids,
            host=options.host,
            bound=self.bound,
            on_change=self._ring,
            on_gone=self._lose,
            on_convicted=self._convict,
        )

    def bound(self) -> int:
        """How many requests may be open at the server, over all processes."""
        identity, load = self.watch.identity, self.watch.load
        cap = (load and load.cap) or (identity and identity.cap) or None
        return bound_of(self._options.concurrency, cap)

    def stop(self) -> None:
        """Begin to drain; the second call does not wait for what is open."""
        if self._drain.is_set():
            self._hurry.set()
        self._drain.set()
        self._ring()

    def _ring(self) -> None:
        """Something changed: there may be something to open, or room for more."""
        self._work_bell.ring()
        self._room_bell.ring()

    async def charge(self, claim: Claim, reason: str) -> int:
        """Count an attempt in Redis (`serve.Charger`)."""
        return await self._work.ask(lambda: self._jobs.charge(claim.run, claim.key, reason))

    async def run(self) -> None:
        """Work until `stop`, then drain.

        Raises:
            BackendError: Another worker group drives this server.
        """
        try:
            async with self._client, asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                await self._take_over()
                loops = [
                    tasks.create_task(self.watch.run(self._cancel_open), name="watch"),
                    tasks.create_task(self.keeper.keep_slots(), name="slots"),
                    tasks.create_task(self.keeper.keep_leases(), name="leases"),
                    tasks.create_task(self.keeper.reap(), name="reap"),
                    tasks.create_task(self._finisher.run(), name="finish"),
                    tasks.create_task(self._return_jobs(), name="return"),
                    tasks.create_task(self._publish(), name="publish"),
                ]
                claims = tasks.create_task(self._claim(), name="claim")
                opener = tasks.create_task(self._open_ready(tasks), name="open")
                await self._drain.wait()
                claims.cancel()
                opener.cancel()
                await self._wind_down()
                for task in loops:
                    task.cancel()
        except* HeadraceError as group:
            raise group.exceptions[0] from None
        finally:
            self._work.close()
            self._beat.close()

    # --- claiming ---------------------------------------------------------------------------------

    async def _take_over(self) -> None:
        while not self._drain.is_set():
            try:
                await self.keeper.take_over()
            except RedisUnusableError:
                await asyncio.sleep(self._beat.wait_s())
            else:
                return

    async def _claim(self) -> None:
        while True:
            count = self._claimable()
            if not count:
                await self._room_bell.wait(IDLE_POLL_S)
                continue
            try:
                reply = await self._work.ask(lambda count=count: self._claim_once(count))
            except RedisUnusableError:
                await asyncio.sleep(self._work.wait_s())
                continue
            if reply is None or not reply.claims:
                await asyncio.sleep(IDLE_POLL_S if reply is None or reply.why != "ok" else 0)
                continue
            self.holdings.ready.extend((claim, reply.alone) for claim in reply.claims)
            self._work_bell.ring()

    def _claimable(self) -> int:
        """How many jobs to claim now: none while anything is in the way, else a worthwhile batch."""
        slots = self.keeper.slots
        if not slots or not self.watch.ready or self._finisher.blocked:
            return 0
        if any(job.alone for job in self.holdings.open.values()):
            return 0
        open_now = len(self.holdings.open)
        per_s = self._opened.per_s(time.monotonic())
        target = prefetch_target(slots=slots, open_requests=open_now, per_s=per_s)
        missing = target - len(self.holdings.ready)
        worthwhile = max(1, target // 2)
        return min(missing, MOST_CLAIMED) if missing >= worthwhile else 0

    def _claim_once(self, count: int):  # noqa: ANN202
        runs = self._eligible.names(self.watch.identity)
        if not runs:
            return None
        return self._jobs.claim(
            count,
            runs=runs,
            stream_mark_bytes=self._eligible.stream_mark_bytes(),
            worker_name=self._options.worker_name,
            alone=not len(self.holdings),
        )

    # --- requests ---------------------------------------------------------------------------------

    async def _open_ready(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            wait_s = self._open_what_fits(tasks)
            self._room_bell.ring()
            await self._work_bell.wait(wait_s)

    def _open_what_fits(self, tasks: asyncio.TaskGroup) -> float:
        """Open requests while there are jobs, slots and ramp; returns when the ramp lets the next."""
        while self.holdings.ready and self.watch.ready:
            if len(self.holdings.open) >= self.keeper.slots:
                if self.keeper.slots:
                    self._ramp.note_full()
                return 1.0
            now_s = time.monotonic()
            wait_s = self._ramp.wait_s(now_s)
            if wait_s > 0:
                return wait_s
            self._ramp.opened(now_s)
            self._opened.note(now_s)
            claim, alone = self.holdings.ready.popleft()
            job = Open(claim, alone=alone, slot=self._rids.take_slot(), since_s=now_s)
            self.holdings.open[claim.run, claim.key] = job
            job.task = tasks.create_task(self._serve(job))
        return 1.0

    async def _serve(self, job: Open) -> None:
        claim = job.claim
        key = (claim.run, claim.key)
        record = self._eligible.record(claim.run)
        ended: Result | Returned = Returned()
        try:
            if record is not None and record.uid == claim.uid:
                timeout_s = request_timeout_s(record.params)
                ended = await self._prompter.serve(job, record.params, timeout_s)
        except asyncio.CancelledError:
            # Cancelled by us (a hang, a lost lease, the end of the grace); whoever cancelled has
            # already said what becomes of the job.
            return
        finally:
            self.holdings.open.pop(key, None)
            self._rids.free_slot(job.slot)
            self._work_bell.ring()
        if isinstance(ended, Result):
            self._finisher.add(ended)
            return
        self.holdings.returning[key] = ended.died
        self._return_bell.ring()
        if ended.fault:
            self._server_fault(ended)

    def _server_fault(self, returned: Returned) -> None:
        self.watch.report(returned.fault, config=returned.config)
        self._ramp.restart()
        for key in self.holdings.take_ready():
            self.holdings.returning.setdefault(key, False)

    def _cancel_open(self) -> None:
        """Nothing moves at the server: give back everything that is open there."""
        self._ramp.restart()
        self._abort(self.holdings.open.values())
        for key, job in list(self.holdings.open.items()):
            self.holdings.returning[key] = True
            if job.task is not None:
                job.task.cancel()
        for key in self.holdings.take_ready():
            self.holdings.returning.setdefault(key, False)

    def _abort(self, jobs: Iterable[Open]) -> None:
        """Abort requests in passing: nobody waits, and a server that is gone has none."""
        rids = [job.rid for job in jobs if job.rid]
        if rids and self._tasks is not None:
            self._tasks.create_task(abort_all(self._client, rids))

    def _lose(self, key: JobKey) -> None:
        """The job has ended elsewhere, or its run was cancelled: stop working on it."""
        job = self.holdings.open.get(key)
        if job is None:
            kept = deque(
                item for item in self.holdings.ready if (item[0].run, item[0].key) != key
            )
            self.holdings.ready = kept
            return
        self._abort([job])
        if job.task is not None:
            job.task.cancel()

    def _convict(self, claim: Claim) -> None:
        verdict = Verdict(
            kind=Kind.PROMPT,
            reason="poison_worker",
            message="worker processes died with it, the last time alone",
        )
        self._finisher.add(
            failed(claim, verdict, attempts=claim.attempts, server=self._options.server)
        )

    async def _return_jobs(self) -> None:
        while True:
            await self._return_bell.wait(1.0)
            await self._give_back()

    async def _give_back(self) -> None:
        for died in (False, True):
            keys = [key for key, with_it in self.holdings.returning.items() if with_it is died]
            if not keys:
                continue
            try:
                await self._work.ask(lambda keys=keys, died=died: self._jobs.give_back(keys, died=died))
            except RedisUnusableError:
                await asyncio.sleep(self._work.wait_s())
                continue
            for key in keys:
                self.holdings.returning.pop(key, None)

    # --- stopping ---------------------------------------------------------------------------------

    async def _wind_down(self) -> None:
        log.info(
            "stopping: %d open requests get %.0f s, %d held jobs go back",
            len(self.holdings.open),
            self._options.grace_s,
            len(self.holdings.ready),
        )
        for key in self.holdings.take_ready():
            self.holdings.returning[key] = False
        await self._give_back()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.grace_s):
                while self.holdings.open and not self._hurry.is_set():
                    await self._work_bell.wait(0.2)
        if self.holdings.open:
            rids = [job.rid for job in self.holdings.open.values() if job.rid]
            for key, job in list(self.holdings.open.items()):
                self.holdings.returning[key] = False
                if job.task is not None:
                    job.task.cancel()
            await abort_all(self._client, rids)
        await self._give_back()
        if not await self._finisher.flush(FLUSH_S):
            log.warning("%d results could not be recorded: they will be redone", len(self.holdings.unsent))
        with contextlib.suppress(RedisUnusableError):
            await self.keeper.release()
            await self._beat.ask(lambda: self._groups.withdraw(self._jobs.epoch))

    # --- figures ----------------------------------------------------------------------------------

    async def _publish(self) -> None:
        while True:
            with contextlib.suppress(RedisUnusableError):
                figures = self.figures()
                await self._beat.ask(lambda figures=figures: self._say(figures))
            for _ in range(12):
                self._occupied.append((time.monotonic(), len(self.holdings.open), self.keeper.slots))
                await asyncio.sleep(PUBLISH_EVERY_S / 12)

    def _say(self, figures: GroupFigures) -> None:
        self._groups.publish(figures)
        self._eligible.refresh()
        self._on_beat(bool(self.holdings.open), self._finisher.completed, self._finisher.failed)

    def figures(self) -> GroupFigures:
        """Say how this process is, design.md §5."""
        watch, load, identity = self.watch, self.watch.load, self.watch.identity
        now_s = time.monotonic()
        wrong = self._eligible.wrong_model if watch.ready else ""
        state = "draining" if self._drain.is_set() else "wrong_model" if wrong else watch.state
        return GroupFigures(
            group=self._jobs.group,
            epoch=self._jobs.epoch,
            host=self._options.host,
            pid=self._options.pid,
            server=self._options.server,
            state=state,
            detail=wrong or watch.detail,
            in_flight=len(self.holdings.open),
            leased=len(self.holdings),
            bound=self.bound() if identity else 0,
            cap=(load and load.cap) or (identity and identity.cap) or None,
            running=load.running if load else None,
            queued=load.queued if load else None,
            gen_tokens_per_s=watch.gen_tokens_per_s,
            kv_usage=load.token_usage if load else None,
            mamba_usage=load.mamba_usage if load else None,
            strategy=identity.strategy if identity else None,
            server_version=identity.version if identity else None,
            model=identity.model if identity else None,
            occupancy=self._occupancy(),
            oldest_s=self.holdings.oldest_s(now_s),
            completed=self._finisher.completed,
        )

    def _occupancy(self) -> float | None:
        since_s = time.monotonic() - 60
        seen = [(used, slots) for at_s, used, slots in self._occupied if at_s >= since_s and slots]
        return sum(used / slots for used, slots in seen) / len(seen) if seen else None
