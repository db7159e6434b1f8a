"""Suspects tried alone, and leases that run out: who takes them over, and what that counts as."""

from collections.abc import Iterator

import pytest
import redis

from common import names
from common.queue import Jobs
from common.queue.jobs import MOST_LOST, REAP_LIMIT
from tests.support.queue_world import QueueWorld
from tests.support.redis_server import RedisServer


@pytest.fixture
def client(any_redis: RedisServer) -> Iterator["redis.Redis"]:
    with any_redis.client() as client:
        yield client


# --- Suspects ------------------------------------------------------------------------------------


def park(world: QueueWorld, jobs: Jobs, numbers: list[int]) -> None:
    for _ in range(2):
        world.claim(jobs, len(numbers))
        jobs.give_back(world.held(numbers), died=True)
    assert world.parked() == set(numbers)


def test_a_suspect_is_tried_alone_by_one_process_at_a_time(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=2)
    mine, other = world.jobs("e1"), world.jobs("e2")
    park(world, mine, [0, 1])

    busy = world.claim(mine)
    first = world.claim(mine, alone=True)
    second = world.claim(other, alone=True)

    assert busy.claims == []
    assert (len(first.claims), first.alone) == (1, True)
    assert second.claims == []
    world.finish(mine, [world.number(first.claims[0].key)])
    assert len(world.claim(other, alone=True).claims) == 1
    world.check()


def test_a_suspect_comes_without_jobs_of_other_runs(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1, priority=1)
    jobs = world.jobs("e1")
    park(world, jobs, [0])
    QueueWorld(client, prompts=5, run="other")

    reply = world.claim(jobs, 5, alone=True)

    assert [claim.run for claim in reply.claims] == ["demo"]
    assert reply.alone


def test_a_suspect_comes_only_when_nothing_else_is_left(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    park(world, jobs, [0])
    world.add([1])

    assert world.claimed(jobs, alone=True) == [1]


def test_a_suspect_given_back_stays_a_suspect(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    park(world, jobs, [0])
    world.claim(jobs, alone=True)

    assert jobs.give_back(world.held([0])) == ["parked"]

    reply = world.claim(jobs, alone=True)
    assert (reply.alone, reply.claims[0].deaths) == (True, 2)


def test_a_suspect_whose_lease_is_lost_stays_a_suspect(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    park(world, jobs, [0])
    world.claim(jobs, alone=True)
    world.expire_leases([0])

    assert jobs.reap() == (0, 1, [])

    assert (world.parked(), world.listed()) == ({0}, [])
    world.check()


def test_a_suspect_that_rq_cancelled_is_not_tried(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    park(world, jobs, [0])
    client.hset(names.rq_job(world.hex(0)), "status", "canceled")

    assert world.claim(jobs, alone=True).claims == []
    world.check()


def test_a_retaken_suspect_is_no_longer_parked(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    client.hset(names.rq_job(world.hex(0)), "lost", MOST_LOST - 1)
    world.expire_leases([0])
    assert jobs.reap()[:2] == (0, 1)

    assert jobs.renew(world.held([0])) == ["retaken"]
    assert world.parked() == set()
    world.check()


# --- Reap ----------------------------------------------------------------------------------------


def test_expired_leases_go_back_to_the_front_and_count_as_lost(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=4)
    dead, other = world.jobs("e1"), world.jobs("e2")
    world.claim(dead, 3)
    world.expire_leases([0, 1])

    assert other.reap() == (2, 0, [])

    assert sorted(world.listed()[:2]) == [0, 1]
    assert world.leased() == {2}
    assert [claim.lost for claim in world.claim(other).claims] == [1, 1, 0]
    world.check()


def test_reaping_leaves_what_is_not_due(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=2)
    jobs = world.jobs("e1")
    world.claim(jobs)

    assert jobs.reap() == (0, 0, [])
    assert world.leased() == {0, 1}


def test_a_dead_process_loses_all_its_leases_at_once_and_nobody_elses(
    client: "redis.Redis",
) -> None:
    world = QueueWorld(client, prompts=6)
    dead, other = world.jobs("e1"), world.jobs("e2")
    world.claim(dead, 3)
    world.claim(other, 2)

    assert other.reap(dead_epoch="e1") == (3, 0, [])

    assert world.leased() == {3, 4}
    assert sorted(world.listed()) == [0, 1, 2, 5]
    world.check()


def test_a_dead_processs_leases_are_found_among_many_older_ones(client: "redis.Redis") -> None:
    older = REAP_LIMIT + 50
    world = QueueWorld(client, prompts=older + 2)
    other, dead = world.jobs("e1"), world.jobs("e2")
    world.claim(other, older)
    world.claim(dead, 2)

    assert other.reap(dead_epoch="e2") == (2, 0, [])
    assert len(world.leased()) == older


def test_five_lost_leases_park_a_job_and_one_more_alone_convicts_it(
    client: "redis.Redis",
) -> None:
    world = QueueWorld(client, prompts=1)
    jobs, judge = world.jobs("e1"), world.jobs("e2")

    replies = []
    for _ in range(MOST_LOST):
        world.claim(jobs)
        world.expire_leases([0])
        replies.append(judge.reap())
    alone = world.claim(jobs, alone=True)
    world.expire_leases([0])
    back, parked, convicted = judge.reap()

    assert replies == [(1, 0, [])] * (MOST_LOST - 1) + [(0, 1, [])]
    assert alone.alone
    assert (back, parked) == (0, 0)
    assert [(world.number(claim.key), claim.lost) for claim in convicted] == [(0, MOST_LOST + 1)]
    assert world.started() == {f"{world.hex(0)}:e2"}
    assert world.job(0)["status"] == b"started"
    assert world.finish(judge, [0], "failed") == ["ok"]
    assert world.states() == {0: "failed/1"}
    world.check()


def test_a_reaped_job_whose_body_is_gone_waits_for_the_audit(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    client.delete(names.rq_job(world.hex(0)))
    world.expire_leases([0])

    assert jobs.reap() == (0, 0, [])

    assert world.leased() == set()
    assert world.listed() == []
    world.check()
