"""The audit: what RQ's tools took from a run is put back, once, whoever looks and how often."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from common import names
from common.errors import RedisFullError, StateLostError
from common.queue import Jobs
from common.queue.audit import CANCELLED_STEP, audit_run
from common.restore import audit_and_restore
from common.store import ObjectStore, open_store
from tests.support.queue_world import SERVER, QueueWorld, take
from tests.support.redis_server import RedisServer
from tests.support.run_world import World


@pytest.fixture
def client(any_redis: RedisServer) -> Iterator["redis.Redis"]:
    with any_redis.client() as client:
        yield client


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    store = open_store(str(tmp_path / "out"))
    store.probe()
    yield store
    shutil.rmtree(tmp_path / "out")


def cancel(world: QueueWorld, numbers: list[int]) -> None:
    """Do what RQ's `Job.cancel` does."""
    for number in numbers:
        world.client.lrem(names.rq_queue(world.run), 1, world.hex(number))
        world.client.hset(names.rq_job(world.hex(number)), "status", "canceled")
        world.client.zadd(names.rq_canceled(world.run), {world.hex(number): 1})


def test_a_healthy_run_is_left_as_it_is(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=6)
    jobs = world.jobs("e1")
    world.claim(jobs, 3)
    world.finish(jobs, [0])
    before = {key: client.dump(key) for key in client.keys("*")}

    report = audit_run(client, world.record)

    assert (report.relisted, report.cancelled, report.missing) == (0, 0, ())
    assert {key: client.dump(key) for key in client.keys("*")} == before


def test_queued_keys_in_no_list_are_listed_again_once(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=6)
    jobs = world.jobs("e1")
    world.claim(jobs, 2)
    client.delete(names.rq_queue(world.run))

    first, second = (audit_run(client, world.record).relisted for _ in range(2))

    assert (first, second) == (4, 0)
    assert sorted(world.listed()) == [2, 3, 4, 5]
    assert world.leased() == {0, 1}
    world.check()


def test_parked_jobs_are_left_parked(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=2)
    jobs = world.jobs("e1")
    for _ in range(2):
        world.claim(jobs)
        jobs.give_back(world.held([0, 1]), died=True)

    world.add([2])
    client.delete(names.rq_queue(world.run))

    assert audit_run(client, world.record).relisted == 1
    assert world.parked() == {0, 1}
    assert world.listed() == [2]


def test_many_cancelled_jobs_end_and_those_in_flight_wait(client: "redis.Redis") -> None:
    many = 2 * CANCELLED_STEP + 30
    world = QueueWorld(client, prompts=many)
    jobs = world.jobs("e1")
    world.claim(jobs, 20)
    cancel(world, list(range(many - 5)))

    first = audit_run(client, world.record)
    assert jobs.renew(world.held(range(20))) == ["gone"] * 20
    second = audit_run(client, world.record)

    assert (first.cancelled, second.cancelled) == (many - 25, 20)
    assert world.counts().cancelled == many - 5
    assert world.listed() == list(range(many - 5, many))
    assert client.zcard(names.rq_canceled(world.run)) == 0
    world.check()


def test_a_cancelled_prompt_that_has_ended_keeps_its_end(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=2)
    jobs = world.jobs("e1")
    world.claim(jobs)
    world.finish(jobs, [0])
    client.zadd(names.rq_canceled(world.run), {world.hex(0): 1, "somebody-elses": 1})

    report = audit_run(client, world.record)

    assert report.cancelled == 0
    assert world.states()[0] == "completed/1"
    assert client.zrange(names.rq_canceled(world.run), 0, -1) == [b"somebody-elses"]
    world.check()


def test_a_cancelled_job_without_its_body_is_restored_and_then_cancelled(
    client: "redis.Redis",
) -> None:
    world = QueueWorld(client, prompts=1)
    cancel(world, [0])
    client.delete(names.rq_job(world.hex(0)))

    first = audit_run(client, world.record)
    world.add([0])
    second = audit_run(client, world.record)

    assert first.missing == (world.key(0),)
    assert second.cancelled == 1
    assert world.states() == {0: "cancelled/1"}
    world.check()


def test_idle_processes_audit_a_run_only_once_in_a_while(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)

    reports = [audit_run(client, world.record, every_ms=60_000).recent for _ in range(2)]
    client.hset(names.run(world.run), "audited_ms", 1)
    reports.append(audit_run(client, world.record, every_ms=60_000).recent)
    reports.append(audit_run(client, world.record).recent)

    assert reports == [False, True, False, False]


def test_an_audit_of_a_run_that_redis_lacks_says_so(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    client.flushall()

    with pytest.raises(StateLostError, match="demo"):
        audit_run(client, world.record)
    assert client.keys() == []


def test_an_audit_in_a_full_redis_loses_nothing(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=3)
    cancel(world, [1])
    client.config_set("maxmemory", 100_000)

    with pytest.raises(RedisFullError):
        audit_run(client, world.record)

    client.config_set("maxmemory", 0)
    assert audit_run(client, world.record).cancelled == 1
    world.check()


# --- With a store --------------------------------------------------------------------------------


def test_lost_bodies_are_restored_from_the_accepted_prompts(
    client: "redis.Redis", store: ObjectStore
) -> None:
    world = World(client, store, prompts=30)
    take(world.jobs, 10, bound=10, quiet=True)
    world.jobs.claim(5, stream_mark_bytes=1 << 40)
    world.finish([0, 1])
    lost = range(5, 30)
    client.delete(*(names.rq_job(world.key(n).hex()) for n in lost), names.rq_queue("demo"))

    report = audit_and_restore(client, store, world.record)

    assert (report.restored, report.missing) == (25, ())
    assert client.llen(names.rq_queue("demo")) == 25
    claims = world.jobs.claim(30, stream_mark_bytes=1 << 40).claims
    assert {claim.key: claim.prompt for claim in claims} == {
        world.key(n): world.prompt(n) for n in lost
    }
    world.check_counts()


def test_what_the_store_lacks_too_is_named(client: "redis.Redis", store: ObjectStore) -> None:
    world = World(client, store, prompts=3)
    alien = (b"k" * 16, b"f" * 8, b"{}")
    world.ledger.add([alien])
    client.delete(names.rq_job((b"k" * 16).hex()))
    client.lrem(names.rq_queue("demo"), 0, (b"k" * 16).hex())

    report = audit_and_restore(client, store, world.record)

    assert (report.restored, report.missing) == (0, (b"k" * 16,))


def test_a_restore_by_two_at_once_lists_each_prompt_once(
    client: "redis.Redis", store: ObjectStore
) -> None:
    world = World(client, store, prompts=10)
    client.delete(*(names.rq_job(world.key(n).hex()) for n in range(10)), names.rq_queue("demo"))

    audit_and_restore(client, store, world.record)
    again = audit_and_restore(client, store, world.record)

    assert again.restored == 0
    assert client.llen(names.rq_queue("demo")) == 10
    assert Jobs(client, epoch="x", group="g", server=SERVER).reap() == (0, 0, [])
