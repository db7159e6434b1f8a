"""Faults in a row pause their run with the reason, unless something of it succeeds."""

from pathlib import Path

import redis

from common import names
from common.queue import Jobs
from tests.support.producer_cli import producer, running
from tests.support.queue_world import QueueWorld
from tests.support.redis_server import RedisServer

FAULTS = 20


def fail(world: QueueWorld, jobs: Jobs, count: int) -> None:
    """Let so many prompts fail one after the other."""
    for _ in range(count):
        [number] = world.claimed(jobs, 1)
        world.finish(jobs, [number], "failed")


def paused(world: QueueWorld) -> str | None:
    state = world.runs.state(world.run)
    assert state is not None
    return state.paused


def let_the_last_death_be_over(world: QueueWorld) -> None:
    world.client.hset(names.run(world.run), "death_ms", 0)


def die(world: QueueWorld, jobs: Jobs, count: int = 4) -> None:
    """Let a server die with some prompts, which come back in two calls."""
    let_the_last_death_be_over(world)
    held = world.held(world.claimed(jobs, count, alone=True))
    jobs.give_back(held[:1], died=True)
    jobs.give_back(held[1:], died=True)


def test_twenty_failures_in_a_row_pause_the_run_with_the_last_reason(
    redis_client: "redis.Redis",
) -> None:
    world = QueueWorld(redis_client, prompts=40)
    jobs = world.jobs("e1")

    fail(world, jobs, FAULTS - 1)
    before = paused(world)
    fail(world, jobs, 1)

    assert before is None
    assert paused(world) == "20 faults in a row and no success, the last one: bad_request"
    assert (world.claim(jobs).claims, world.claim(jobs).why) == ([], "paused")


def test_charged_attempts_are_faults_too(redis_client: "redis.Redis") -> None:
    world = QueueWorld(redis_client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)

    for before in range(FAULTS + 1):
        jobs.charge(world.run, world.key(0), "nan", before=before)

    # One more than twenty, since the prompt that is in flight may still succeed.
    assert paused(world) == "21 faults in a row and no success, the last one: nan"


def test_a_success_anywhere_in_the_run_begins_the_count_anew(redis_client: "redis.Redis") -> None:
    world = QueueWorld(redis_client, prompts=60)
    jobs, other = world.jobs("e1"), world.jobs("e2", group="gpu1@test", server="http://b:1")

    fail(world, jobs, FAULTS - 1)
    world.finish(other, world.claimed(other, 1))
    fail(world, jobs, FAULTS - 1)

    assert paused(world) is None


def test_the_faults_of_one_run_pause_no_other(redis_client: "redis.Redis") -> None:
    world = QueueWorld(redis_client, prompts=25)
    other = QueueWorld(redis_client, prompts=5, run="other", priority=-1)
    jobs = world.jobs("e1")

    fail(world, jobs, FAULTS)

    assert paused(world) is not None
    assert paused(other) is None
    reply = world.claim(jobs, 5)
    assert {claim.run for claim in reply.claims} == {"other"}


def test_a_pause_that_was_lifted_allows_twenty_more(redis_client: "redis.Redis") -> None:
    world = QueueWorld(redis_client, prompts=60)
    jobs = world.jobs("e1")
    fail(world, jobs, FAULTS)

    world.runs.resume(world.run)
    fail(world, jobs, FAULTS - 1)
    before = paused(world)
    fail(world, jobs, 1)

    assert before is None
    assert paused(world) is not None


def test_servers_that_die_again_and_again_without_a_success_pause_the_run(
    redis_client: "redis.Redis",
) -> None:
    world = QueueWorld(redis_client, prompts=200)
    jobs = world.jobs("e1")

    for _ in range(FAULTS - 1):
        die(world, jobs)
    before = paused(world)
    die(world, jobs)

    assert before is None
    assert paused(world) == (
        "20 faults in a row and no success, the last one: a server died or stood still"
    )
    assert world.counts().failed == 0


def test_one_death_is_one_fault_however_many_prompts_it_takes(redis_client: "redis.Redis") -> None:
    world = QueueWorld(redis_client, prompts=64)
    jobs = world.jobs("e1")
    held = world.held(world.claimed(jobs, 64))

    for each in held:
        jobs.give_back([each], died=True)

    assert redis_client.hget(names.run(world.run), "faults") == b"1"


def test_worker_processes_that_die_again_and_again_pause_the_run(
    redis_client: "redis.Redis",
) -> None:
    world = QueueWorld(redis_client, prompts=200)
    jobs = world.jobs("e1")

    for _ in range(FAULTS):
        let_the_last_death_be_over(world)
        world.expire_leases(world.claimed(jobs, 4, alone=True))
        jobs.reap()

    assert "a worker process died" in str(paused(world))
    assert world.counts().failed == 0


def test_people_are_told_why_and_what_to_do(
    redis_client: "redis.Redis", valkey: RedisServer, tmp_path: Path
) -> None:
    world = QueueWorld(redis_client, prompts=25)
    fail(world, world.jobs("e1"), FAULTS)
    env = {"HEADRACE_REDIS": valkey.tcp_url}

    page = producer("status", world.run, cwd=tmp_path, env=env).out
    with running("watch", world.run, cwd=tmp_path, env=env) as watching:
        assert watching.stdout is not None
        line = watching.stdout.readline().decode()

    for said in (" ".join(page.split()), line):
        assert "20 faults in a row and no success, the last one: bad_request" in said
        assert f"`producer resume {world.run}` lifts it" in said


def test_people_are_told_of_suspects(
    redis_client: "redis.Redis", valkey: RedisServer, tmp_path: Path
) -> None:
    world = QueueWorld(redis_client, prompts=3)
    jobs = world.jobs("e1")
    die(world, jobs)
    die(world, jobs)

    page = producer("status", world.run, cwd=tmp_path, env={"HEADRACE_REDIS": valkey.tcp_url}).out

    assert world.parked() == {0, 1, 2}
    assert "3 prompts were at work when servers or worker processes died" in page
