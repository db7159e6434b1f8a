"""Python and Lua agree on where a key stands: bucket, field, value, partition, job id."""

import os
from collections.abc import Iterator
from functools import partial
from typing import cast

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common import names
from common.queue.records import LedgerEntry
from common.queue.scripts import source
from tests.support.queue_world import QueueWorld, lua_partition
from tests.support.redis_server import RedisServer

KEYS = st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=30, unique=True)
EDGES = [b"\0" * 16, b"\xff" * 16, b"\0" * 15 + b"\1", b"\x80" + b"\0" * 15, b"\n{}%" * 4]
# One server serves all examples: each takes a run of its own, or leaves nothing behind.
same_server = partial(
    settings, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def client(any_redis: RedisServer) -> Iterator["redis.Redis"]:
    with any_redis.client() as client:
        yield client


@pytest.mark.parametrize("bits", range(12, 29))
@same_server(max_examples=10)
@given(keys=KEYS)
def test_a_key_stands_in_the_bucket_and_field_that_python_names(
    client: "redis.Redis", bits: int, keys: list[bytes]
) -> None:
    client.flushall()
    world = QueueWorld(client, bits=bits)
    keys = [*EDGES, *(key for key in keys if key not in EDGES)]

    world.ledger.add([(key, key[:8], b"{}") for key in keys])

    for key in keys:
        value = client.hget(names.ledger_bucket("demo", key, bits), names.ledger_field(key, bits))
        assert value is not None
        assert LedgerEntry.read(cast("bytes", value)) == LedgerEntry(key[:8], "queued", 1)
    listed = cast("list[bytes]", client.lrange(names.rq_queue("demo"), 0, -1))
    assert [bytes.fromhex(job_id.decode()) for job_id in listed] == keys


@pytest.mark.parametrize("bits", [12, 13, 15, 16, 17, 20])
def test_the_audit_reads_keys_back_from_bucket_and_field(client: "redis.Redis", bits: int) -> None:
    world = QueueWorld(client, bits=bits)
    keys = [*EDGES, *(os.urandom(16) for _ in range(200))]
    world.ledger.add([(key, key[:8], b"{}") for key in keys])
    client.delete(*(names.rq_job(key.hex()) for key in keys))

    relisted, missing = world.ledger.audit(relist=True)

    assert relisted == 0
    assert sorted(missing) == sorted(keys)


@same_server(max_examples=60)
@given(
    key=st.binary(min_size=16, max_size=16) | st.sampled_from(EDGES),
    partitions=st.integers(min_value=1, max_value=99),
)
def test_lua_and_python_put_a_key_into_the_same_partition(
    client: "redis.Redis", key: bytes, partitions: int
) -> None:
    # The prelude's own function, asked directly.
    script = source("lookup").replace("local run = ARGV[1]", "local run = ARGV[1]\n" + PROBE, 1)

    answer = client.eval(script, 0, "demo", key, partitions)

    assert answer == lua_partition(key, partitions) == int.from_bytes(key) % partitions


PROBE = "if #ARGV == 3 then return partition_of(ARGV[2], tonumber(ARGV[3])) end"


def test_results_come_into_the_partition_of_their_key(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=60, partitions=7)
    jobs = world.jobs("e1")
    world.claim(jobs, 60)

    world.finish(jobs, range(60))

    found = {
        number: partition for partition in range(7) for number, _, _ in world.entries(partition)
    }
    assert found == {number: int.from_bytes(world.key(number)) % 7 for number in range(60)}


def test_a_high_try_is_kept_in_digits(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")

    for try_ in range(1, 12):
        world.claim(jobs)
        assert world.finish(jobs, [0], "failed", try_=try_) == ["ok"]
        world.add([0], retry=True)

    assert world.states() == {0: "queued/12"}
    assert world.counts().failed == 0
