"""Samples of worker groups in a real Redis: bounded, forgotten in time, and in nobody's way."""

from typing import Any, cast

import pytest
import redis

from common import names
from common.errors import RedisUnusableError
from common.group_figures import GroupFigures
from common.queue import Groups
from common.queue.samples import Samples
from common.telemetry import (
    KEPT_MS,
    MOST_RUNS,
    MOST_SAMPLE_BYTES,
    MOST_SAMPLES,
    Sample,
    ServerCounters,
    encode,
    sample_of,
)
from tests.support.redis_server import RedisServer

UID = "0123456789abcdef0123456789abcdef"


def sample(number: int = 0, *, runs: int = 1, text: str = "") -> Sample:
    """A sample as a worker group at full work makes it."""
    figures = GroupFigures(
        group="gpu0@host", epoch=f"a1b2c3{number % 9}", host="h", pid=1,
        server=text or "http://gpu-node-017:30003", state=text or "ready",
        in_flight=72, leased=80, bound=79, cap=72, running=72, queued=7,
        gen_tokens_per_s=1180.0 + number % 100, kv_usage=0.47, mamba_usage=0.66,
        cached_share=0.01, told_s=1.2, strategy=text or "extra_buffer_lazy",
        server_version=text or "0.5.12.post1", completed=100_000 + number,
    )  # fmt: skip
    counters = ServerCounters(
        gen_tokens_total=4e8 + number, prompt_tokens_total=1e8, cached_tokens_total=1e6,
        retracted_total=12, prefill_tokens_per_s=230.0, counted_by="metrics",
    )  # fmt: skip
    uids = [UID] if runs == 1 else [f"{n:012x}" for n in range(runs)]
    return sample_of(figures, counters, runs=dict.fromkeys(uids, 72), dropped=0)


def held_bytes(client: "redis.Redis", key: str) -> int:
    return int(cast("Any", client.memory_usage(key, samples=0)))


def fill(client: "redis.Redis", group: str, made: Sample) -> None:
    """As many samples as a stream takes, and some more."""
    for start in range(0, MOST_SAMPLES + 150, 50):
        with client.pipeline(transaction=False) as pipe:
            for n in range(start, start + 50):
                data = encode(made) if n else encode(sample(n))
                pipe.xadd(
                    names.telemetry(group), {"s": data}, maxlen=MOST_SAMPLES, approximate=False
                )
            pipe.execute()


@pytest.mark.parametrize(
    ("made", "most_bytes"),
    [
        (sample(), 140_000),
        # No text, no number of runs makes it more than this.
        (sample(runs=3 * MOST_RUNS, text="x" * 500), MOST_SAMPLES * (MOST_SAMPLE_BYTES + 90)),
    ],
    ids=["usual", "worst"],
)
def test_a_worker_groups_samples_are_bounded_in_bytes(
    redis_client: "redis.Redis", made: Sample, most_bytes: int
) -> None:
    fill(redis_client, "gpu0@host", made)
    Samples(redis_client).add("gpu0@host", made)

    assert redis_client.xlen(names.telemetry("gpu0@host")) == MOST_SAMPLES
    assert held_bytes(redis_client, names.telemetry("gpu0@host")) <= most_bytes


def test_four_hundred_worker_groups_hold_less_than_a_hundredth_of_a_large_redis(
    redis_client: "redis.Redis",
) -> None:
    fill(redis_client, "gpu0@host", sample())
    one = held_bytes(redis_client, names.telemetry("gpu0@host"))

    assert 400 * one < 64 << 20


def test_samples_run_out_by_themselves_and_the_list_of_groups_with_them(
    redis_client: "redis.Redis",
) -> None:
    samples = Samples(redis_client)
    samples.add("gpu0@gone", sample())
    samples.add("gpu1@here", sample())
    left_ms = redis_client.pttl(names.telemetry("gpu0@gone"))
    assert KEPT_MS - 60_000 < left_ms <= KEPT_MS

    # Three days pass for one of them.
    redis_client.delete(names.telemetry("gpu0@gone"))
    now_ms = int(redis_client.zscore(names.TELEMETRY_GROUPS, "gpu1@here") or 0)
    redis_client.zadd(names.TELEMETRY_GROUPS, {"gpu0@gone": now_ms - KEPT_MS - 1})
    samples.add("gpu1@here", sample())

    assert redis_client.zrange(names.TELEMETRY_GROUPS, 0, -1) == [b"gpu1@here"]
    assert samples.groups(now_ms - KEPT_MS) == ["gpu1@here"]


def test_samples_are_given_by_time_from_all_groups_in_order(redis_client: "redis.Redis") -> None:
    samples = Samples(redis_client)
    for at_ms, group in ((1000, "b"), (1500, "a"), (1500, "c"), (2999, "a"), (3000, "b")):
        redis_client.xadd(names.telemetry(group), {"s": encode(sample(at_ms))}, id=f"{at_ms}-7")
    groups = ["a", "b", "c", "nobody"]

    assert samples.first_ms(groups, 0) == 1000
    assert samples.first_ms(groups, 1001) == 1500
    assert samples.first_ms(groups, 3001) is None
    assert samples.first_ms([], 0) is None
    found = samples.between(groups, 1000, 3000)
    assert [each[:2] for each in found] == [(1000, "b"), (1500, "a"), (1500, "c"), (2999, "a")]
    assert found[0][2] == sample(1000)


def test_what_others_put_there_is_passed_over(redis_client: "redis.Redis") -> None:
    samples = Samples(redis_client)
    redis_client.set(names.telemetry("text"), "x")
    redis_client.xadd(names.telemetry("odd"), {"s": b"\xc1"}, id="1000-0")
    redis_client.xadd(names.telemetry("odd"), {"other": b""}, id="1001-0")
    redis_client.xadd(names.telemetry("odd"), {"s": encode(sample())}, id="1002-0")

    assert [each[0] for each in samples.between(["text", "odd"], 0, 9000)] == [1002]
    assert samples.first_ms(["text"], 0) is None


def test_many_groups_are_read_in_few_calls(redis_client: "redis.Redis") -> None:
    samples, groups = Samples(redis_client), [f"gpu{n}@host" for n in range(200)]
    for group in groups:
        redis_client.xadd(names.telemetry(group), {"s": encode(sample())}, id="1000-0")

    assert len(samples.between(groups, 0, 2000)) == 200


def test_a_full_redis_takes_no_sample_and_keeps_what_it_has() -> None:
    with RedisServer("valkey") as server, server.client() as client:
        samples = Groups(client).samples
        samples.add("gpu0@host", sample())
        client.config_set("maxmemory", 1)

        with pytest.raises(RedisUnusableError):
            samples.add("gpu0@host", sample(1))
        assert client.xlen(names.telemetry("gpu0@host")) == 1
