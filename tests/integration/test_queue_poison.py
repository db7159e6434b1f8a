"""Prompts that kill their servers are found in few restarts, and nobody else is found guilty.

The groups and servers are played (`tests.support.farm`); queue, parking, halving and the verdict
are the real ones.
"""

import math
import random

import pytest
import redis

from tests.support.farm import Farm
from tests.support.queue_world import QueueWorld

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def client(redis_client: "redis.Redis") -> "redis.Redis":
    return redis_client


def poisons(*numbers: int):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """Servers that die whenever one of these is open."""
    return lambda held, _alone: bool(held & set(numbers))


def most_restarts(slots: int) -> int:
    """Two in company, halves of what was in flight, and once more alone."""
    return math.ceil(math.log2(slots)) + 3


@pytest.mark.parametrize("slots", [4, 8, 32, 72, 256])
@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_one_poison_costs_about_log2_of_what_is_in_flight(
    client: "redis.Redis", slots: int, place: float
) -> None:
    prompts = 2 * slots + 5
    culprit = round(place * (prompts - 1))
    farm = Farm(QueueWorld(client, prompts=prompts), poisons(culprit), slots=slots)

    farm.run()

    assert farm.convicted == [culprit]
    assert sorted(farm.finished) == [each for each in range(prompts) if each != culprit]
    assert farm.restarts <= most_restarts(slots)
    assert farm.world.counts().retries == 0


@pytest.mark.parametrize("culprits", [(3, 20), (0, 1), (5, 14, 31), (2, 9, 17, 33, 40)])
@pytest.mark.parametrize("groups", [1, 3])
def test_several_poisons_are_all_found_and_nobody_else(
    client: "redis.Redis", culprits: tuple[int, ...], groups: int
) -> None:
    farm = Farm(QueueWorld(client, prompts=60), poisons(*culprits), groups=groups, slots=16)

    farm.run()

    assert sorted(farm.convicted) == sorted(culprits)
    assert len(farm.finished) == 60 - len(culprits)
    assert farm.restarts <= len(culprits) * most_restarts(16)


def test_prompts_that_kill_only_together_are_both_answered(client: "redis.Redis") -> None:
    farm = Farm(QueueWorld(client, prompts=40), lambda held, _alone: {7, 23} <= held, slots=40)

    farm.run()

    assert farm.convicted == []
    assert len(farm.finished) == 40
    assert farm.restarts <= most_restarts(40)


def test_a_server_that_dies_with_any_two_answers_them_one_by_one(client: "redis.Redis") -> None:
    farm = Farm(QueueWorld(client, prompts=24), lambda held, _alone: len(held) > 1, slots=8)

    farm.run()

    assert farm.convicted == []
    assert len(farm.finished) == 24
    assert farm.restarts <= 24


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_prompt_that_kills_only_now_and_then_is_answered(
    client: "redis.Redis", times: int
) -> None:
    seen = 0

    def dies(held: set[int], _alone: bool) -> bool:  # noqa: FBT001
        nonlocal seen
        seen += 5 in held
        return 5 in held and seen <= times

    farm = Farm(QueueWorld(client, prompts=20), dies, slots=8)

    farm.run()

    assert (farm.convicted, len(farm.finished), farm.restarts) == ([], 20, times)


@pytest.mark.parametrize("suspects", [1, 2, 8])
def test_a_death_while_an_innocent_is_tried_alone_does_not_convict_it(
    client: "redis.Redis", suspects: int
) -> None:
    # The worst of luck: each death hits the same prompts, and each first trial alone.
    deaths = dict.fromkeys(range(suspects), 0)

    def dies(held: set[int], alone: bool) -> bool:  # noqa: FBT001
        wanted = held & set(deaths)
        if not wanted:
            return False
        due = all(deaths[number] < (3 if alone else 2) for number in wanted)
        for number in wanted if due else ():
            deaths[number] += 1
        return due

    farm = Farm(QueueWorld(client, prompts=suspects + 10), dies, slots=8)

    farm.run()

    assert farm.convicted == []
    assert len(farm.finished) == suspects + 10
    assert farm.restarts >= 3


@pytest.mark.parametrize("seed", range(3))
def test_servers_that_die_for_reasons_of_their_own_convict_nobody(
    client: "redis.Redis", seed: int
) -> None:
    # A death in about fifty answers' time: thirty of them, whatever is open.
    dice = random.Random(seed)
    left = 30

    def dies(_held: set[int], _alone: bool) -> bool:  # noqa: FBT001
        nonlocal left
        dead = left > 0 and dice.random() < 1 / 50
        left -= dead
        return dead

    farm = Farm(QueueWorld(client, prompts=1500), dies, groups=4, slots=4)

    farm.run()

    assert (farm.convicted, len(farm.finished)) == ([], 1500)
    assert farm.restarts >= 5


def test_suspects_are_tried_by_one_group_while_the_others_serve_on(client: "redis.Redis") -> None:
    farm = Farm(QueueWorld(client, prompts=200), poisons(0), groups=4, slots=8)
    meanwhile = 0

    while not farm.is_over():
        before = len(farm.finished)
        farm.tick()
        down = any(group.down for group in farm.groups)
        meanwhile += len(farm.finished) > before and down
        assert farm.ticks < 2000

    assert farm.convicted == [0]
    assert farm.tried_at_once == 1
    assert meanwhile >= 1
    assert farm.restarts <= most_restarts(8)


def test_the_search_goes_on_when_the_group_that_tries_dies(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=40)
    farm = Farm(world, poisons(11), groups=2, slots=8)
    killed = 0

    while not farm.is_over():
        farm.tick()
        trying = [
            group for group in farm.groups if any(job.suspect for job in group.held.values())
        ]
        if trying and not killed and len(farm.groups) > 1:
            # SIGKILL in the middle of a trial: its leases run out, the other one reaps them.
            killed += 1
            group = trying[0]
            group.alive = False
            world.expire_leases(group.held)
            other = next(each for each in farm.groups if each is not group)
            assert other.jobs.reap()[2] == []
        assert farm.ticks < 2000

    assert killed == 1
    assert farm.convicted == [11]
    assert len(farm.finished) == 39
    world.check()


def test_two_runs_each_find_their_own(client: "redis.Redis") -> None:
    worlds = [QueueWorld(client, prompts=30, run=name) for name in ("demo", "other")]
    worlds[0].known |= worlds[1].known
    guilty = {worlds[0].hex(4), worlds[1].hex(21)}
    found = _serve_both(worlds, guilty)

    assert found == guilty
    for world in worlds:
        counts = world.counts()
        assert (counts.completed, counts.failed, counts.retries) == (29, 1, 0)


def test_a_redis_that_was_wiped_in_mid_search_begins_it_anew(client: "redis.Redis") -> None:
    farm = Farm(QueueWorld(client, prompts=40), poisons(13), slots=16)
    while farm.restarts < 4:
        farm.tick()
    finished = set(farm.finished)

    client.flushall()
    rest = [number for number in range(40) if number not in finished]
    world = QueueWorld(client, prompts=0)
    world.add(rest)
    again = Farm(world, poisons(13), slots=16)
    again.run()

    assert farm.convicted == []
    assert again.convicted == [13]
    assert sorted([*finished, *again.finished, 13]) == list(range(40))
    assert again.restarts <= most_restarts(16)


def _serve_both(worlds: list[QueueWorld], guilty: set[str]) -> set[str]:
    """Serve two runs with one group; returns the keys, in hex, that were convicted."""
    farm = Farm(worlds[0], lambda _held, _alone: False)
    jobs = farm.groups[0].jobs
    by_run = {world.run: world for world in worlds}
    found: set[str] = set()
    for _ in range(500):
        reply = worlds[0].claim(jobs, 8, alone=True)
        if not reply.claims:
            break
        keys = {claim.key.hex() for claim in reply.claims}
        held = [(claim.run, claim.key) for claim in reply.claims]
        assert not reply.suspects or len({claim.run for claim in reply.claims}) == 1
        if not keys & guilty:
            for claim in reply.claims:
                world = by_run[claim.run]
                assert world.finish(jobs, [world.number(claim.key)]) == ["ok"]
            continue
        claim = reply.claims[0]
        if reply.alone and claim.died_alone >= 1 and claim.deaths >= 4:
            world = by_run[claim.run]
            world.finish(jobs, [world.number(claim.key)], "failed")
            found |= keys
        else:
            jobs.give_back(held, died=True)
    return found
