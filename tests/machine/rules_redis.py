"""What happens to Redis, to the time, and what people do with RQ's own tools."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from rq import Queue
from rq.exceptions import InvalidJobOperation, NoSuchJobError
from rq.job import Job
from rq.registry import FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.serializers import JSONSerializer
from rq.suspension import resume, suspend

from common import names
from tests.machine.rules_base import RULE_RUNS, Base, hit

WHICH = st.integers(0, 15)


class RedisRules(Base):
    """Rules of Redis and of time."""

    may_rewind = True

    @rule(step_ms=st.sampled_from([5_000, 12_000, 19_000, 31_000, 65_000]))
    def time_passes(self, step_ms: int) -> None:
        self.world.pass_time(step_ms)
        hit("time passes")

    @precondition(lambda self: self.may_rewind and self.world.points)
    @rule(which=st.integers(0, 4))
    def rewind(self, which: int) -> None:
        self.world.rewound = True
        self.world.restart(self.world.points[which % len(self.world.points)])
        hit("rewind")

    @rule(seldom=st.integers(0, 2))
    def restart(self, seldom: int) -> None:
        if not seldom:
            self.world.restart(self.world.point())
            hit("restart")

    @precondition(lambda self: self.may_rewind)
    @rule(seldom=st.integers(0, 3))
    def wipe(self, seldom: int) -> None:
        if not seldom:
            self.world.rewound = True
            self.world.restart(None)
            hit("wipe")


class ToolRules(Base):
    """Rules of RQ's tools."""

    @contextmanager
    def _on(self, run: str, which: int) -> Iterator[Job | None]:
        """One of the run's jobs, whatever state it is in."""
        model = self.world.models[run]
        found = sorted(
            key for key in model.keys if self.world.client.exists(names.rq_job(key.hex()))
        )
        if not found:
            yield None
            return
        key = found[which % len(found)]
        model.touch([key])
        try:
            job = Job.fetch(key.hex(), connection=self.world.client, serializer=JSONSerializer)
        except NoSuchJobError:
            job = None
        try:
            yield job
        except (NoSuchJobError, InvalidJobOperation):
            hit("tool refused")

    def _queue(self, run: str) -> Queue:
        return Queue(run, connection=self.world.client, serializer=JSONSerializer)

    @rule(run=RULE_RUNS, which=WHICH)
    def cancel_job(self, run: str, which: int) -> None:
        with self._on(run, which) as job:
            if job:
                job.cancel()
                hit("tool cancelled")

    @rule(run=RULE_RUNS, which=WHICH)
    def delete_job(self, run: str, which: int) -> None:
        with self._on(run, which) as job:
            if job:
                job.delete()
                hit("tool deleted")

    @rule(run=RULE_RUNS, which=WHICH)
    def requeue(self, run: str, which: int) -> None:
        registry = FailedJobRegistry(queue=self._queue(run))
        raw = cast("list[bytes]", self.world.client.zrange(registry.key, 0, -1))
        ids = [member.decode() for member in raw]
        if ids:
            job_id = ids[which % len(ids)]
            self.world.models[run].touch([bytes.fromhex(job_id)])
            try:
                registry.requeue(job_id)
                hit("tool requeued")
            except (NoSuchJobError, InvalidJobOperation):
                hit("tool refused")

    @rule(run=RULE_RUNS)
    def empty(self, run: str) -> None:
        queue = self._queue(run)
        self.world.models[run].touch(bytes.fromhex(job_id) for job_id in queue.job_ids)
        if queue.job_ids:
            queue.empty()  # type: ignore[no-untyped-call]
            hit("tool emptied")

    def clean_registries(self, run: str) -> None:
        queue = self._queue(run)
        for registry in (StartedJobRegistry, FailedJobRegistry, FinishedJobRegistry):
            registry(queue=queue).cleanup()
        hit("tool cleaned")

    def suspend_or_resume(self, *, on: bool) -> None:
        (suspend if on else resume)(self.world.client)
        hit(f"tool suspend {on}")
