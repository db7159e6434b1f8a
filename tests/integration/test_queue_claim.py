"""Claiming: order, limits, what is passed over, and who may claim at all."""

from collections.abc import Iterator

import pytest
import redis

from common import names
from common.queue import Jobs
from tests.support.queue_world import MARK_BYTES, SERVER, QueueWorld, expire_slots, take
from tests.support.redis_server import RedisServer


@pytest.fixture
def client(any_redis: RedisServer) -> Iterator["redis.Redis"]:
    with any_redis.client() as client:
        yield client


def test_a_job_comes_with_what_a_worker_needs_and_is_leased(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")

    [claim] = world.claim(jobs).claims

    assert (claim.run, claim.uid, claim.try_) == ("demo", world.record.uid, 1)
    assert (claim.key, claim.fingerprint, claim.prompt) == world.item(0)
    assert (claim.attempts, claim.deaths, claim.lost) == (0, 0, 0)
    assert world.leased() == {0}
    assert world.started() == {f"{world.hex(0)}:e1"}
    assert world.job(0)["status"] == b"started"
    assert world.job(0)["worker_name"] == b"gpu0"
    world.check()


def test_jobs_come_in_the_order_of_their_file(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=5)
    jobs = world.jobs("e1")

    assert world.claimed(jobs, 2) == [0, 1]
    assert world.claimed(jobs, 9) == [2, 3, 4]
    assert world.claim(jobs).why == "empty"


def test_runs_come_by_priority_and_then_by_age(client: "redis.Redis") -> None:
    older = QueueWorld(client, prompts=2, run="older")
    QueueWorld(client, prompts=2, run="younger")
    QueueWorld(client, prompts=2, run="urgent", priority=1)
    QueueWorld(client, prompts=2, run="idle", priority=-1)
    jobs = older.jobs("e1")

    claims = older.claim(jobs, 7).claims

    assert [claim.run for claim in claims] == [
        *("urgent", "urgent", "older", "older", "younger", "younger", "idle"),
    ]


def test_only_the_named_runs_are_served(client: "redis.Redis") -> None:
    mine = QueueWorld(client, prompts=1, run="mine")
    QueueWorld(client, prompts=1, run="other")
    jobs = mine.jobs("e1")

    reply = jobs.claim(9, runs=["mine", "unheard-of"], stream_mark_bytes=MARK_BYTES)

    assert [claim.run for claim in reply.claims] == ["mine"]


def test_leased_ended_and_parked_ids_are_passed_over(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=6)
    jobs = world.jobs("e1")
    world.claim(jobs, 5)
    world.finish(jobs, [0])
    world.finish(jobs, [1], "failed")
    world.finish(jobs, [2], "cancelled")
    client.zadd(names.parked(world.run), {world.hex(3): 1})
    client.lpush(names.rq_queue(world.run), *(world.hex(number) for number in range(5)))

    assert world.claimed(jobs, 9) == [5]
    assert world.listed() == []
    assert world.states()[1] == "failed/1"


def test_a_parked_id_that_is_listed_too_is_passed_over(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=2)
    client.zadd(names.parked(world.run), {world.hex(0): 1})

    assert world.claimed(world.jobs("e1")) == [1]
    assert world.parked() == {0}


def test_a_cancelled_id_that_is_listed_still_is_passed_over(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=2)
    client.hset(names.rq_job(world.hex(0)), "status", "canceled")

    assert world.claimed(world.jobs("e1")) == [1]
    assert world.job(0)["status"] == b"canceled"


def test_a_failed_id_that_has_left_the_failed_registry_is_a_new_try(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    jobs.charge(world.run, world.key(0), "timeout")
    client.hset(names.rq_job(world.hex(0)), mapping={"turns": "[]", "deaths": 1, "lost": 1})
    world.finish(jobs, [0], "failed")
    client.rpush(names.rq_queue(world.run), world.hex(0))
    stale = world.claim(jobs).claims
    client.zrem(names.rq_failed(world.run), world.hex(0))
    client.rpush(names.rq_queue(world.run), world.hex(0))

    [claim] = world.claim(jobs).claims

    assert stale == []
    assert (claim.try_, claim.attempts, claim.deaths, claim.lost) == (2, 0, 0, 0)
    assert "turns" not in world.job(0)
    assert (world.counts().failed, world.counts().in_flight) == (0, 1)
    world.check()


def test_a_stale_hash_of_an_ended_prompt_is_removed(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    world.finish(jobs, [0])
    client.hset(names.rq_job(world.hex(0)), "status", "queued")
    client.rpush(names.rq_queue(world.run), world.hex(0))

    world.claim(jobs)

    assert world.job(0) == {}


def test_a_call_pops_at_most_four_times_what_it_wants_and_says_that_there_is_more(
    client: "redis.Redis",
) -> None:
    world = QueueWorld(client, prompts=3)
    jobs = world.jobs("e1")
    unknown = [f"{number:032x}" for number in range(100)]
    client.lpush(names.rq_queue(world.run), *unknown)
    # Every other id is good, so that the call asks again and again for fewer.
    mixed = [job_id for number in range(3) for job_id in (f"{number:032x}", world.hex(number))]
    client.rpush(names.rq_queue(world.run), *mixed)

    reply = world.claim(jobs, 3)

    assert (reply.why, reply.claims) == ("ok", [])
    assert client.llen(names.rq_queue(world.run)) == 103 + 6 - 12


def test_no_call_pops_more_than_four_times_what_it_wants(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=40)
    jobs = world.jobs("e1")
    # Of each five, one is good: the popped ones go beyond any multiple of what is still wanted.
    order = [
        job_id
        for number in range(40)
        for job_id in (*(f"{number:030x}{rest:02x}" for rest in range(4)), world.hex(number))
    ]
    client.delete(names.rq_queue(world.run))
    client.rpush(names.rq_queue(world.run), *order)

    reply = world.claim(jobs, 10)

    assert len(order) - client.llen(names.rq_queue(world.run)) <= 40
    assert 0 < len(reply.claims) <= 10


def test_a_claimed_job_does_not_expire(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    client.expire(names.rq_job(world.hex(0)), 100)

    world.claim(world.jobs("e1"))

    assert client.ttl(names.rq_job(world.hex(0))) == -1


def test_somebody_elses_job_in_the_queue_fails_visibly_and_stops_nothing(
    client: "redis.Redis",
) -> None:
    world = QueueWorld(client, prompts=1)
    client.hset(names.rq_job("mine-1"), mapping={"data": "x", "status": "queued"})
    client.lpush(names.rq_queue(world.run), "mine-1", "no-hash")

    assert world.claimed(world.jobs("e1")) == [0]
    assert client.hget(names.rq_job("mine-1"), "status") == b"failed"
    assert client.zrange(names.rq_failed(world.run), 0, -1) == [b"mine-1"]
    assert client.exists(names.rq_job("no-hash")) == 0


def test_a_process_without_slots_claims_nothing(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    never = Jobs(client, epoch="e0", group="gpu0@test", server=SERVER)
    expired, gave_up, elsewhere = (world.jobs(epoch) for epoch in ("e1", "e2", "e3"))
    take(gave_up, 0, bound=10)
    expire_slots(client, "e1")
    other = Jobs(client, epoch="e3", group="gpu0@test", server="http://other:1")

    for jobs in (never, expired, gave_up, other):
        reply = world.claim(jobs)
        assert (reply.why, reply.claims) == ("no_slot", [])
    assert world.claimed(elsewhere) == [0]


def test_claims_stop_while_streams_are_full_and_go_on_at_half(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=9)
    jobs = world.jobs("e1")

    def claimed(waiting_bytes: int) -> str:
        client.hset(names.counts(world.run), "stream_bytes", waiting_bytes)
        return jobs.claim(1, stream_mark_bytes=1000).why

    assert [claimed(size) for size in (1000, 1001, 800, 501, 500, 900)] == [
        *("ok", "full", "full", "full", "ok", "ok"),
    ]


def test_a_paused_or_cancelled_run_is_passed_over(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=2)
    jobs = world.jobs("e1")
    world.runs.pause(world.run, "by hand")

    paused = world.claim(jobs).why
    world.runs.resume(world.run)
    resumed = world.claimed(jobs, 1)
    client.hset(names.run(world.run), "cancelled", "1")

    assert (paused, resumed) == ("paused", [0])
    assert world.claim(jobs).claims == []


def test_nothing_is_claimed_before_redis_and_store_are_brought_together(
    client: "redis.Redis",
) -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    client.hset(names.run(world.run), "reconciled", "another run of Redis")

    reply = world.claim(jobs)

    assert (reply.why, reply.claims) == ("unreconciled", [])
    assert world.listed() == [0]
