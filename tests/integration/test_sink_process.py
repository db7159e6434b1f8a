"""The sink as a process: killed between every two durable steps, stopped, refused at its start."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path

import pytest
import redis
from typing_extensions import override

from common import catalog, names
from common.errors import StoreUnusableError
from common.store import open_store
from tests.support.memory_store import MemoryStore
from tests.support.redis_server import RedisServer
from tests.support.rewind import rewind, save_point
from tests.support.run_world import RUN, World
from tests.support.s3 import S3Server
from tests.support.server_process import wait_until
from tests.support.sink_process import SinkProcess
from tests.support.sinks import expire_lease
from workers.sink import sink as sink_module
from workers.sink.batch import Limits
from workers.sink.sink import Sink, SinkOptions

DONE = ("--until-done", "--batch-rows", "4", RUN)
STORED_THEN_KILLED = -signal.SIGKILL


@pytest.fixture
def world(redis_client: "redis.Redis", tmp_path: Path) -> Iterator[World]:
    made = World(redis_client, open_store(str(tmp_path / "out")))
    yield made
    made.close()


@pytest.fixture(scope="session")
def s3_servers() -> Iterator[Callable[[str], S3Server]]:
    with ExitStack() as running:
        yield cache(lambda kind: running.enter_context(S3Server(kind)))


def complete(world: World, valkey: RedisServer, folder: Path, **env: str) -> int:
    """Start another sink after a killed one, and let it bring the run to its end."""
    for partition in range(world.record.partitions):
        expire_lease(world, partition)
    world.client.delete(names.maintenance(RUN))
    with SinkProcess(valkey.url, folder, *DONE, env=env) as sink:
        return sink.wait()


STORE_POINTS = [
    "sink.intent",
    "sink.built",
    "sink.shards",
    "sink.failures",
    "sink.keys",
    "sink.manifest",
    "sink.acknowledged",
    "end.pending",
    "end.written",
]


@pytest.mark.parametrize("point", [*STORE_POINTS, "sink.shards:2", "sink.manifest:3"])
def test_killed_at_any_step_each_key_is_stored_once(
    world: World, valkey: RedisServer, tmp_path: Path, point: str
) -> None:
    world.finish([0, 1, 2], "completed")
    world.finish([3], "failed")
    world.finish(range(4, 10))

    with SinkProcess(valkey.url, tmp_path, *DONE, crash_at=point) as sink:
        assert sink.wait() == STORED_THEN_KILLED
    assert complete(world, valkey, tmp_path) == 1

    assert len(world.records()) == 10
    world.check_store()
    world.check_counts()
    assert world.store.get(names.SUCCESS) is not None


@pytest.mark.parametrize("kind", ["moto", "rclone"])
@pytest.mark.parametrize("point", ["sink.shards", "sink.keys", "sink.manifest"])
def test_killed_at_any_step_each_key_is_stored_once_on_s3(
    redis_client: "redis.Redis",
    valkey: RedisServer,
    s3_servers: Callable[[str], S3Server],
    tmp_path: Path,
    kind: str,
    point: str,
) -> None:
    server = s3_servers(kind)
    store = server.store(server.new_bucket(), "runs/demo")
    store.probe()
    world = World(redis_client, store)
    world.finish(range(9))
    world.finish([9], "failed")
    env = server.environment()

    with SinkProcess(valkey.url, tmp_path, *DONE, crash_at=point, env=env) as sink:
        assert sink.wait() == STORED_THEN_KILLED
    assert complete(world, valkey, tmp_path, **env) == 1

    assert len(world.records()) == 10
    world.check_store()
    world.check_counts()


@pytest.mark.parametrize(
    "point",
    [
        "reconcile.adopting",
        "reconcile.closed",
        "reconcile.taught",
        "reconcile.dropped",
        "reconcile.bodies",
        "reconcile.inputs",
        "reconcile.marked",
    ],
)
def test_killed_in_a_reconcile_each_key_is_stored_once(tmp_path: Path, point: str) -> None:
    with (
        RedisServer("valkey", appendonly=True, appendfsync="always") as server,
        closing(World(server.client(), open_store(str(tmp_path / "out")))) as world,
    ):
        world.finish([0])
        kept = save_point(server)
        world.finish(range(1, 7))
        world.finish([7], "failed")
        with SinkProcess(server.url, tmp_path, *DONE, crash_at="sink.shards:2") as sink:
            assert sink.wait() == STORED_THEN_KILLED
        rewind(server, kept)
        world.use(server.client())

        with SinkProcess(server.url, tmp_path, *DONE, crash_at=point) as sink:
            assert sink.wait() == STORED_THEN_KILLED
        world.finish(range(10))
        assert complete(world, server, tmp_path) in {0, 1}

        assert len(world.current()) == 10
        world.check_store()
        world.check_counts()


def test_redis_killed_under_a_sink_is_waited_for(tmp_path: Path) -> None:
    with (
        RedisServer("valkey", appendonly=True, appendfsync="always") as server,
        closing(World(server.client(), open_store(str(tmp_path / "out")))) as world,
    ):
        with SinkProcess(server.url, tmp_path, *DONE) as sink:
            wait_until(lambda: "serving" in sink.text(), "a sink at work")
            server.kill()
            wait_until(lambda: "waiting for Redis" in sink.text(), "that it says so")
            server.start()
            world.use(server.client())
            world.finish(range(10))
            assert sink.wait() == 0

        assert len(world.records()) == 10
        world.check_store()
        world.check_counts()


def test_sigterm_stores_what_waits_and_leaves_the_partition(
    world: World, valkey: RedisServer, tmp_path: Path
) -> None:
    with SinkProcess(valkey.url, tmp_path, RUN) as sink:
        wait_until(
            lambda: bool(world.client.hget(names.sink(RUN, 0), "token")), "a sink with a lease"
        )
        world.finish(range(5))
        sink.process.terminate()
        assert sink.wait() == 143

    assert len(world.records()) == 5
    assert world.client.hget(names.sink(RUN, 0), "token") is None
    world.check_counts()


def test_a_frozen_sinks_partition_is_taken_over_and_nothing_is_doubled(
    world: World, valkey: RedisServer, tmp_path: Path
) -> None:
    world.finish(range(10))
    with SinkProcess(valkey.url, tmp_path, "--batch-rows", "4", RUN) as frozen:
        wait_until(lambda: world.waiting() < 10, "a sink at work")
        frozen.process.send_signal(signal.SIGSTOP)
        assert complete(world, valkey, tmp_path) == 0
        frozen.process.send_signal(signal.SIGCONT)
        world.accept(4)
        world.finish(range(10, 14))
        wait_until(lambda: world.waiting() == 0, "the last four are stored")

    assert len(world.records()) == 14
    world.check_store()
    world.check_counts()


def test_an_output_that_has_gone_ends_the_start_and_is_named(
    redis_client: "redis.Redis", valkey: RedisServer, tmp_path: Path
) -> None:
    store = MemoryStore()
    store.url = str(tmp_path / "file" / "out")
    (tmp_path / "file").write_text("no directory")
    World(redis_client, store)

    began_s = time.monotonic()
    with SinkProcess(valkey.url, tmp_path, RUN) as sink:
        assert sink.wait(20) == 4
        assert store.url in sink.text()
        assert "Traceback" not in sink.text()
    assert time.monotonic() - began_s < 10


class AwayAtFirst(MemoryStore):
    """A store whose first probes find nobody there."""

    def __init__(self, probes: int) -> None:
        super().__init__()
        self.left = probes

    @override
    def probe(self) -> None:
        if self.left:
            self.left -= 1
            raise StoreUnusableError("the store does not answer", retryable=True)
        super().probe()


def test_a_store_that_is_away_at_the_start_is_waited_for(
    redis_client: "redis.Redis",
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As one that goes away later is: whoever starts a sink need not know of an outage."""
    monkeypatch.setattr(sink_module, "PROBE_LIMIT_S", 0.0)
    monkeypatch.setattr(sink_module, "OPEN_AGAIN_S", 0.01)
    store = AwayAtFirst(probes=3)
    world = World(redis_client, store)
    world.finish(range(4))
    options = SinkOptions(
        runs=(RUN,), limits=Limits(rows=4), state_dir=tmp_path, poll_s=0.01, until_done=True
    )

    sink = Sink(redis_client, options, open_output=lambda _: store)
    running = threading.Thread(target=sink.run)
    running.start()
    wait_until(lambda: world.waiting() == 0, "a shard")
    sink.stop()
    running.join()

    assert store.left == 0
    assert [text for text in caplog.messages if "the store does not answer" in text] == [
        f"run {RUN} waits, nothing is lost: the store does not answer"
    ]


def test_another_runs_output_ends_the_start(
    redis_client: "redis.Redis", valkey: RedisServer, tmp_path: Path
) -> None:
    # Case B84: two runs must not write into one prefix.
    store = open_store(str(tmp_path / "out"))
    World(redis_client, store)
    redis_client.flushall()
    World(redis_client, store, uid="f" * 32)
    before = [found.name for found in store.list()]

    with SinkProcess(valkey.url, tmp_path, RUN) as sink:
        assert sink.wait(20) == 5
        assert "give another --output" in sink.text()
    assert [found.name for found in store.list()] == before


def test_progress_is_written_beside_the_results_and_in_the_state_directory(
    world: World, valkey: RedisServer, tmp_path: Path
) -> None:
    world.finish(range(10))
    assert complete(world, valkey, tmp_path) == 0

    for path in (
        tmp_path / "out" / "progress.json",
        tmp_path / ".headrace" / RUN / "progress.json",
    ):
        figures = json.loads(path.read_text())
        assert (figures["total"], figures["completed"], figures["s3_uploaded"]) == (10, 10, 10)


def test_a_restarted_sink_goes_on_with_the_numbering_and_the_figures(
    world: World, valkey: RedisServer, tmp_path: Path
) -> None:
    # Case B54: the first part stays as it is, and the figures are those of both.
    world.finish(range(5))
    with SinkProcess(valkey.url, tmp_path, "--batch-rows", "5", RUN) as first:
        wait_until(lambda: world.waiting() == 0, "the first part is stored")
        first.process.terminate()
        first.wait()
    before = {found.name: world.store.get(found.name) for found in world.store.list("shards/")}
    world.finish(range(5, 10))

    assert complete(world, valkey, tmp_path) == 0

    assert all(world.store.get(name) == data for name, data in before.items())
    assert len(list(world.store.list("shards/"))) > len(before) > 0
    assert world.runs.counts(RUN).s3_uploaded == 10
    every = catalog.manifests_of(world.store, world.record.uid)
    assert sum(m.completed for m in every) == 10
