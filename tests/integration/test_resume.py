"""`producer resume` on a real Redis: the pause, lost state, RQ's tools, producers that died."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import redis

from common import names
from common.store.directory import DirectoryStore
from tests.support.producer_cli import Ended, producer
from tests.support.redis_server import RedisServer
from tests.support.run_world import RUN, World
from tests.support.sinks import drain, run_sink
from workers.sink.run_sink import Standing

Ask = Callable[..., Ended]


@pytest.fixture
def world(redis_client: "redis.Redis", tmp_path: Path) -> World:
    return World(redis_client, DirectoryStore(tmp_path / "out"), prompts=10)


@pytest.fixture
def ask(valkey: RedisServer, tmp_path: Path) -> Ask:
    """Call a command with the address of the test's Redis."""

    def call(*arguments: str) -> Ended:
        return producer(*arguments, cwd=tmp_path, env={"HEADRACE_REDIS": valkey.tcp_url})

    return call


def store_some(world: World, count: int) -> None:
    """Finish prompts and put their results into the store."""
    world.finish(range(count))
    sink = run_sink(world, rows=count)
    assert sink.step() is Standing.GOES_ON
    sink.release()
    assert world.waiting() == 0


def end(world: World) -> None:
    """Finish what is queued, and see that the run ends with each prompt once."""
    world.finish(range(world.accepted))
    drain(run_sink(world))
    world.check_store()
    world.check_counts()
    assert len(world.current()) == world.accepted


def test_a_pause_is_lifted_and_nothing_else_is_done(world: World, ask: Ask) -> None:
    ask("pause", RUN, "--reason", "lunch")

    ended = ask("resume", RUN, "--json")

    assert ended.code == 0
    assert ended.told["lifted"] == "lunch"
    assert f"run {RUN}: it is no longer paused (lunch)\n" in ended.err
    assert ended.told["added"] + ended.told["taught"] + ended.told["relisted"] == 0
    state = world.runs.state(RUN)
    assert state is not None
    assert state.paused is None
    assert "nothing was missing" in ask("resume", RUN).err


def test_a_run_that_redis_lost_comes_back_from_the_store_alone(
    world: World, ask: Ask, redis_client: "redis.Redis"
) -> None:
    store_some(world, 4)
    redis_client.flushall()

    ended = ask("resume", RUN, "--output", world.store.url, "--json")

    assert ended.code == 0
    assert ended.told["adopted"] is True
    counts = world.runs.counts(RUN)
    assert (counts.total, counts.completed, counts.queued) == (10, 4, 6)
    end(world)


def test_a_lost_run_of_which_nobody_says_the_output_is_not_found(
    world: World, ask: Ask, redis_client: "redis.Redis"
) -> None:
    redis_client.flushall()

    ended = ask("resume", RUN)

    assert ended.code == 4
    assert "--output" in ended.err
    assert world.runs.get(RUN) is None


def test_prompts_that_the_ledger_lost_are_queued_again(world: World, ask: Ask) -> None:
    world.accept(5, queue=False)

    ended = ask("resume", RUN, "--json")

    assert ended.told["added"] == 5
    assert world.runs.counts(RUN).queued == 15
    end(world)


def test_results_that_are_nowhere_are_made_again(world: World, ask: Ask) -> None:
    store_some(world, 4)
    world.finish([4, 5])
    # Somebody deleted the stream with two results in it.
    world.client.delete(names.results(RUN, 0))
    world.client.hset(names.counts(RUN), mapping={"stream_bytes": 0, "stream_entries": 0})

    ended = ask("resume", RUN, "--json")

    assert ended.told["forgotten"] == 2
    counts = world.runs.counts(RUN)
    assert (counts.completed, counts.queued) == (4, 6)
    end(world)


def test_what_the_output_lacks_in_every_way_is_named(world: World, ask: Ask) -> None:
    store_some(world, 4)
    for folder in (names.INPUTS, names.SHARDS, names.KEYS, names.MANIFEST):
        for found in list(world.store.list(folder)):
            world.store.delete(found.name)

    ended = ask("resume", RUN, "--json")

    assert ended.code == 1
    assert ended.told["unaccepted"] == 4
    assert "lacks 4 accepted prompts" in ended.err
    assert world.runs.counts(RUN).completed == 4, "nothing is forgotten"


def test_results_that_wait_for_a_sink_are_not_taken_for_lost(world: World, ask: Ask) -> None:
    store_some(world, 4)
    world.finish([4, 5])

    ended = ask("resume", RUN, "--json")

    assert ended.told["forgotten"] == 0
    assert world.waiting() == 2


def test_jobs_that_rq_empty_took_are_put_back(world: World, ask: Ask) -> None:
    for number in range(10):
        world.client.delete(names.rq_job(world.key(number).hex()))
    world.client.delete(names.rq_queue(RUN))

    ended = ask("resume", RUN, "--json")

    assert ended.told["restored"] == 10
    assert world.client.llen(names.rq_queue(RUN)) == 10


def test_a_restarted_redis_is_reconciled(world: World, ask: Ask) -> None:
    world.client.hset(names.run(RUN), "reconciled", "another")
    assert "not yet compared" in ask("status", RUN, "--json").told["warnings"][0]

    assert ask("resume", RUN).code == 0

    warnings = ask("status", RUN, "--json").told["warnings"]
    assert not any("not yet compared" in warning for warning in warnings)


def test_the_output_of_another_run_is_refused(world: World, ask: Ask, tmp_path: Path) -> None:
    other = DirectoryStore(tmp_path / "other")
    record = msgspec.structs.replace(world.record, run="other", uid="f" * 32)
    other.put_if_absent(names.RUN_JSON, msgspec.json.encode(record))
    world.runs.pause(RUN, "x")

    ended = ask("resume", RUN, "--output", other.url)

    assert ended.code == 5
    for part in ("'other'", "f" * 32, f"'{RUN}'", world.record.uid):
        assert part in ended.err
    state = world.runs.state(RUN)
    assert state is not None
    assert state.paused == "x"
    assert ask("resume", RUN, "--output", world.store.url).code == 0


# --- Producers that died open --------------------------------------------------------------------


def about(pid: int, host: str | None = None) -> str:
    told = {"files": ["a.jsonl"], "host": host or socket.gethostname(), "pid": pid}
    return msgspec.json.encode(told).decode()


def test_a_producer_that_died_open_is_named_and_closed_on_demand(world: World, ask: Ask) -> None:
    world.runs.open_producer(RUN, "/a.jsonl", about(2**22 + 1))
    world.finish(range(10))

    ended = ask("resume", RUN)
    assert "of a.jsonl" in ended.err
    assert "--seal" in ended.err
    assert ask("status", RUN, "--json").told["sealed"] is False

    told = ask("resume", RUN, "--seal", "--json").told

    assert (told["closed"], told["sealed"]) == (1, True)
    assert drain(run_sink(world)) is Standing.COMPLETED


def test_a_producer_that_is_alive_is_not_closed(world: World, ask: Ask) -> None:
    world.runs.open_producer(RUN, "/a.jsonl", about(os.getpid()))

    ended = ask("resume", RUN, "--seal")

    assert ended.code == 5
    assert "is at work" in ended.err
    state = world.runs.state(RUN)
    assert state is not None
    assert state.open_producers


def test_a_run_that_was_kept_open_is_sealed_on_demand(
    redis_client: "redis.Redis", tmp_path: Path, ask: Ask
) -> None:
    world = World(redis_client, DirectoryStore(tmp_path / "out"), prompts=2, sealed=False)
    world.finish(range(2))
    assert "more prompts are awaited" in ask("resume", RUN).err

    assert ask("resume", RUN, "--seal", "--json").told["sealed"] is True

    assert drain(run_sink(world)) is Standing.COMPLETED
    assert ask("resume", RUN, "--seal", "--json").told["closed"] == 0
    assert run_sink(world).step() is Standing.COMPLETED  # the second seal changed nothing


def test_a_cancelled_run_does_not_go_on(world: World, ask: Ask) -> None:
    world.client.hset(names.run(RUN), "cancelled", "1")

    assert ask("resume", RUN).code == 5
