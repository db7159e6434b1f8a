"""Suspects are halved at each death until one is left alone: few deaths, few sittings."""

import math
from collections.abc import Iterator

import pytest
import redis

from common.queue import Jobs
from tests.support.queue_world import QueueWorld
from tests.support.redis_server import RedisServer

SUSPECTS = 24


@pytest.fixture
def client(any_redis: RedisServer) -> Iterator["redis.Redis"]:
    with any_redis.client() as client:
        yield client


def park(world: QueueWorld, jobs: Jobs, count: int) -> None:
    """Let the server die twice with all of them."""
    for _ in range(2):
        world.claim(jobs, count)
        jobs.give_back(world.held(range(count)), died=True)
    assert world.parked() == set(range(count))


@pytest.mark.parametrize("culprit", range(0, SUSPECTS, 5))
def test_one_culprit_is_found_by_halving(client: "redis.Redis", culprit: int) -> None:
    world = QueueWorld(client, prompts=SUSPECTS)
    jobs = world.jobs("e1")
    park(world, jobs, SUSPECTS)
    deaths, sittings, innocent = 0, 0, []

    while True:
        sittings += 1
        reply = world.claim(jobs, SUSPECTS, alone=True)
        tried = [world.number(claim.key) for claim in reply.claims]
        assert reply.suspects
        assert reply.alone == (len(tried) == 1)
        if culprit not in tried:
            world.finish(jobs, tried)
            innocent += tried
            continue
        deaths += 1
        if reply.alone:
            break
        assert jobs.give_back(world.held(tried), died=True) == ["parked"] * len(tried)
        world.check()

    assert tried == [culprit]
    assert deaths <= math.ceil(math.log2(SUSPECTS)) + 1
    assert sittings <= 2 * math.ceil(math.log2(SUSPECTS)) + 2


def test_suspects_that_are_innocent_end_in_few_sittings(client: "redis.Redis") -> None:
    # Two servers died for reasons of their own, with the same prompts.
    world = QueueWorld(client, prompts=SUSPECTS)
    jobs = world.jobs("e1")
    park(world, jobs, SUSPECTS)
    sittings = 0

    while world.parked():
        sittings += 1
        reply = world.claim(jobs, SUSPECTS, alone=True)
        world.finish(jobs, [world.number(claim.key) for claim in reply.claims])

    assert sittings <= math.ceil(math.log2(SUSPECTS)) + 1
    world.check()


def test_no_more_suspects_come_than_were_asked_for(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=SUSPECTS)
    jobs = world.jobs("e1")
    park(world, jobs, SUSPECTS)

    assert len(world.claim(jobs, 3, alone=True).claims) == 3


def test_one_group_at_a_time_tries_suspects_until_all_of_them_have_ended(
    client: "redis.Redis",
) -> None:
    world = QueueWorld(client, prompts=8)
    mine, other = world.jobs("e1"), world.jobs("e2")
    park(world, mine, 8)

    tried = [world.number(claim.key) for claim in world.claim(mine, 8, alone=True).claims]
    assert len(tried) == 4
    assert world.claim(other, 8, alone=True).claims == []
    world.finish(mine, tried[:3])
    assert world.claim(other, 8, alone=True).claims == []
    world.finish(mine, tried[3:])

    assert len(world.claim(other, 8, alone=True).claims) == 2


def test_those_of_most_deaths_are_tried_first(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=8)
    jobs = world.jobs("e1")
    park(world, jobs, 8)
    tried = [world.number(claim.key) for claim in world.claim(jobs, 8, alone=True).claims]
    jobs.give_back(world.held(tried), died=True)

    again = [world.number(claim.key) for claim in world.claim(jobs, 8, alone=True).claims]

    assert len(again) == 2
    assert set(again) < set(tried)


def test_suspects_given_back_uncharged_are_tried_again_as_before(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=8)
    jobs = world.jobs("e1")
    park(world, jobs, 8)
    tried = [world.number(claim.key) for claim in world.claim(jobs, 8, alone=True).claims]

    assert jobs.give_back(world.held(tried)) == ["parked"] * 4

    assert world.parked() == set(range(8))
    assert len(world.claim(jobs, 8, alone=True).claims) == 4


def test_a_worker_that_dies_with_a_few_suspects_convicts_none(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=4)
    jobs = world.jobs("e1")
    park(world, jobs, 4)
    tried = [world.number(claim.key) for claim in world.claim(jobs, 4, alone=True).claims]
    for number in tried:
        client.hset(f"rq:job:{world.hex(number)}", "lost", 50)
    world.expire_leases(tried)

    assert jobs.reap() == (0, 2, [])

    assert world.parked() == set(range(4))
