"""Finished turns on their jobs: kept in one step, handed out with the claim, gone with the try."""

from collections.abc import Iterator

import pytest
import redis

from common import names
from common.errors import RedisFullError
from common.models import KeptTurns
from common.queue import Jobs
from tests.support.queue_world import QueueWorld
from tests.support.redis_server import RedisServer

ONE, TWO, THREE = (b'{"turn":%d}\n' % number for number in (1, 2, 3))


@pytest.fixture
def client(any_redis: RedisServer) -> Iterator["redis.Redis"]:
    with any_redis.client() as client:
        yield client


def keep(world: QueueWorld, jobs: Jobs, turns: bytes, *, try_: int = 1, text: str = "") -> str:
    key, fingerprint, _ = world.item(0, text) if text else world.item(0)
    kept = KeptTurns(
        run=world.run,
        uid=world.record.uid,
        key=key,
        fingerprint=fingerprint,
        try_=try_,
        turns=turns,
    )
    [word] = jobs.keep_turns([kept])
    return word


def kept(world: QueueWorld, jobs: Jobs) -> bytes:
    """What the next claim hands out."""
    [claim] = world.claim(jobs).claims
    return claim.turns if isinstance(claim.turns, bytes) else b""


def test_kept_turns_come_with_the_next_claim(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=2)
    jobs = world.jobs("e1")
    world.claim(jobs)

    assert keep(world, jobs, ONE) == "ok"
    assert keep(world, jobs, ONE + TWO) == "ok"
    jobs.give_back(world.held([0, 1]))

    claims = world.claim(world.jobs("e2")).claims
    assert {world.number(claim.key): claim.turns for claim in claims} == {0: ONE + TWO, 1: b""}
    world.check()


def test_a_death_and_a_lost_lease_leave_them(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs, other = world.jobs("e1"), world.jobs("e2")
    world.claim(jobs)
    keep(world, jobs, ONE)

    jobs.give_back(world.held([0]), died=True)
    assert kept(world, jobs) == ONE
    keep(world, jobs, ONE + TWO)
    world.expire_leases([0])
    other.reap()
    assert kept(world, other) == ONE + TWO


def test_a_suspect_is_tried_behind_its_turns(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    for _ in range(2):
        world.claim(jobs)
        keep(world, jobs, ONE)
        jobs.give_back(world.held([0]), died=True)
    assert world.parked() == {0}

    [claim] = world.claim(jobs, alone=True).claims

    assert claim.turns == ONE


def test_the_same_call_again_says_so_and_changes_nothing(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)

    assert [keep(world, jobs, ONE) for _ in range(2)] == ["ok", "repeated"]
    assert keep(world, jobs, ONE + TWO) == "ok"
    assert keep(world, jobs, ONE) == "repeated"
    assert world.job(0)["turns"] == ONE + TWO


def test_turns_that_do_not_go_on_behind_the_kept_ones_are_refused(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    keep(world, jobs, ONE)

    assert keep(world, jobs, TWO) == "other"
    assert keep(world, jobs, THREE + TWO) == "other"
    assert world.job(0)["turns"] == ONE


def test_a_process_whose_lease_another_one_has_keeps_nothing(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    frozen, other = world.jobs("e1"), world.jobs("e2")
    world.claim(frozen)
    world.expire_leases([0])
    other.reap()
    world.claim(other)

    assert keep(world, frozen, ONE) == "stolen"
    assert keep(world, other, TWO) == "ok"
    assert world.job(0)["turns"] == TWO


def test_a_job_that_nobody_has_claimed_since_takes_its_turns(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    jobs.give_back(world.held([0]))

    assert keep(world, jobs, ONE) == "ok"

    assert world.leased() == set()
    assert kept(world, jobs) == ONE
    world.check()


def test_keeping_renews_no_lease(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    world.expire_leases([0])

    keep(world, jobs, ONE)

    assert client.zscore(names.leases(world.run), world.hex(0)) == 1


def test_a_turn_ends_the_charges_of_its_attempts_once(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    jobs.charge(world.run, world.key(0), "timeout")
    keep(world, jobs, ONE)
    assert "attempts" not in world.job(0)
    assert jobs.charge(world.run, world.key(0), "timeout", before=0) == 1

    keep(world, jobs, ONE)

    assert world.job(0)["attempts"] == b"1"


def test_a_turn_is_a_success_among_faults(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    for _ in range(19):
        jobs.charge(world.run, world.key(0), "timeout")

    keep(world, jobs, ONE)
    for _ in range(19):
        jobs.charge(world.run, world.key(0), "timeout")

    state = world.runs.state(world.run)
    assert state is not None
    assert state.paused is None


def test_a_completion_takes_them_away_with_the_job(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    keep(world, jobs, ONE)

    world.finish(jobs, [0])

    assert keep(world, jobs, ONE + TWO) == "gone"
    assert world.job(0) == {}
    world.check()


def test_a_failure_drops_them_and_so_does_the_next_try(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    keep(world, jobs, ONE)

    world.finish(jobs, [0], "failed")
    assert "turns" not in world.job(0)
    world.add([0], retry=True)

    assert kept(world, jobs) == b""
    assert keep(world, jobs, ONE) == "gone"
    assert keep(world, jobs, THREE, try_=2) == "ok"


def test_a_replaced_prompt_takes_no_turns_of_its_old_text(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    keep(world, jobs, ONE)

    world.add([0], text="other", replace=True)

    assert keep(world, jobs, ONE + TWO) == "changed"
    assert "turns" not in world.job(0)
    assert keep(world, jobs, THREE, text="other") == "ok"


def test_a_job_without_its_body_keeps_none_until_the_body_is_back(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    client.delete(names.rq_job(world.hex(0)))

    assert keep(world, jobs, ONE) == "removed"
    assert world.job(0) == {}
    world.add([0])
    assert keep(world, jobs, ONE) == "ok"


def test_a_redis_that_was_wiped_takes_all_turns_at_once(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    keep(world, jobs, ONE)
    client.flushall()

    assert keep(world, jobs, ONE + TWO) == "unknown"
    again = QueueWorld(client)
    assert keep(again, jobs, ONE + TWO) == "untaught"
    again.add([0])
    assert keep(again, jobs, ONE + TWO) == "ok"


def test_a_rebuilt_run_whose_request_waits_in_inputs_is_asked_again(
    client: "redis.Redis",
) -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    client.flushall()
    again = QueueWorld(client)
    again.runs.set_window(again.run, 0)
    again.add([0])
    assert again.job(0) == {}

    assert keep(again, jobs, ONE) == "removed"

    assert again.job(0) == {}


def test_a_forgotten_run_keeps_none(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    client.delete(names.run(world.run))
    client.set(names.tombstone(world.run), world.record.uid)

    assert keep(world, jobs, ONE) == "forgotten"
    QueueWorld(client, run="demo", uid="2" * 32)
    assert keep(world, jobs, ONE) == "forgotten"


def test_a_full_redis_refuses_them_and_still_takes_the_job_back(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    client.config_set("maxmemory", "1")

    with pytest.raises(RedisFullError):
        keep(world, jobs, ONE)

    assert jobs.give_back(world.held([0])) == ["queued"]
