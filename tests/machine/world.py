"""The world of one example: a Redis, two runs with equal ids and their outputs, whoever works."""

import contextlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import psutil
import redis

from common import crashpoints, names
from common.errors import StoreUnusableError
from common.models import RunRecord
from common.queue import Jobs
from common.queue.sinklease import new_token
from common.store import ObjectStore
from common.store.directory import DirectoryStore
from common.store.frames import decompress
from tests.machine import process as processes
from tests.machine import redis_state
from tests.machine.model import Known, RunModel
from tests.machine.process import CURRENT, GOOD, Deed, Fate, Process, StuckError
from tests.machine.workers import POISON, Server, Worker
from tests.support.memory_store import MemoryStore
from tests.support.redis_server import RedisServer
from workers.sink.batch import Limits
from workers.sink.run_sink import RunSink

RUNS = ("alpha", "beta")
HITS: Counter[str] = Counter()
"""How often each rule did what it is for; over all examples."""

_sleep = time.sleep


class Point(msgspec.Struct):
    """What Redis held at an instant, and what it had been told."""

    state: redis_state.State
    at_ms: float
    known: dict[str, Known]


class SinkProcess:
    """A sink: one process, one token, a `RunSink` a run."""

    def __init__(self, process: Process, *, rows: int, seconds: float) -> None:
        self.process = process
        self.token = new_token()
        self.limits = Limits(rows=rows, seconds=seconds, first_seconds=seconds)
        self.runs: dict[str, RunSink] = {}


class World:
    """All that an example plays with.

    Args:
        conditional: Whether the outputs honour conditions.
        directory: They are real directories; else they are in memory.
    """

    def __init__(self, *, conditional: bool = True, directory: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hr-machine-"))
        self.server = RedisServer("valkey").start()
        self.client = self.server.client()
        self.skipped_ms = 0.0
        self.serial = 0
        self.steps = 0
        self.conditional = conditional
        self.stores: dict[str, ObjectStore] = {}
        self.urls: dict[str, str] = {}
        for run in RUNS:
            store = self._store(run, directory=directory)
            self.urls[run] = store.url
            self.stores[store.url] = store
        self.models = {run: RunModel(run) for run in RUNS}
        self.servers = [Server(f"http://gpu{n}.test:30000") for n in (0, 1)]
        self.workers: dict[str, Worker] = {}
        self.sinks: dict[str, SinkProcess] = {}
        self.frozen: list[tuple[Deed, Callable[[Deed], None]]] = []
        self.points: list[Point] = []
        self.rewound = False
        self.may_poison = True
        self.dead_epochs: list[tuple[str, Server]] = []
        self.all_processes: list[Process] = []

    def _store(self, run: str, *, directory: bool) -> ObjectStore:
        if directory:
            store: ObjectStore = DirectoryStore(self.folder / "out" / run)
            store.probe()
            return store
        memory = MemoryStore(conditional=self.conditional)
        memory.url = str(self.folder / "out" / run)
        return _Refusing(memory)

    # --- Time and processes ----------------------------------------------------------------------

    def now_ms(self) -> float:
        """The one clock that never goes back, of all processes."""
        return time.monotonic() * 1000 + self.skipped_ms

    def pass_time(self, step_ms: int) -> None:
        self.skipped_ms += step_ms
        redis_state.age(self.client, step_ms)

    def process(self, name: str) -> Process:
        self.serial += 1
        process = Process(f"{name}-{self.serial}", str(self.server.socket), self.stores)
        self.all_processes.append(process)
        return process

    def act(
        self,
        process: Process,
        call: Callable[[], Any],
        *,
        fate: Fate = GOOD,
        then: Callable[[Deed], None] | None = None,
    ) -> Deed:
        """Carry something out; `then` looks at it when it has ended, perhaps after a thaw."""
        deed = Deed(process, call, fate)
        deed.go()
        if deed.word == "frozen":
            self.frozen.append((deed, then or (lambda _: None)))
        else:
            self._ended(deed, then)
        return deed

    def thaw(self, which: int) -> None:
        deed, then = self.frozen.pop(which % len(self.frozen))
        deed.wake()
        self._ended(deed, then)

    def _ended(self, deed: Deed, then: Callable[[Deed], None] | None) -> None:
        if deed.word == "broken":
            assert deed.error is not None
            raise deed.error
        HITS[f"  deed {deed.word}" + (f" at {deed.at}" if deed.at else "")] += 1
        if then is not None:
            then(deed)

    def command(
        self, call: Callable[[Process], Any], *, fate: Fate, then: Callable[[Deed], None]
    ) -> Deed:
        """Run what a person types: a process of its own."""
        process = self.process("command")
        return self.act(process, lambda: call(process), fate=fate, then=then)

    def worker(self, name: str) -> Worker:
        """The worker process of this name; a new one where there is none."""
        if name not in self.workers:
            server = self.servers[int(name[1])]
            self.workers[name] = Worker(
                self.process(name), server, group=f"gpu{name[1]}@test", clock=self.now_ms
            )
        return self.workers[name]

    def sink(self, name: str) -> SinkProcess:
        if name not in self.sinks:
            quick = name != "slow"
            self.sinks[name] = SinkProcess(
                self.process(name), rows=3, seconds=0.0 if quick else 600.0
            )
        return self.sinks[name]

    def run_sink(self, sink: SinkProcess, run: str) -> RunSink | None:
        """The sink's hands on a run, where Redis knows it."""
        record = self.record(run)
        if record is None:
            return None
        if run not in sink.runs:
            sink.runs[run] = RunSink(
                sink.process.client,
                sink.process.store(record.output),
                record,
                token=sink.token,
                limits=sink.limits,
                clock=lambda: self.now_ms() / 1000,
            )
        return sink.runs[run]

    def jobs(self) -> Jobs:
        return Jobs(self.client, epoch="observer", group="observer", server="observer")

    def record(self, run: str) -> RunRecord | None:
        raw = self.client.hget(names.run(run), "record")
        return msgspec.json.decode(raw, type=RunRecord) if raw else None

    def stored_record(self, run: str) -> RunRecord | None:
        raw = self.stores[self.urls[run]].get(names.RUN_JSON)
        return msgspec.json.decode(raw, type=RunRecord) if raw else None

    # --- Redis -----------------------------------------------------------------------------------

    def point(self) -> Point:
        known = {run: model.known.copy() for run, model in self.models.items()}
        return Point(redis_state.keep(self.client), self.now_ms(), known)

    def remember(self, *, every: int, most: int) -> None:
        """Keep what Redis holds, now and then: it may come back with it."""
        self.steps += 1
        if self.steps % every == 1:
            self.points = [*self.points[-most + 1 :], self.point()]

    def restart(self, point: Point | None) -> None:
        """A new server process with what the point holds; empty without one."""
        self.client.close()
        self.server.wipe()
        self.client = self.server.client()
        for run, model in self.models.items():
            model.known = point.known[run].copy() if point else Known()
        if point is not None:
            redis_state.put_back(self.client, point.state)
            redis_state.age(self.client, int(self.now_ms() - point.at_ms))

    def close(self) -> None:
        for sink in self.sinks.values():
            for run_sink in sink.runs.values():
                for partition in run_sink._sinks.values():
                    partition._reader._pool.shutdown()
        for process in self.all_processes:
            process.close()
        self.client.close()
        self.server.remove()


class _Refusing:
    """A memory store that cannot keep what bears the mark of poison."""

    def __init__(self, inner: MemoryStore) -> None:
        self.inner = inner
        self.url = inner.url
        self.conditional = inner.conditional
        self.probe, self.put, self.get = inner.probe, inner.put, inner.get
        self.list, self.delete = inner.list, inner.delete

    def put_if_absent(self, name: str, data: bytes, *, rows_sha256: str = "") -> bool:
        if name.startswith(names.SHARDS) and POISON.encode() in decompress(data):
            raise StoreUnusableError(f"{name}: refused", retryable=False)
        return self.inner.put_if_absent(name, data, rows_sha256=rows_sha256)


def _impatient_sleep(seconds: float) -> None:
    if CURRENT.deed is not None:
        raise StuckError(f"waits for {seconds} s")
    _sleep(seconds)


def _open_store(url: str, endpoint_url: str | None = None, *, create: bool = True) -> ObjectStore:
    del endpoint_url, create
    assert CURRENT.deed is not None
    return CURRENT.deed.process.store(url)


def _connect(url: str) -> "redis.Redis":
    del url
    assert CURRENT.deed is not None
    return CURRENT.deed.process.client


@contextlib.contextmanager
def playing(world: World) -> Iterator[None]:
    """Let commands run in this process: on the world's Redis and stores, and waiting for nobody.

    `inputs/` gets an object for three rows, and Redis a call for two, so that there is a between.
    """
    with contextlib.ExitStack() as stack:
        for target, value in {
            "time.sleep": _impatient_sleep,
            "producer.queueing.connect": _connect,
            "producer.joining.open_store": _open_store,
            "producer.cancel.open_store": _open_store,
            "producer.locate.open_store": _open_store,
            "producer.resume.open_store": _open_store,
            "producer.spool.BATCH_ROWS": 2,
            "producer.adding.OBJECT_ROWS": 3,
            "producer.adding.CALL_ROWS": 2,
            "producer.accepted.STORE_WAIT_S": 0.0,
            "common.feeder.CALL_ROWS": 2,
            "common.queue.cancels.END_STEP": 2,
            "common.queue.jobs.MOST_LOST": 2,
        }.items():
            stack.enter_context(mock.patch(target, value))
        # Every command has the pid of this process: one that was killed must not seem to live.
        alive = lambda pid: pid == os.getpid() and bool(world.frozen)  # noqa: E731
        stack.enter_context(mock.patch.object(psutil, "pid_exists", alive))
        stack.enter_context(mock.patch.object(crashpoints, "watcher", processes.reached))
        yield
