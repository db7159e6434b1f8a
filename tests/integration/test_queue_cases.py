"""Faults that people met in such queues, tried on ours: cases B59 to B65, B76, B78, B90, B91."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import redis
from rq import Queue
from rq.job import Job
from rq.registry import FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.serializers import JSONSerializer

from common import names, snapshot
from common.errors import RedisFullError
from common.models import Params
from common.queue.ledger import job_timeout_s, request_timeout_s
from common.queue.scripts import source
from tests.support.fleet import write_prompts
from tests.support.producer_cli import environment
from tests.support.queue_world import QueueWorld
from tests.support.redis_proxy import redis_proxy
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.cases


@pytest.fixture
def client(any_redis: RedisServer) -> Iterator["redis.Redis"]:
    with any_redis.client() as client:
        yield client


def test_b59_a_dead_workers_jobs_go_back_after_one_lease_and_are_not_counted_in_flight(
    client: "redis.Redis",
) -> None:
    world = QueueWorld(client, prompts=20)
    dead, other = world.jobs("e1"), world.jobs("e2")
    world.claim(dead, 8)
    world.claim(other, 8)
    seen = [world.counts().in_flight]

    world.expire_leases(range(8))
    assert other.renew(world.held(range(8, 16))) == ["ok"] * 8
    assert other.reap() == (8, 0, [])
    seen.append(world.counts().in_flight)
    again = world.claimed(other, 8)
    world.finish(other, range(16))
    world.claim(other, 4)
    world.finish(other, range(16, 20))

    assert seen == [16, 8]
    assert sorted(again) == list(range(8))
    counts = world.counts()
    assert (counts.completed, counts.failed, counts.duplicates_dropped) == (20, 0, 0)


def test_b61_a_finished_prompt_is_not_failed_by_rqs_cleaning_of_a_stale_entry(
    client: "redis.Redis",
) -> None:
    world = QueueWorld(client, prompts=3)
    jobs = world.jobs("e1")
    world.claim(jobs)
    world.finish(jobs, range(3))
    client.zadd(names.rq_started("demo"), {f"{world.hex(0)}:e1": 1, f"{world.hex(1)}:x": 1})

    for registry in (StartedJobRegistry, FinishedJobRegistry, FailedJobRegistry):
        registry("demo", connection=client).cleanup()

    counts = world.counts()
    assert (counts.completed, counts.failed) == (3, 0)
    assert world.failed_registry() == set()
    assert world.claim(jobs).claims == []


@pytest.mark.parametrize(
    "params",
    [
        Params(max_tokens=16),
        Params(max_tokens=100_000),
        Params(request_timeout_s=9000, attempts=7),
    ],
)
def test_b62_every_job_has_a_limit_of_its_own_above_all_its_attempts(params: Params) -> None:
    assert job_timeout_s(params) > params.attempts * request_timeout_s(params)


def test_b62_rq_reads_that_limit_and_not_its_default(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)

    [job] = Queue("demo", connection=client, serializer=JSONSerializer).jobs

    assert job.timeout == job_timeout_s(world.record.params) > Queue.DEFAULT_TIMEOUT
    assert job.args == [world.hex(0)]


def test_b63_results_wait_without_end_and_lost_job_hashes_break_no_count(
    client: "redis.Redis",
) -> None:
    world = QueueWorld(client, prompts=6)
    jobs = world.jobs("e1")
    world.claim(jobs, 4)
    world.finish(jobs, [0, 1])
    before = world.counts()
    client.delete(*(names.rq_job(world.hex(number)) for number in (2, 5)))

    assert world.counts() == before
    assert client.ttl(names.results("demo", 0)) == -1
    assert client.ttl(names.counts("demo")) == -1
    assert world.claimed(jobs) == [4]
    world.check()


@pytest.mark.timeout(400)
def test_b65_a_file_enqueued_twice_at_the_same_moment_is_queued_once(
    valkey: RedisServer, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    prompts = 4_000
    path = write_prompts(tmp_path / "twice.jsonl", prompts)
    line = [sys.executable, "-m", "producer", "enqueue", str(path), "--redis", valkey.url]
    line += ["--output", str(tmp_path / "out"), "--max-tokens", "8", "--json"]

    both = [
        subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    told = [process.communicate(timeout=90) for process in both]

    assert [process.returncode for process in both] == [0, 0], told
    listed = redis_client.lrange(names.rq_queue("twice"), 0, -1)
    assert len(listed) == len(set(listed)) == prompts
    assert int(redis_client.hget(names.counts("twice"), "total") or 0) == prompts


def test_b65_a_key_queued_again_neither_overwrites_nor_doubles_its_job(
    client: "redis.Redis",
) -> None:
    world = QueueWorld(client, prompts=1)
    before = world.job(0)

    world.add([0])
    world.add([0], text="other")

    assert world.job(0) == before
    assert world.listed() == [0]


def test_b76_ten_thousand_prompts_over_a_slow_network_take_few_answers_and_short_scripts(
    any_redis: RedisServer, client: "redis.Redis"
) -> None:
    """Counted, not timed: a hundred answers at 10 ms are a second, one a prompt were 100 s."""
    world = QueueWorld(client)
    before_s = cpu_s(client)
    with redis_proxy(any_redis.port, delay_s=0.005) as proxy:
        far = redis.Redis.from_url(proxy.url)
        world.ledger = type(world.ledger)(far, world.record)
        world.add(range(10_000))
        far.close()

    assert world.counts().queued == 10_000
    assert 10 <= proxy.answers < 100
    # Ten equal calls: none may keep other clients waiting for 100 ms of the server's work.
    assert cpu_s(client) - before_s < 10 * 0.1


def cpu_s(client: "redis.Redis") -> float:
    """How long the server has worked since its start: what waits for a core does not count."""
    used = client.info("cpu")
    return float(used["used_cpu_user"] + used["used_cpu_sys"])


def share_of(client: "redis.Redis", memory: str) -> float:
    """Give the share of its memory that a Redis with this INFO says is used."""
    prelude = source("enqueue").partition("local function main()")[0]
    faked = (
        "local real = redis\n"
        "local redis = {call = function(name, ...)\n"
        "  if name == 'INFO' then return ARGV[1] end\n"
        "  return real.call(name, ...)\n"
        "end}\n"
    )
    share = client.eval(f"{faked}{prelude}\nreturn tostring(memory_share())", 0, memory)
    return float(cast("bytes", share))


def test_b78_room_is_told_by_what_is_used_and_not_by_what_the_process_holds(
    client: "redis.Redis",
) -> None:
    known = cast("bytes", client.eval("return redis.call('INFO', 'memory')", 0)).decode()

    def saying(**figures: int) -> str:
        said = known
        for name, value in figures.items():
            said, times = re.subn(rf"\b{name}:\d+", f"{name}:{value}", said)
            assert times == 1, f"INFO has {name}"
        return said

    # Fragmented: pages that hold next to nothing are not given back.
    freed = saying(maxmemory=1000, used_memory=125, used_memory_rss=990, used_memory_peak=1000)
    taken = saying(maxmemory=1000, used_memory=625, used_memory_rss=125, used_memory_peak=625)

    assert share_of(client, freed) == pytest.approx(0.2)
    assert share_of(client, taken) == pytest.approx(1)


def test_b78_prompts_find_room_as_soon_as_what_filled_redis_is_deleted(
    client: "redis.Redis",
) -> None:
    world = QueueWorld(client, prompts=1)
    limit = 64 << 20
    junk = [f"junk:{number}" for number in range(16 << 10)]
    with client.pipeline(transaction=False) as pipe:
        for key in junk:
            pipe.set(key, b"x" * 3000)
        pipe.execute()
    client.config_set("maxmemory", limit)
    try:
        with pytest.raises(RedisFullError, match="maxmemory"):
            world.add([1])
        # Every other one first: what is freed lies between what stays.
        client.delete(*junk[::2])
        client.delete(*junk[1::2])
        assert world.add([1]).added == 1
        assert world.claimed(world.jobs("e1")) == [0, 1]
        read = snapshot.read(client, world.run)
        assert read is not None
        assert read.figures()["status"] != "redis_full"
    finally:
        client.config_set("maxmemory", 0)


def test_b90_failed_prompts_are_never_counted_as_completed(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=10)
    jobs = world.jobs("e1")
    world.claim(jobs)

    for number in range(10):
        world.finish(jobs, [number], "failed" if number < 4 else "completed")
        world.check()

    counts = world.counts()
    assert (counts.completed, counts.failed, counts.queued) == (6, 4, 0)


def test_b91_counts_only_rise_while_prompts_are_tried_again(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=5)
    jobs = world.jobs("e1")
    world.claim(jobs)
    seen = [world.counts()]

    for number in range(5):
        for attempt in range(2):
            jobs.charge("demo", world.key(number), "timeout", before=attempt)
            seen.append(world.counts())
        world.finish(jobs, [number])
        seen.append(world.counts())

    assert [counts.completed for counts in seen] == sorted(counts.completed for counts in seen)
    assert {counts.failed for counts in seen} == {0}
    assert (seen[-1].completed, seen[-1].retries) == (5, 10)


def test_the_job_that_rq_fetches_is_complete(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)

    job = Job.fetch(world.hex(0), connection=client, serializer=JSONSerializer)

    assert (job.origin, job.func_name) == ("demo", "workers.group.generate")
    assert str(job.get_status()) in {"queued", "JobStatus.QUEUED"}
    with pytest.raises(RuntimeError, match="workers start"):
        job.perform()
