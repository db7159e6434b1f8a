"""One process that is killed and started again, and what it held when it was."""

import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import msgspec
import redis

from common import names
from common.crashpoints import TRACE_VARIABLE, VARIABLE, last_point
from common.queue import Groups
from tests.chaos.kit import RUN
from tests.chaos.points import points_of
from tests.chaos.schedule import Kind
from tests.support.server_process import ServerProcess

RESTING = {
    "",
    "sink.took",
    "sink.pinned",
    "sink.acknowledged",
    "sink.void",
    "progress.kept",
    "progress.stored",
    "reconcile.marked",
    "end.written",
    "end.revoked",
    "feed.advanced",
}
"""Points after which a sink has nothing begun."""


class Held(msgspec.Struct, frozen=True):
    """What a process held while it was stopped.

    Attributes:
        work: Whether it was anything.
        jobs: Keys (hex) of the jobs that it leased.
        epoch: A worker group's, as its request ids begin.
        point: The last crash point that it had passed; empty before the first.
    """

    work: bool
    jobs: frozenset[str] = frozenset()
    epoch: str = ""
    point: str = ""


STOPS_S = 30.0

NOTHING = Held(work=False)


class Actor:
    """A place that one process after another takes.

    Args:
        kind, index: Which.
        command: Program and arguments; a function, since a producer's changes.
        folder: Of its logs and traces.
        env: Of every process of the round.

    Attributes:
        armed: The crash point that the present process dies at, with its count; or empty.
        leaving: It was told to end.
        frozen_until_s: Monotonic time at which it is woken; 0 when it runs.
        waits: Somebody will start it, after a while.
        due_s: Monotonic time from which on it may be started, where nobody will.
    """

    def __init__(
        self,
        kind: Kind,
        index: int,
        *,
        command: Callable[[], list[str]],
        folder: Path,
        env: Mapping[str, str],
    ) -> None:
        self.kind = kind
        self.name = f"{kind}{index}"
        self._command = command
        self._folder = folder
        self._env = env
        self._lives = 0
        self.process: ServerProcess | None = None
        self.armed = ""
        self.leaving = False
        self.frozen_until_s = 0.0
        self.waits = False
        self.due_s = 0.0

    @property
    def trace(self) -> Path:
        return self._folder / f"{self.name}.trace"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive()

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    @property
    def exit_code(self) -> int | None:
        return self.process.exit_code if self.process else None

    def start(self, *, arm: float | None = None, nth: int = 1) -> None:
        """Start the next process, to die at a crash point where one is picked."""
        points = points_of(self.kind) if arm is not None else ()
        point = points[int((arm or 0.0) * len(points))] if points else ""
        self.armed = f"{point}:{nth}" if point else ""
        self.leaving = self.waits = False
        self.frozen_until_s = 0.0
        self._lives += 1
        self.trace.unlink(missing_ok=True)
        armed = {VARIABLE: self.armed} if self.armed else {}
        self.process = ServerProcess(
            [sys.executable, "-m", *self._command()],
            log=self._folder / f"{self.name}-{self._lives}.log",
            env={**self._env, **armed, TRACE_VARIABLE: str(self.trace)},
        )

    def freeze(self) -> None:
        if self.process is not None:
            self.process.send(signal.SIGSTOP)
            wait_stopped(self.pid)

    def thaw(self) -> None:
        self.frozen_until_s = 0.0
        if self.alive and self.process is not None:
            self.process.send(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
        self.frozen_until_s = 0.0

    def tell_to_end(self) -> None:
        assert self.process is not None
        self.leaving = True
        self.process.send(signal.SIGTERM)
        self.thaw()

    def point(self) -> str:
        return last_point(self.trace)

    def said(self) -> str:
        """The end of what the present process has said."""
        return self.process.tail() if self.process else ""


def wait_stopped(pid: int) -> None:
    """Wait until every thread of a process has stopped: SIGSTOP takes effect a little later."""
    deadline_s = time.monotonic() + STOPS_S
    while time.monotonic() < deadline_s:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return
        if stat.rpartition(")")[2].split()[0] in {"T", "Z", "X"}:
            return
        time.sleep(0.0002)
    raise TimeoutError(f"process {pid} does not stop")


def held_by_group(client: "redis.Redis", pid: int, point: str) -> Held:
    """Read which jobs the worker group with this process leases."""
    epoch = next((g.epoch for g in Groups(client).fresh() if g.pid == pid), "")
    if not epoch:
        return NOTHING
    leased = cast("list[bytes]", client.zrange(names.leases(RUN), 0, -1))
    with client.pipeline(transaction=False) as pipe:
        for job_id in leased:
            pipe.hget(names.rq_job(job_id.decode()), "holder")
        holders = pipe.execute()
    jobs = frozenset(
        job.decode()
        for job, holder in zip(leased, holders, strict=True)
        if holder == epoch.encode()
    )
    return Held(bool(jobs), jobs, epoch, point)


def held_by_sink(point: str) -> Held:
    """Tell from the last point that a sink passed whether it was in the midst of something."""
    return Held(point not in RESTING, point=point)


def held_by_producer(client: "redis.Redis", pid: int, point: str) -> Held:
    """Tell whether a producer has begun to add prompts and not ended."""
    opened = cast("dict[bytes, bytes]", client.hgetall(names.open_producers(RUN)))
    mine = any(msgspec.json.decode(about).get("pid") == pid for about in opened.values())
    return Held(mine, point=point)
