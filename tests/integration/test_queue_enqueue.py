"""Adding prompts: each at most once, whatever is repeated, retried, replaced or removed."""

from collections.abc import Iterator

import pytest
import redis

from common import names
from common.errors import ConflictError, StateLostError
from common.models import Params, RunRecord
from common.queue import Runs
from tests.support.queue_world import QueueWorld
from tests.support.redis_server import RedisServer


@pytest.fixture
def client(any_redis: RedisServer) -> Iterator["redis.Redis"]:
    with any_redis.client() as client:
        yield client


def test_the_same_call_again_changes_nothing(client: "redis.Redis") -> None:
    world = QueueWorld(client)

    first, second = world.add(range(5)), world.add(range(7))

    assert (first.added, first.queued) == (5, 0)
    assert (second.added, second.queued) == (2, 5)
    assert world.listed() == [0, 1, 2, 3, 4, 5, 6]
    assert world.counts().total == world.counts().queued == 7
    world.check()


def test_a_key_twice_in_one_call_is_one_prompt(client: "redis.Redis") -> None:
    world = QueueWorld(client)

    reply = world.ledger.add([world.item(1), world.item(1)])
    world.known[world.key(1)] = 1

    assert (reply.added, reply.queued) == (1, 1)
    assert world.listed() == [1]


def test_ended_prompts_are_counted_and_not_touched(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=4)
    jobs = world.jobs("e1")
    world.claim(jobs, 3)
    world.finish(jobs, [0])
    world.finish(jobs, [1], "failed")
    world.finish(jobs, [2], "cancelled")

    reply = world.add(range(4))

    assert (reply.completed, reply.failed, reply.cancelled, reply.queued) == (1, 1, 1, 1)
    assert world.listed() == [3]
    world.check()


def test_another_text_for_a_key_is_a_conflict_and_changes_nothing(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=2)
    before = world.job(1)

    reply = world.add(range(3), text="other")

    assert reply.conflicts == [world.key(0), world.key(1)]
    assert reply.added == 1
    assert world.job(1) == before
    world.check()


def test_a_retry_raises_the_try_of_failed_and_cancelled_prompts_only(
    client: "redis.Redis",
) -> None:
    world = QueueWorld(client, prompts=4)
    jobs = world.jobs("e1")
    world.claim(jobs, 3)
    world.finish(jobs, [0])
    world.finish(jobs, [1], "failed")
    world.finish(jobs, [2], "cancelled")

    reply = world.add(range(4), retry=True)
    again = world.add(range(4), retry=True)

    assert (reply.retried, reply.completed, reply.queued) == (2, 1, 1)
    assert (again.retried, again.queued) == (0, 3)
    assert world.states() == {0: "completed/1", 1: "queued/2", 2: "queued/2", 3: "queued/1"}
    assert world.failed_registry() == set()
    assert world.listed() == [3, 1, 2]
    world.check()


def test_a_retried_prompt_begins_its_try_without_the_old_charges(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    jobs.charge(world.run, world.key(0), "timeout")
    jobs.give_back(world.held([0]), died=True)
    world.claim(jobs)
    world.finish(jobs, [0], "failed")

    world.add([0], retry=True)

    [claim] = world.claim(jobs).claims
    assert (claim.try_, claim.attempts, claim.deaths, claim.lost) == (2, 0, 0, 0)


def test_replacing_takes_the_new_text_of_what_is_queued_or_failed(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=4)
    jobs = world.jobs("e1")
    world.claim(jobs, 3)
    world.finish(jobs, [0])
    world.finish(jobs, [1], "failed")
    world.finish(jobs, [2], "cancelled")

    reply = world.add(range(4), text="other", replace=True)

    assert (reply.replaced, reply.retried) == (2, 0), "one prompt, one count"
    assert reply.conflicts == [world.key(0), world.key(2)]
    assert world.states() == {0: "completed/1", 1: "queued/2", 2: "cancelled/1", 3: "queued/1"}
    claims = world.claim(jobs).claims
    assert {world.number(claim.key): b"other" in claim.prompt for claim in claims} == {
        1: True,
        3: True,
    }
    world.check()


def test_a_replaced_prompt_keeps_nothing_of_the_old_text(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    jobs.charge(world.run, world.key(0), "timeout")
    client.hset(names.rq_job(world.hex(0)), "turns", "the first answer")
    jobs.give_back(world.held([0]))

    world.add([0], text="other", replace=True)

    [claim] = world.claim(jobs).claims
    assert claim.attempts == 0
    assert "turns" not in world.job(0)


def test_replacing_a_prompt_whose_job_was_removed_puts_it_back(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    client.delete(names.rq_job(world.hex(0)), names.rq_queue(world.run))

    world.add([0], text="other", replace=True)

    assert world.listed() == [0]
    assert {"data", "origin", "status", "timeout", "request"} <= set(world.job(0))


def test_the_old_texts_result_is_dropped_and_the_job_goes_back(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    world.add([0], text="other", replace=True)

    words = world.finish(jobs, [0])

    assert words == ["changed"]
    assert world.listed() == [0]
    assert world.entries() == []
    assert world.leased() == set()
    assert world.states() == {0: "queued/1"}
    world.check()


def test_a_removed_body_is_restored_and_listed_once(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=3)
    client.delete(names.rq_job(world.hex(1)))
    client.lrem(names.rq_queue(world.run), 0, world.hex(1))

    reply = world.add(range(3))

    assert (reply.restored, reply.queued) == (1, 3)
    assert world.listed() == [0, 2, 1]
    assert world.add(range(3)).restored == 0
    world.check()


def test_a_run_made_anew_refuses_those_who_know_the_old_one(client: "redis.Redis") -> None:
    old = QueueWorld(client, prompts=1)
    client.flushall()
    QueueWorld(client, uid="2" * 32)

    with pytest.raises(StateLostError):
        old.add([1])


def test_a_run_is_made_once_and_a_differing_call_is_told_what_differs(
    client: "redis.Redis",
) -> None:
    world = QueueWorld(client)
    runs = Runs(client)
    same = RunRecord(
        run="demo",
        uid="2" * 32,
        params=Params(max_tokens=16),
        output="/nowhere",
        created_at="2027-01-01T00:00:00+00:00",
    )
    other = RunRecord(
        run="demo",
        uid="2" * 32,
        params=Params(max_tokens=17),
        output="/nowhere",
        created_at="2027-01-01T00:00:00+00:00",
    )

    assert runs.create(same).uid == world.record.uid
    with pytest.raises(ConflictError, match=r"max_tokens.*16.*17"):
        runs.create(other)


def test_a_job_has_a_time_limit_above_all_its_attempts_and_no_prompt_in_its_arguments(
    client: "redis.Redis",
) -> None:
    world = QueueWorld(client, prompts=1)
    params = world.record.params

    job = world.job(0)

    assert int(job["timeout"]) > 600 * params.attempts
    assert b"words" not in job["data"]
    assert set(job) == {"data", "origin", "status", "timeout", "request"}
