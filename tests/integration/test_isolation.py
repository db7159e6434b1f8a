"""Runs beside runs, and Redis beside Redis: what is one's own stays so (case B96)."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import redis

from common import names
from common.queue import Runs
from common.reconcile import adopt_run, reconcile
from common.store.directory import DirectoryStore
from producer.findings import Findings
from producer.forget import forget, plan
from producer.meter import Meter
from producer.proof import Proof, prove
from tests.support.finished_run import FinishedRun
from tests.support.producer_cli import producer
from tests.support.queue_world import MARK_BYTES, QueueWorld
from tests.support.redis_server import RedisServer
from tests.support.run_world import World
from tests.support.sinks import run_sink
from workers.sink.run_sink import Standing

ALIKE = ("a", "a.b", "a-1", "ab", "a_l_0")
"""Names of which one is the beginning of another, with every character that a name may have."""


@pytest.fixture
def other_database(valkey: RedisServer) -> Iterator["redis.Redis"]:
    """The same server's second database, empty; the first one's `FLUSHALL` empties it again."""
    client = redis.Redis.from_url(f"unix://{valkey.socket}?db=1", socket_timeout=20.0)
    yield client
    client.close()


def dump(client: "redis.Redis") -> dict[bytes, bytes]:
    """The whole keyspace, each key with its value as it is stored."""
    return {key: cast("bytes", client.dump(key)) for key in sorted(client.scan_iter("*"))}


def some_work(client: "redis.Redis", run: str, uid: str) -> QueueWorld:
    """A run with the same ids as every other one here, and something in each of its keys."""
    world = QueueWorld(client, prompts=6, run=run, uid=uid, partitions=2)
    jobs = world.jobs("e1")
    jobs.claim(3, runs=[run], stream_mark_bytes=MARK_BYTES)
    world.finish(jobs, [0, 1])
    world.finish(jobs, [2], "failed")
    world.runs.set_priority(run, 3)
    client.zadd(names.parked(run), {world.hex(3): 1})
    client.zadd(names.rq_canceled(run), {world.hex(4): 1})
    client.set(names.maintenance(run), "t")
    return world


@pytest.mark.parametrize("gone", ALIKE)
def test_b96_forget_takes_one_run_of_several_with_names_and_ids_alike(
    redis_client: "redis.Redis", gone: str
) -> None:
    for number, name in enumerate(ALIKE):
        some_work(redis_client, name, f"{number:032x}")
    shared = [b"rq:queues", names.RUNS.encode()]
    before = dump(redis_client)
    mine = {key for key in before if of_run(key, gone, redis_client)}

    asked = plan(redis_client, gone, lose_results=True)
    told = forget(redis_client, asked, lose_results=True, meter=Meter)

    now = dump(redis_client)
    assert told.prompts == 6
    assert now.pop(names.tombstone(gone).encode())
    assert len(mine) > 12
    assert set(now) == set(before) - mine
    assert {key: value for key, value in now.items() if key not in shared} == {
        key: value for key, value in before.items() if key not in mine and key not in shared
    }
    left = sorted(name for name in ALIKE if name != gone)
    assert sorted(Runs(redis_client).names()) == left
    queues = {key.decode() for key in cast("set[bytes]", redis_client.smembers("rq:queues"))}
    assert queues == {f"rq:queue:{name}" for name in left}


def of_run(key: bytes, run: str, client: "redis.Redis") -> bool:
    """Whether a key is of that run alone, by its spelling, and of a job by its RQ queue."""
    text = key.decode()
    if text.startswith("rq:job:"):
        return client.hget(key, "origin") == run.encode()
    parts = text.split(":")
    return parts[2:3] == [run] and (parts[0] == "rq" or parts[:2] == ["headrace", "run"])


def test_b96_two_redis_that_serve_one_output_store_each_prompt_once(
    redis_client: "redis.Redis", other_database: "redis.Redis", tmp_path: Path
) -> None:
    """The second took the run over from the store, as after a loss of the first, which lives."""
    here = World(redis_client, DirectoryStore(tmp_path / "out"), prompts=40, partitions=2)
    here.finish(range(10), text="of the first")
    adopt_run(other_database, here.store)
    there = copy.copy(here)
    there.closers = []
    there.use(other_database)

    there.finish(range(5, 30), text="of the second")
    sinks = [run_sink(here, rows=3), run_sink(there, rows=3)]
    for _ in range(6):
        for sink in sinks:
            sink.step()
    here.finish(range(10, 40), text="of the first")
    there.finish([*range(5), *range(30, 40)], text="of the second")
    standings: set[Standing] = set()
    for _ in range(200):
        standings = {sink.step() for sink in sinks}
        if standings == {Standing.COMPLETED}:
            break

    assert standings == {Standing.COMPLETED}
    here.check_store()
    assert len(here.current()) == len(here.records()) == 40
    assert {record.outcome for record in here.records()} == {"completed"}


def test_b96_an_output_belongs_to_one_run_whichever_redis_is_asked(
    redis_client: "redis.Redis", valkey: RedisServer, tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_text('{"id":1,"prompt":"x"}\n')
    enqueue = ("enqueue", "p.jsonl", "--max-tokens", "8", "--output", "out")
    first, second = valkey.tcp_url, valkey.tcp_url.replace("/0", "/1")

    def ended(run: str, url: str, *more: str) -> tuple[int, str]:
        done = producer(*enqueue, "--run", run, "--redis", url, *more, cwd=tmp_path)
        return done.code, done.err

    assert ended("mine", first)[0] == 0
    before = dump(redis_client)
    stored = sorted(str(path) for path in (tmp_path / "out").rglob("*"))
    same_redis, other_redis = ended("yours", first), ended("yours", second)
    elsewhere = producer(*enqueue[:-1], "out2", "--run", "mine", "--redis", second, cwd=tmp_path)
    given_later = ended("mine", second)

    for code, said in (same_redis, other_redis):
        assert code == 5
        assert "'mine'" in said
    assert elsewhere.code == 0
    assert given_later[0] == 5
    assert dump(redis_client) == before
    assert sorted(str(path) for path in (tmp_path / "out").rglob("*")) == stored


def test_a_reconcile_after_the_end_leaves_success_true(
    redis_client: "redis.Redis", tmp_path: Path
) -> None:
    """`forget` then `resume`, or a restart of Redis: each closes a sequence with a `void`."""
    run = FinishedRun(DirectoryStore(tmp_path / "out"))

    adopt_run(redis_client, run.store)
    brought_back = proven(run)
    redis_client.hset(names.run(run.record.run), "reconciled", "another")
    assert reconcile(redis_client, run.store, run.record) is not None
    restarted = proven(run)

    assert (brought_back.voids, restarted.voids) == (1, 2)
    assert brought_back.success
    assert restarted.success


def proven(run: FinishedRun) -> Proof:
    findings = Findings()
    proof = prove(run.store, run.record, findings, meter=Meter)
    assert not findings.counts, findings.first
    return proof
