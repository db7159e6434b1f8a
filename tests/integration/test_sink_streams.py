"""Result streams that other hands have touched, and sinks whose predecessors died elsewhere."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from common import names
from common.queue.records import ClaimReply
from common.queue.sinklease import new_token
from common.store import open_store
from tests.support.memory_store import MemoryStore
from tests.support.queue_world import take
from tests.support.redis_server import RedisServer
from tests.support.run_world import RUN, World
from tests.support.sink_process import SinkProcess
from tests.support.sinks import (
    drain,
    expire_lease,
    killed_at,
    partition_sink,
    run_sink,
)
from tests.support.skips import skip_cannot_run
from workers.sink.run_sink import Standing


@pytest.fixture
def world(redis_client: "redis.Redis") -> Iterator[World]:
    made = World(redis_client, MemoryStore())
    yield made
    made.close()


# --- B71: what a dead sink had read --------------------------------------------------------------


@pytest.mark.parametrize("point", ["sink.read", "sink.intent", "sink.shards"])
def test_b71_what_a_dead_sink_of_another_host_had_read_is_stored_by_the_next(
    redis_client: "redis.Redis", valkey: RedisServer, tmp_path: Path, point: str
) -> None:
    world = World(redis_client, open_store(str(tmp_path / "out")), prompts=100)
    world.finish(range(100))
    with SinkProcess(valkey.url, tmp_path, "--batch-rows", "100", RUN, crash_at=point) as dead:
        assert dead.wait() == -9
    assert world.waiting() == 100
    expire_lease(world)

    host = ("unshare", "--uts", "sh", "-c", 'hostname another-pod && exec "$@"', "sh")
    if subprocess.run([*host, "true"], capture_output=True, check=False).returncode:
        skip_cannot_run("only root may give a process another host name")
    # A sink has no name of its own that it must find again, whatever the host is called.
    with SinkProcess(
        valkey.url, tmp_path, "--until-done", "--batch-rows", "100", RUN, before=host
    ) as heir:
        assert heir.wait() == 0

    assert len(world.records()) == 100
    world.check_store()
    world.check_counts()


def test_b71_nothing_of_redis_names_a_consumer_that_could_be_deleted(world: World) -> None:
    world.finish(range(10))
    with killed_at("sink.intent"):
        partition_sink(world, token=new_token()).store_one()

    assert world.client.xinfo_groups(names.results(RUN, 0)) == []


# --- B72: entries that somebody deleted ----------------------------------------------------------


def trim_all(world: World) -> None:
    world.client.xtrim(names.results(RUN, 0), maxlen=0, approximate=False)


def trim_some(world: World) -> None:
    world.client.xtrim(names.results(RUN, 0), maxlen=4, approximate=False)


def delete_two(world: World) -> None:
    found = world.entries()
    world.client.xdel(names.results(RUN, 0), found[2][0], found[5][0])


def delete_the_stream(world: World) -> None:
    world.client.delete(names.results(RUN, 0))


def begin_a_batch(world: World) -> None:
    """Their sink has planned a batch of them, and died."""
    with killed_at("sink.intent"):
        partition_sink(world, token=new_token()).store_one()
    expire_lease(world)


def store_half_a_batch(world: World) -> None:
    """Its shard is there, without a manifest."""
    with killed_at("sink.shards"):
        partition_sink(world, token=new_token()).store_one()
    expire_lease(world)


@pytest.mark.parametrize("taken", [trim_all, trim_some, delete_two, delete_the_stream])
@pytest.mark.parametrize("begun", [None, begin_a_batch, store_half_a_batch])
def test_b72_results_that_somebody_deleted_are_noticed_and_generated_again(
    world: World,
    caplog: pytest.LogCaptureFixture,
    begun: Callable[[World], None] | None,
    taken: Callable[[World], None],
) -> None:
    world.finish(range(10))
    if begun is not None:
        begun(world)

    taken(world)
    sink = run_sink(world)
    standings = [sink.step() for _ in range(12)]

    assert Standing.COMPLETED not in standings
    assert world.store.get(names.SUCCESS) is None
    lost = set(range(10)) - set(world.current())
    assert lost
    assert f"completed: {10 - len(lost)} in the store, 10 in Redis" in caplog.text
    assert world.runs.counts(RUN).queued == len(lost)
    assert world.finish(sorted(lost)) == ["ok"] * len(lost)

    assert drain(sink) is Standing.COMPLETED
    assert len(world.records()) == len(world.current()) == 10
    world.check_store()
    world.check_counts()


def test_b72_deleted_results_do_not_stop_the_claims_for_ever(world: World) -> None:
    """Claims stop by what was counted of the streams, which nothing would count down any more."""
    world.accept(10)
    world.finish(range(10))
    assert claim(world).why == "full"
    trim_all(world)
    assert claim(world).why == "full"

    run_sink(world).step()

    assert len(claim(world).claims) == 5
    assert world.runs.counts(RUN).stream_bytes == 0


def claim(world: World) -> ClaimReply:
    assert take(world.jobs, 100, bound=100, quiet=True).what == "granted"
    return world.jobs.claim(5, runs=[RUN], stream_mark_bytes=1_000)


def test_b72_a_client_that_trims_while_a_sink_stores_costs_a_second_answer_at_most(
    world: World,
) -> None:
    world.accept(30)
    sink = run_sink(world)
    for begin in range(0, 40, 8):
        world.finish(range(begin, min(begin + 8, 40)))
        trim_some(world)
        sink.step()
    for _ in range(20):
        if sink.step() is Standing.COMPLETED:
            break
        world.finish(sorted(set(range(40)) - set(world.current())))

    assert len(world.current()) == 40
    world.check_store()
    world.check_counts()


# --- B73: the stream shrinks ---------------------------------------------------------------------


def test_b73_what_is_stored_leaves_redis_whole(valkey: RedisServer) -> None:
    client = valkey.client()
    world = World(client, MemoryStore(), prompts=8_000)
    world.finish(range(2_000), text="x" * 1024)
    sink = run_sink(world, rows=2_000)
    while world.waiting():
        sink.step()
    before = used_memory(client)
    for begin in range(2_000, 8_000, 2_000):
        world.finish(range(begin, begin + 2_000), text="x" * 1024)
    at_most = used_memory(client)

    assert drain(sink) is Standing.COMPLETED

    assert at_most > before + (6 << 20)
    assert used_memory(client) < before * 1.1
    world.close()


def used_memory(client: "redis.Redis") -> int:
    return int(client.info("memory")["used_memory"])
