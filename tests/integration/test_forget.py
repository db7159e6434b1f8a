"""`producer forget` on a real Redis: one run's keys and no other, whatever kills it."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import pytest
import redis

from common import names
from common.group_figures import GroupFigures
from common.queue import Groups, Jobs
from common.store.directory import DirectoryStore
from tests.support.producer_cli import Ended, producer
from tests.support.queue_world import QueueWorld, take
from tests.support.redis_server import RedisServer
from tests.support.run_world import RUN, World
from tests.support.sinks import drain, run_sink
from workers.sink.run_sink import Standing

Ask = Callable[..., Ended]
POINTS = ["forget.begun", "forget.swept", "forget.swept:3", "forget.emptied"]
TOMBSTONE = names.tombstone(RUN).encode()


@pytest.fixture
def before(redis_client: "redis.Redis") -> dict[bytes, bytes]:
    """Other programs' keys and another run, as they lie in Redis before the run is made."""
    redis_client.set("foo", "bar")
    redis_client.rpush("rq:queue:other_program", "a", "b")
    redis_client.sadd("rq:queues", "rq:queue:other_program")
    redis_client.hset("rq:job:theirs", "data", "x")
    redis_client.hset("headrace:slots:http://gpu:1", "e9", "{}")
    other = QueueWorld(redis_client, prompts=5, run="demo2", uid="5" * 32)
    other.finish(other.jobs("e2"), [0])
    other.finish(other.jobs("e2"), [1], "failed")
    return dump(redis_client)


@pytest.fixture
def world(before: dict[bytes, bytes], redis_client: "redis.Redis", tmp_path: Path) -> World:
    assert before
    return World(redis_client, DirectoryStore(tmp_path / "out"), prompts=10, partitions=2)


@pytest.fixture
def ask(valkey: RedisServer, tmp_path: Path) -> Ask:
    """Call a command with the address of the test's Redis."""

    def call(*arguments: str, **env: str) -> Ended:
        return producer(*arguments, cwd=tmp_path, env={"HEADRACE_REDIS": valkey.tcp_url, **env})

    return call


def dump(client: "redis.Redis") -> dict[bytes, bytes]:
    """The whole keyspace, each key with its value as it is stored."""
    keys = sorted(client.scan_iter("*"))
    return {key: cast("bytes", client.dump(key)) for key in keys}


def forgotten(client: "redis.Redis", before: dict[bytes, bytes]) -> None:
    """All is as before the run was made, but for the tombstone."""
    now = dump(client)
    assert now.pop(TOMBSTONE)
    assert 86_000 < client.ttl(TOMBSTONE) <= 86_400
    assert now == before


def work_on(world: World) -> None:
    """Leave something in every key that a run may have."""
    take(world.jobs, 100, bound=100, quiet=True)
    world.client.delete(names.slots("http://test:30000"))
    world.finish(range(3))
    world.finish([3], "failed")
    world.client.zadd(names.parked(RUN), {world.key(4).hex(): 1})
    world.client.zadd(names.rq_canceled(RUN), {world.key(5).hex(): 1})
    world.client.hset(names.set_aside(RUN), "00:1-1", "x")
    world.client.set(names.maintenance(RUN), "t")
    world.client.set(f"rq:clean_registries:{RUN}", "1")
    world.client.xadd(f"rq:results:{world.key(6).hex()}", {"a": "b"})
    world.runs.open_producer(RUN, "gone", producer_of(dead_pid()))


def dead_pid() -> int:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def producer_of(pid: int, host: str | None = None) -> str:
    about = {"files": ["p.jsonl"], "host": host or socket.gethostname(), "pid": pid}
    return msgspec.json.encode(about).decode()


def test_it_takes_the_run_s_keys_and_no_other(
    world: World, ask: Ask, before: dict[bytes, bytes], redis_client: "redis.Redis"
) -> None:
    work_on(world)
    stored = sorted(found.name for found in world.store.list(""))

    ended = ask("forget", RUN, "--yes", "--lose-results", "--json")

    assert ended.code == 0, ended.err
    assert (ended.told["prompts"], ended.told["lost_results"]) == (10, 4)
    forgotten(redis_client, before)
    assert sorted(found.name for found in world.store.list("")) == stored
    assert "producer resume" in ended.err


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_anywhere_costs_nothing_but_the_same_call_again(
    world: World,
    ask: Ask,
    before: dict[bytes, bytes],
    redis_client: "redis.Redis",
    point: str,
) -> None:
    world.accept(2_500)
    work_on(world)

    killed = ask("forget", RUN, "--yes", "--lose-results", HEADRACE_CRASH_AT=point)
    refused = ask("resume", RUN, "--output", world.record.output)
    again = ask("forget", RUN)

    assert killed.code == -signal.SIGKILL
    assert refused.code == 5
    assert "is being forgotten" in refused.err
    assert again.code == 0, again.err
    forgotten(redis_client, before)


def test_results_that_only_redis_has_are_not_lost_unless_one_says_so(
    world: World, ask: Ask, before: dict[bytes, bytes], redis_client: "redis.Redis"
) -> None:
    world.finish(range(10))
    held = dump(redis_client)

    refused = ask("forget", RUN, "--yes")

    assert refused.code == 5
    assert "10 results" in refused.err
    assert "--lose-results" in refused.err
    assert dump(redis_client) == held
    sink = run_sink(world)
    assert drain(sink) is Standing.COMPLETED
    sink.release()
    assert ask("forget", RUN, "--yes").code == 0
    forgotten(redis_client, before)


def test_worker_groups_at_work_are_named(world: World, ask: Ask) -> None:
    jobs = Jobs(world.client, epoch="e7", group="gpu3@host", server="http://gpu:9")
    take(jobs, 10, bound=10, quiet=True)
    claims = jobs.claim(4, runs=[RUN], stream_mark_bytes=1 << 40).claims
    figures = GroupFigures(
        group="gpu3@host", epoch="e7", server="http://g", host="host", pid=1, state="ready"
    )
    Groups(world.client).publish(figures)

    refused = ask("forget", RUN, "--yes", "--lose-results")

    assert refused.code == 5
    assert "4 prompts" in refused.err
    assert "gpu3@host" in refused.err
    jobs.give_back([(RUN, claim.key) for claim in claims])
    assert ask("forget", RUN, "--yes").code == 0


def test_a_producer_that_may_live_stands_in_the_way(world: World, ask: Ask) -> None:
    world.runs.open_producer(RUN, "s", producer_of(1, host="another"))

    refused = ask("forget", RUN, "--yes")

    assert refused.code == 5
    assert "--seal" in refused.err
    assert ask("resume", RUN, "--seal").code == 0
    assert ask("forget", RUN, "--yes").code == 0


def test_late_results_are_dropped_and_late_workers_told_to_stop(
    world: World, ask: Ask, before: dict[bytes, bytes], redis_client: "redis.Redis"
) -> None:
    take(world.jobs, 100, bound=100, quiet=True)
    world.client.delete(names.slots("http://test:30000"))
    redis_client.zadd(names.leases(RUN), {world.key(0).hex(): 1})
    assert ask("forget", RUN, "--yes").code == 0

    assert world.finish([0]) == ["forgotten"]
    assert world.jobs.renew([(RUN, world.key(0))]) == ["gone"]
    assert world.jobs.give_back([(RUN, world.key(0))]) == ["not_held"]
    assert run_sink(world).step() is Standing.GONE

    redis_client.delete(names.renewed("e1"))
    forgotten(redis_client, before)


def test_the_name_is_free_for_what_the_store_has_and_for_nothing_new(
    world: World, ask: Ask
) -> None:
    (Path(world.record.output).parent / f"{RUN}.jsonl").write_text('{"id":1,"prompt":"x"}\n')
    ask("forget", RUN, "--yes")

    new = ask("enqueue", f"{RUN}.jsonl", "--output", "elsewhere", "--max-tokens", "8")
    back = ask("resume", RUN, "--output", world.record.output, "--json")

    assert new.code == 5
    assert "forgotten" in new.err
    assert back.code == 0, back.err
    assert back.told["adopted"]
    assert not world.runs.tombstoned(RUN)
    assert world.runs.counts(RUN).queued == 10


def test_it_asks_says_what_it_found_and_may_be_repeated(world: World, ask: Ask) -> None:
    assert ask("forget", RUN).code == 2
    assert ask("forget", "none", "--yes").code == 4
    assert world.runs.counts(RUN).total == 10

    assert ask("forget", RUN, "--yes").code == 0
    again = ask("forget", RUN, "--json")

    assert again.code == 0
    assert again.told["already"]


def test_no_key_of_a_run_is_missing_from_the_list(world: World) -> None:
    """A builder that is added to `common.names` must be forgotten too, or run out by itself."""
    leaves = {"forgetting", "tombstone", "notified", "ledger_stem", "ledger_bucket", "keys_of"}
    builders = {
        name: build
        for name, build in vars(names).items()
        if callable(build)
        and getattr(build, "__module__", "") == names.__name__
        and build.__code__.co_varnames[: build.__code__.co_argcount][:1] == ("name",)
        and name not in leaves | {"parse_part", "inputs_kind"}
    }
    listed = set(names.keys_of(RUN, world.record.partitions))

    for name, build in builders.items():
        lanes = [()] if build.__code__.co_argcount == 1 else [(0,), (1,)]
        for lane in lanes:
            assert build(RUN, *lane) in listed, f"names.keys_of lacks {name}"
