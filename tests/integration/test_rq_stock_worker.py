"""A stock RQ worker on our queue fails its jobs visibly, and the audit puts them back."""

import pytest
import redis

from common import names
from common.queue.audit import audit_run
from tests.support.queue_world import SECRET, QueueWorld
from tests.support.redis_server import RedisServer
from tests.support.rq_tools import RQ_VERSIONS, RqTools


@pytest.fixture(params=RQ_VERSIONS)
def tools(request: pytest.FixtureRequest, valkey: RedisServer) -> RqTools:
    return RqTools(request.param, valkey.url)


@pytest.fixture
def world(redis_client: "redis.Redis") -> QueueWorld:
    return QueueWorld(redis_client, prompts=10)


@pytest.mark.parametrize("serializer", ["json", "pickle"])
@pytest.mark.timeout(400)
def test_a_stock_worker_fails_the_jobs_visibly_and_the_audit_puts_them_back(
    tools: RqTools, redis_client: "redis.Redis", serializer: str
) -> None:
    world = QueueWorld(redis_client, prompts=3)

    said = tools.rq(
        "worker", "--burst", "-S", serializer, "-w", "rq.worker.SimpleWorker", "demo"
    )  # fmt: skip
    shown = tools.rq("info", "--raw", "--only-queues")
    report = audit_run(redis_client, world.record)

    assert "queue demo 0, 0 executing, 0 finished, 3 failed" in shown
    assert SECRET not in said
    assert serializer == "pickle" or "workers start" in said
    assert world.counts().failed == 0
    assert (report.relisted, report.missing) == (3, ())
    assert world.failed_registry() == set()
    assert [redis_client.ttl(names.rq_job(world.hex(number))) for number in range(3)] == [-1] * 3
    jobs = world.jobs("e1")
    assert sorted(world.claimed(jobs)) == [0, 1, 2]
    assert world.finish(jobs, [0, 1, 2]) == ["ok"] * 3
    world.check()


def test_a_job_that_rq_failed_goes_back_even_while_others_wait(
    tools: RqTools, world: QueueWorld, redis_client: "redis.Redis"
) -> None:
    tools.rq(
        *("worker", "--burst", "--max-jobs", "1", "-S", "json"),
        *("-w", "rq.worker.SimpleWorker", "demo"),
    )
    assert world.failed_registry() == {0}

    report = audit_run(redis_client, world.record)

    assert report.relisted == 1
    assert world.listed() == [*range(1, 10), 0]
    world.check()


def test_a_job_that_a_stock_worker_died_with_is_listed_again(
    world: QueueWorld, redis_client: "redis.Redis"
) -> None:
    # Between RQ's pop and its start: in its intermediate list, in no other.
    world.jobs("e1")
    for _ in range(10):
        redis_client.lmove("rq:queue:demo", "rq:queue:demo:intermediate", "LEFT", "RIGHT")

    report = audit_run(redis_client, world.record)

    assert report.relisted == 10
    assert sorted(world.listed()) == list(range(10))
