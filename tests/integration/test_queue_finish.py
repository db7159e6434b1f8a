"""Finishing: the first finisher of a (key, try) wins, and everything else is told so."""

from collections.abc import Iterator

import msgspec
import pytest
import redis

from common import names
from common.quality import FLAGS
from tests.support.queue_world import QueueWorld
from tests.support.redis_server import RedisServer


@pytest.fixture
def client(any_redis: RedisServer) -> Iterator["redis.Redis"]:
    with any_redis.client() as client:
        yield client


def test_a_completion_is_entry_ledger_counters_and_a_job_gone_in_one_step(
    client: "redis.Redis",
) -> None:
    world = QueueWorld(client, prompts=2)
    jobs = world.jobs("e1")
    world.claim(jobs, 1)

    words = jobs.finish([world.result(0, flags=("truncated", "empty"))])

    counts = world.counts()
    assert words == ["ok"]
    assert world.entries() == [(0, "c", 1)]
    assert world.states() == {0: "completed/1", 1: "queued/1"}
    assert world.job(0) == {}
    assert (counts.completed, counts.queued, counts.in_flight) == (1, 1, 0)
    assert (counts.input_tokens, counts.output_tokens) == (10, 5)
    assert (counts.truncated, counts.empty, counts.stream_entries) == (1, 1, 1)
    assert sum(world.runs.completions_per_bucket(world.run)[1].values()) == 1
    world.check()


def test_every_flag_of_a_completion_is_counted_and_no_other(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=3)
    jobs = world.jobs("e1")
    world.claim(jobs, 3)

    jobs.finish([world.result(0, flags=tuple(FLAGS)), world.result(1, flags=("repeating", "new"))])
    jobs.finish([world.result(2, "failed", flags=("repeating",))])

    told = msgspec.structs.asdict(world.counts())
    assert {flag: told[flag] for flag in FLAGS} == {**dict.fromkeys(FLAGS, 1), "repeating": 2}


def test_a_failure_keeps_its_request_in_rqs_failed_registry_without_expiry(
    client: "redis.Redis",
) -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    client.expire(names.rq_job(world.hex(0)), 100)

    world.finish(jobs, [0], "failed")

    job = world.job(0)
    assert world.failed_registry() == {0}
    assert job["request"] == world.item(0)[2]
    assert job["status"] == b"failed"
    assert {"data", "origin"} <= set(job)
    assert client.ttl(names.rq_job(world.hex(0))) == -1
    assert world.counts().output_tokens == 0
    world.check()


def test_a_failure_whose_job_was_deleted_can_still_be_requeued(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    client.delete(names.rq_job(world.hex(0)))

    assert world.finish(jobs, [0], "failed") == ["ok"]

    assert {"data", "origin", "status"} <= set(world.job(0))
    assert world.job(0)["status"] == b"failed"
    world.check()


def test_the_first_finisher_wins_whoever_holds_the_lease(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    frozen, other = world.jobs("e1"), world.jobs("e2")
    world.claim(frozen)
    world.expire_leases([0])
    other.reap()
    assert world.claimed(other) == [0]

    first, second = world.finish(frozen, [0]), world.finish(other, [0], "failed")

    assert (first, second) == (["ok"], ["duplicate"])
    assert world.entries() == [(0, "c", 1)]
    assert world.counts().duplicates_dropped == 1
    assert world.failed_registry() == set()
    world.check()


def test_a_result_of_a_lower_try_is_dropped_and_the_new_tries_lease_stays(
    client: "redis.Redis",
) -> None:
    world = QueueWorld(client, prompts=1)
    frozen, other = world.jobs("e1"), world.jobs("e2")
    world.claim(frozen)
    world.expire_leases([0])
    other.reap()
    world.claim(other)
    world.finish(other, [0], "failed")
    world.add([0], retry=True)
    world.claim(other)

    assert world.finish(frozen, [0]) == ["duplicate"]
    assert world.leased() == {0}
    assert world.finish(other, [0], try_=2) == ["ok"]
    assert world.entries() == [(0, "f", 1), (0, "c", 2)]
    world.check()


def test_a_call_that_says_it_repeats_itself_is_not_counted(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    world.finish(jobs, [0])

    assert jobs.finish([world.result(0, repeat=True)]) == ["repeated"]
    assert world.counts().duplicates_dropped == 0
    assert len(world.entries()) == 1


def test_another_fingerprint_is_dropped_and_counted(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)

    words = jobs.finish([world.result(0, text="other")])

    assert words == ["changed"]
    assert client.hget(names.counts(world.run), "changed_dropped") == b"1"
    assert world.states() == {0: "queued/1"}
    world.check()


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_run_that_redis_does_not_know_keeps_its_results_unless_it_was_forgotten(
    client: "redis.Redis", *, forgotten: bool
) -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    client.flushall()
    if forgotten:
        client.set(names.tombstone(world.run), world.record.uid)

    words = world.finish(jobs, [0])

    assert words == ["forgotten" if forgotten else "unknown"]
    assert client.keys() == ([names.tombstone(world.run).encode()] if forgotten else [])


def test_a_key_that_a_rebuild_has_not_taught_yet_is_kept(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    client.flushall()
    QueueWorld(client)

    assert world.finish(jobs, [0]) == ["untaught"]
    assert world.entries() == []

    world.add([0])
    assert world.finish(jobs, [0]) == ["ok"]
    world.check()


def test_another_run_of_the_same_name_takes_no_results_of_the_old_one(
    client: "redis.Redis",
) -> None:
    old = QueueWorld(client, prompts=1)
    jobs = old.jobs("e1")
    old.claim(jobs)
    client.flushall()
    new = QueueWorld(client, prompts=1, uid="2" * 32)

    assert old.finish(jobs, [0]) == ["forgotten"]
    assert new.states() == {0: "queued/1"}
    assert new.entries() == []


def test_finishes_are_accepted_while_redis_and_store_are_not_brought_together(
    client: "redis.Redis",
) -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    world.claim(jobs)
    client.hdel(names.run(world.run), "reconciled")

    assert world.finish(jobs, [0]) == ["ok"]


def test_a_batch_is_told_word_by_word(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=3)
    jobs = world.jobs("e1")
    world.claim(jobs)
    world.finish(jobs, [1])
    unknown = world.result(2, run="unheard-of")

    words = jobs.finish([world.result(0), world.result(1), unknown, world.result(2)])

    assert words == ["ok", "duplicate", "unknown", "ok"]
    world.check()


def test_a_prompt_completed_by_a_late_finisher_leaves_every_registry(
    client: "redis.Redis",
) -> None:
    world = QueueWorld(client, prompts=1)
    frozen = world.jobs("e1")
    world.claim(frozen)
    world.expire_leases([0])
    frozen.reap()
    # A stock worker took it meanwhile and failed it, as RQ does.
    client.delete(names.rq_queue(world.run))
    client.zadd(names.rq_failed(world.run), {world.hex(0): 4e9})
    client.zadd(names.rq_canceled(world.run), {world.hex(0): 1})

    assert world.finish(frozen, [0]) == ["ok"]

    assert world.failed_registry() == set()
    assert client.zcard(names.rq_canceled(world.run)) == 0


def test_twenty_faults_in_a_row_pause_the_run_and_say_why(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=30)
    jobs = world.jobs("e1")

    def fail_one(number: int) -> str | None:
        world.claim(jobs, 1)
        world.finish(jobs, [number], "failed")
        state = world.runs.state(world.run)
        assert state is not None
        return state.paused

    reasons = [fail_one(number) for number in range(20)]

    assert reasons[:19] == [None] * 19
    assert reasons[19] is not None
    assert "20 faults" in reasons[19]
    assert "bad_request" in reasons[19]
    assert world.claim(jobs).why == "paused"
    world.runs.resume(world.run)
    assert fail_one(20) is None


def test_one_success_anywhere_in_the_run_begins_the_row_of_faults_anew(
    client: "redis.Redis",
) -> None:
    world = QueueWorld(client, prompts=60)
    jobs = world.jobs("e1")

    for number in range(57):
        world.claim(jobs, 1)
        world.finish(jobs, [number], "completed" if number % 19 == 18 else "failed")

    state = world.runs.state(world.run)
    assert state is not None
    assert state.paused is None
