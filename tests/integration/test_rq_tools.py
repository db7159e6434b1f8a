"""RQ's own tools, of both promised versions, are right about our queue and harmless to it."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import pytest
import redis

from common import names
from common.models import FailureRow
from common.queue.audit import audit_run
from tests.support.queue_world import QueueWorld
from tests.support.redis_server import RedisServer
from tests.support.rq_tools import RQ_VERSIONS, RqTools
from tests.support.server_process import wait_until
from workers.group import SlotWorker


@pytest.fixture(params=RQ_VERSIONS)
def tools(request: pytest.FixtureRequest, valkey: RedisServer) -> RqTools:
    return RqTools(request.param, valkey.url)


@pytest.fixture
def world(redis_client: "redis.Redis") -> QueueWorld:
    return QueueWorld(redis_client, prompts=10)


@pytest.fixture
def group(redis_client: "redis.Redis") -> Iterator[SlotWorker]:
    """A worker group as RQ knows it."""
    worker = SlotWorker(["demo"], name="gpu0@test-1", connection=redis_client)
    worker.register_birth()  # type: ignore[no-untyped-call]
    yield worker
    worker.register_death()  # type: ignore[no-untyped-call]


def everything(client: "redis.Redis") -> dict[bytes, tuple[object, bool]]:
    """All that is in Redis, byte for byte, but for RQ's lock that it cleaned its registries."""
    found = cast("list[bytes]", client.keys("*"))
    return {
        key: (client.dump(key), client.ttl(key) < 0)
        for key in found
        if not key.startswith(b"rq:clean_registries")
    }


# --- rq info -------------------------------------------------------------------------------------


def test_rq_info_shows_depth_executing_failed_and_workers(
    tools: RqTools, world: QueueWorld, group: SlotWorker
) -> None:
    jobs = world.jobs("e1")
    world.claim(jobs, 5)
    world.finish(jobs, [0])
    world.finish(jobs, [1, 2], "failed")

    shown = tools.rq("info", "--raw")

    assert "queue demo 5, 2 executing, 0 finished, 2 failed" in shown
    assert f"worker {group.name}" in shown or f"{group.name} " in shown
    assert "words" not in shown


@pytest.mark.usefixtures("group")
def test_polling_rq_info_changes_nothing_not_even_with_a_lease_long_run_out(
    tools: RqTools,
    world: QueueWorld,
    redis_client: "redis.Redis",
    tmp_path: Path,
) -> None:
    jobs = world.jobs("e1")
    world.claim(jobs, 3)
    world.finish(jobs, [0], "failed")
    world.expire_leases([1])
    before = everything(redis_client)

    poll = tools.start("info", "--raw", "--interval", "0.01", log=tmp_path / "log")
    wait_until(
        lambda: (tmp_path / "log").read_text().count("2 executing") >= 50, "fifty polls of rq info"
    )
    poll.stop()
    tools.rq("info")

    assert everything(redis_client) == before
    assert world.leased() == {1, 2}


# --- rq suspend, rq resume -----------------------------------------------------------------------


def test_rq_suspend_stops_claims_and_rq_resume_lets_them_go_on(
    tools: RqTools, world: QueueWorld
) -> None:
    jobs = world.jobs("e1")
    world.claim(jobs, 2)

    tools.rq("suspend")
    suspended = world.claim(jobs)
    finished = world.finish(jobs, [0])
    tools.rq("resume")

    assert (suspended.why, suspended.claims) == ("suspended", [])
    assert finished == ["ok"]
    assert world.claimed(jobs, 2) == [2, 3]


# --- rq requeue ----------------------------------------------------------------------------------


def test_rq_requeue_gives_failed_prompts_a_new_try_and_moves_the_counters_once(
    tools: RqTools, world: QueueWorld
) -> None:
    jobs = world.jobs("e1")
    world.claim(jobs, 10)
    world.finish(jobs, range(7))
    world.finish(jobs, [7, 8, 9], "failed")

    one = tools.rq("requeue", "--queue", "demo", world.hex(8))
    world.check()
    first = world.claim(jobs)
    rest = tools.rq("requeue", "--queue", "demo", "--all")
    second = world.claim(jobs)

    assert "Requeueing 1 jobs" in one
    assert "Requeueing 2 jobs" in rest
    assert [(world.number(c.key), c.try_, c.attempts) for c in first.claims] == [(8, 2, 0)]
    assert sorted((world.number(c.key), c.try_) for c in second.claims) == [(7, 2), (9, 2)]
    assert [claim.prompt for claim in first.claims] == [world.item(8)[2]]
    assert (world.counts().failed, world.counts().in_flight) == (0, 3)
    assert world.finish(jobs, [8], try_=2) == ["ok"]
    assert world.finish(jobs, [7, 9], "failed", try_=2) == ["ok", "ok"]
    assert world.failed_registry() == {7, 9}
    world.check()


def test_a_failure_whose_job_had_been_deleted_is_requeued_and_asks_for_its_body(
    tools: RqTools, world: QueueWorld, redis_client: "redis.Redis"
) -> None:
    jobs = world.jobs("e1")
    world.claim(jobs, 1)
    redis_client.delete(names.rq_job(world.hex(0)))
    world.finish(jobs, [0], "failed")

    tools.rq("requeue", "--queue", "demo", "--all")
    first = world.claimed(jobs)
    report = audit_run(redis_client, world.record)

    assert 0 not in first
    assert report.missing == (world.key(0),)
    world.add([0])
    assert [(c.try_, c.prompt) for c in world.claim(jobs).claims] == [(2, world.item(0)[2])]
    world.check()


# --- Job.cancel, Job.delete ----------------------------------------------------------------------


def test_a_job_cancelled_while_queued_ends_as_cancelled_with_a_row_of_its_own(
    tools: RqTools, world: QueueWorld, redis_client: "redis.Redis"
) -> None:
    tools.python(f"Job.fetch('{world.hex(3)}', connection=redis).cancel()")
    jobs = world.jobs("e1")
    claimed = world.claimed(jobs)

    report = audit_run(redis_client, world.record)

    assert 3 not in claimed
    assert (report.cancelled, report.relisted, report.missing) == (1, 0, ())
    assert world.entries() == [(3, "x", 1)]
    assert world.counts().cancelled == 1
    assert redis_client.zcard(names.rq_canceled("demo")) == 0
    assert world.job(3) == {}
    [(_, fields)] = cast("list[tuple[bytes, dict[bytes, bytes]]]", redis_client.xrange(
        names.results("demo", 0)))  # fmt: skip
    row = msgspec.json.decode(fields[b"r"], type=FailureRow)
    assert (row.outcome, row.reason, row.key, row.line) == (
        "cancelled",
        "cancelled",
        world.hex(3),
        4,
    )
    assert bytes(row.id) == b"3"
    assert bytes(row.request) == world.item(3)[2]
    assert audit_run(redis_client, world.record).cancelled == 0
    world.check()


def test_a_job_cancelled_in_flight_is_let_go_at_the_next_renewal_unless_it_finished_first(
    tools: RqTools, world: QueueWorld, redis_client: "redis.Redis"
) -> None:
    jobs = world.jobs("e1")
    world.claim(jobs, 2)
    for number in (0, 1):
        tools.python(f"Job.fetch('{world.hex(number)}', connection=redis).cancel()")

    early = audit_run(redis_client, world.record)
    finished = world.finish(jobs, [0])
    renewed = jobs.renew(world.held([0, 1]))
    late = audit_run(redis_client, world.record)

    assert (early.cancelled, late.cancelled) == (0, 1)
    assert (finished, renewed) == (["ok"], ["gone", "gone"])
    assert world.entries() == [(0, "c", 1), (1, "x", 1)]
    assert redis_client.zcard(names.rq_canceled("demo")) == 0
    world.check()


def test_cancelling_a_failed_job_leaves_it_failed_and_requeueable(
    tools: RqTools, world: QueueWorld, redis_client: "redis.Redis"
) -> None:
    jobs = world.jobs("e1")
    world.claim(jobs, 1)
    world.finish(jobs, [0], "failed")
    tools.python(f"Job.fetch('{world.hex(0)}', connection=redis).cancel()")

    report = audit_run(redis_client, world.record)

    assert report.cancelled == 0
    assert world.states()[0] == "failed/1"
    assert world.failed_registry() == {0}
    tools.rq("requeue", "--queue", "demo", "--all")
    world.claim(jobs)
    assert world.states()[0] == "queued/2"


def test_a_cancelled_prompt_comes_back_with_a_retry(
    tools: RqTools, world: QueueWorld, redis_client: "redis.Redis"
) -> None:
    tools.python(f"Job.fetch('{world.hex(0)}', connection=redis).cancel()")
    audit_run(redis_client, world.record)

    assert world.add([0], retry=True).retried == 1

    jobs = world.jobs("e1")
    assert 0 in world.claimed(jobs)
    assert world.finish(jobs, [0], try_=2) == ["ok"]
    world.check()


def test_a_deleted_job_is_named_by_the_audit(
    tools: RqTools, world: QueueWorld, redis_client: "redis.Redis"
) -> None:
    jobs = world.jobs("e1")
    world.claim(jobs, 1)
    for number in (0, 5):
        tools.python(f"Job.fetch('{world.hex(number)}', connection=redis).delete()")

    report = audit_run(redis_client, world.record)

    assert report.missing == (world.key(5),)
    assert jobs.renew(world.held([0])) == ["ok"]
    assert world.finish(jobs, [0]) == ["ok"]
    world.check()


# --- rq empty ------------------------------------------------------------------------------------


def test_after_rq_empty_every_lost_body_is_named_and_comes_back_once(
    tools: RqTools, world: QueueWorld, redis_client: "redis.Redis"
) -> None:
    jobs = world.jobs("e1")
    world.claim(jobs, 3)
    world.finish(jobs, [0])

    said = tools.rq("empty", "demo")
    report = audit_run(redis_client, world.record)

    assert "7 jobs removed" in said
    assert sorted(world.number(key) for key in report.missing) == [3, 4, 5, 6, 7, 8, 9]
    assert world.counts().queued == 7
    world.add([world.number(key) for key in report.missing])
    assert audit_run(redis_client, world.record).missing == ()
    assert sorted(world.claimed(jobs, 20)) == [3, 4, 5, 6, 7, 8, 9]
    world.check()


# --- What RQ shows -------------------------------------------------------------------------------


def test_no_tool_of_rq_shows_a_word_of_a_prompt(tools: RqTools, world: QueueWorld) -> None:
    jobs = world.jobs("e1")
    world.claim(jobs, 2)
    world.finish(jobs, [0], "failed")

    shown = tools.rq("info") + tools.python(
        "from rq.serializers import JSONSerializer\n"
        "for job_id in [k.decode()[7:] for k in redis.keys('rq:job:*')]:\n"
        "    job = Job.fetch(job_id, connection=redis, serializer=JSONSerializer)\n"
        "    print(job, repr(job), job.to_dict(), job.get_call_string(), job.get_status())\n"
    )

    assert world.hex(5) in shown
    assert "workers.group.generate" in shown
    assert "words" not in shown
    assert "prompts.jsonl" not in shown
