"""Leases: renewed, given back, let go when cancelled; attempts charged to whoever holds one."""

from collections.abc import Iterator
from typing import cast

import pytest
import redis

from common import names
from common.queue.forgets import Forgets, Left
from tests.support.queue_world import QueueWorld
from tests.support.redis_server import RedisServer


@pytest.fixture
def client(any_redis: RedisServer) -> Iterator["redis.Redis"]:
    with any_redis.client() as client:
        yield client


# --- Renew ---------------------------------------------------------------------------------------


def test_a_renewal_says_of_each_job_where_it_stands(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=5)
    mine, other = world.jobs("e1"), world.jobs("e2")
    world.claim(mine)
    world.expire_leases([1])
    world.client.zincrby(names.leases(world.run), -120_000, world.hex(2))
    other.reap()
    assert world.claimed(other, 1) == [1]
    world.finish(other, [3])

    words = mine.renew(
        [*world.held(range(4)), ("unheard-of", world.key(0)), (world.run, b"k" * 16)]
    )

    # Both were reaped: 1 came first in the list and was claimed, 2 still waits there.
    assert words == ["ok", "stolen", "retaken", "gone", "unknown", "unknown"]
    assert world.leased() == {0, 1, 2, 4}
    world.check()


def test_a_renewal_puts_the_deadline_off(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    world.expire_leases([0])

    jobs.renew(world.held([0]))

    assert jobs.reap() == (0, 0, [])
    assert world.leased() == {0}


def test_a_retaken_job_is_not_claimed_again_from_the_list(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    mine, other = world.jobs("e1"), world.jobs("e2")
    world.claim(mine)
    world.expire_leases([0])
    other.reap()
    assert mine.renew(world.held([0])) == ["retaken"]

    assert world.claimed(other) == []
    assert world.finish(mine, [0]) == ["ok"]
    world.check()


def test_a_job_deleted_under_its_lease_stays_its_holders(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    mine, other = world.jobs("e1"), world.jobs("e2")
    world.claim(mine)
    client.delete(names.rq_job(world.hex(0)))

    assert other.renew(world.held([0])) == ["stolen"]
    assert mine.renew(world.held([0])) == ["ok"]
    assert world.finish(mine, [0]) == ["ok"]
    world.check()


def test_a_cancelled_run_takes_its_leases_back_at_the_next_renewal(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=2)
    mine, other = world.jobs("e1"), world.jobs("e2")
    world.claim(mine, 1)
    world.claim(other, 1)
    client.hset(names.run(world.run), "cancelled", "1")

    assert mine.renew(world.held([0, 1])) == ["gone", "stolen"]

    assert world.leased() == {1}
    assert world.counts().queued == 1
    world.check()


# --- Give back -----------------------------------------------------------------------------------


def test_jobs_given_back_come_first_and_in_their_order(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=6)
    jobs = world.jobs("e1")
    world.claim(jobs, 4)

    words = jobs.give_back(world.held([0, 1, 3]))

    assert words == ["queued"] * 3
    assert world.listed() == [0, 1, 3, 4, 5]
    [claim] = world.claim(jobs, 1).claims
    assert (claim.attempts, claim.deaths, claim.lost) == (0, 0, 0)
    world.check()


def test_only_the_holder_can_give_back_and_only_once(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    mine, other = world.jobs("e1"), world.jobs("e2")
    world.claim(mine)

    words = [jobs.give_back(world.held([0]), died=True) for jobs in (other, mine, mine)]

    assert words == [["not_held"], ["queued"], ["not_held"]]
    assert world.listed() == [0]
    assert world.claim(mine).claims[0].deaths == 1
    world.check()


def test_a_job_in_flight_at_two_deaths_is_parked(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=2)
    jobs = world.jobs("e1")
    world.claim(jobs, 1)
    assert jobs.give_back(world.held([0]), died=True) == ["queued"]
    world.claim(jobs, 1)

    assert jobs.give_back(world.held([0]), died=True) == ["parked"]

    assert (world.parked(), world.listed()) == ({0}, [1])
    assert world.claimed(jobs) == [1]
    assert world.counts().queued == 1
    world.check()


# --- Cancelled in flight -------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["give_back", "reap", "renew"])
def test_a_job_that_rq_cancelled_in_flight_does_not_go_back_into_the_queue(
    client: "redis.Redis", way: str
) -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    client.hset(names.rq_job(world.hex(0)), "status", "canceled")

    if way == "give_back":
        jobs.give_back(world.held([0]))
    elif way == "renew":
        assert jobs.renew(world.held([0])) == ["gone"]
    else:
        world.expire_leases([0])
        jobs.reap()

    assert (world.listed(), world.leased()) == ([], set())
    assert world.job(0)["status"] == b"canceled"
    world.check()


# --- Charge --------------------------------------------------------------------------------------


def test_attempts_are_counted_on_the_job_and_outlive_its_process(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)

    counted = [jobs.charge(world.run, world.key(0), "timeout") for _ in range(2)]
    world.expire_leases([0])
    jobs.reap()

    assert counted == [1, 2]
    assert world.claim(jobs).claims[0].attempts == 2
    assert world.counts().retries == 2


def test_a_process_that_lost_its_lease_charges_nothing(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    frozen, other = world.jobs("e1"), world.jobs("e2")
    world.claim(frozen)
    world.expire_leases([0])
    other.reap()
    world.claim(other)

    frozen.charge(world.run, world.key(0), "timeout")

    assert world.counts().retries == 0
    assert other.charge(world.run, world.key(0), "timeout") == 1


def test_a_charge_that_repeats_itself_is_counted_once(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)

    counted = [
        jobs.charge(world.run, world.key(0), "timeout", before=before) for before in (0, 0, 1, 1)
    ]

    assert counted == [1, 1, 2, 2]
    assert world.counts().retries == 2


def test_charges_in_a_row_pause_the_run_too(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)

    for _ in range(21):
        jobs.charge(world.run, world.key(0), "empty_answer")

    state = world.runs.state(world.run)
    assert state is not None
    assert "empty_answer" in (state.paused or "")


def test_a_charge_brings_nothing_back_of_a_run_that_is_being_forgotten(
    client: "redis.Redis",
) -> None:
    """A lease that has run out does not stop a forget, and its holder may be awake again."""
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    world.expire_leases([0])
    forgets = Forgets(client, world.run)
    left = forgets.begin(world.record.uid, lose_results=False)
    assert isinstance(left, Left)

    for _ in forgets.sweep(left, total=1):
        assert jobs.charge(world.run, world.key(0), "timeout") == 0

    found = {name.decode() for name in cast("list[bytes]", client.keys("*"))}
    found = {name for name in found if "slots" not in name}
    assert found == {names.tombstone(world.run)}
