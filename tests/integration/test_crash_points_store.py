"""A sink, a feeder, a reconcile and an end killed between any two durable steps: what stands then.

Each table names what is durable at a point, in the store and in Redis. Whoever comes next brings
the run to its end from there, with each prompt recorded once.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis

from common import catalog, connect, names
from common.ending import revoke, stands, try_to_end
from common.errors import StoreUnusableError
from common.feeder import Feeder
from common.queue.sinklease import new_token
from common.reconcile import adopt_run, reconcile
from common.store import ObjectStore, open_store
from tests.support.memory_store import MemoryStore
from tests.support.run_world import RUN, World
from tests.support.sinks import (
    KilledError,
    drain,
    expire_lease,
    killed_at,
    partition_sink,
    run_sink,
    standing_intent,
    watching,
)
from workers.sink.progress import ProgressWriter
from workers.sink.run_sink import Standing


@pytest.fixture
def world(redis_client: "redis.Redis", tmp_path: Path) -> Iterator[World]:
    made = World(redis_client, open_store(str(tmp_path / "out")), prompts=10)
    yield made
    made.close()


def objects(store: ObjectStore, folder: str) -> int:
    return len(list(store.list(folder)))


def go_on(world: World) -> Standing:
    """Let the dead one's leases end, and another sink end the run."""
    expire_lease(world)
    world.client.delete(names.maintenance(RUN))
    standing = drain(run_sink(world))
    assert len(world.current()) == world.accepted
    world.check_store()
    world.check_counts()
    assert stands(world.store)
    return standing


# --- A batch -------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """What a batch of four has made durable, and what stands in Redis."""

    shards: int = 0
    failures: int = 0
    keys: int = 0
    manifests: int = 0
    entries: int = 10
    seq: int = 0
    tries: int | None = None


STORED = {
    "sink.took": Batch(),
    "sink.pinned": Batch(),
    "sink.read": Batch(),
    "sink.intent": Batch(tries=0),
    "sink.attempted": Batch(tries=1),
    "sink.built": Batch(tries=1),
    "sink.shards": Batch(1, tries=1),
    "sink.failures": Batch(1, 1, tries=1),
    "sink.keys": Batch(1, 1, 1, tries=1),
    "sink.manifest": Batch(1, 1, 1, 1, tries=1),
    "sink.acknowledged": Batch(1, 1, 1, 1, entries=6, seq=1),
}


def batch_of(world: World) -> Batch:
    tries = world.client.hget(names.sink(RUN, 0), "tries")
    assert (tries is not None) == (standing_intent(world) is not None)
    return Batch(
        shards=objects(world.store, names.SHARDS),
        failures=objects(world.store, names.FAILURES),
        keys=objects(world.store, names.KEYS),
        manifests=objects(world.store, names.MANIFEST),
        entries=world.waiting(),
        seq=int(world.client.hget(names.sink(RUN, 0), "seq") or 0),
        tries=None if tries is None else int(tries),
    )


@pytest.mark.parametrize(("point", "durable"), STORED.items())
def test_a_sink_killed_at_a_point_leaves_what_was_durable_and_the_next_one_goes_on(
    world: World, point: str, durable: Batch
) -> None:
    world.client.hset(names.run(RUN), "pinned", '{"model":"m"}')
    world.finish([0, 1, 2])
    world.finish([3], "failed")
    world.finish(range(4, 10))

    with killed_at(point):
        run_sink(world).step()

    assert batch_of(world) == durable
    assert world.client.hget(names.sink(RUN, 0), "token") is not None
    assert (world.store.get(names.PINNED) is not None) == (point != "sink.took")
    # A shard without a manifest does not exist for a reader.
    assert len(world.records()) == 4 * durable.manifests
    assert go_on(world) is Standing.FAILED
    assert len(world.records()) == 10


REFUSED = {
    "sink.giving_up": (0, True),
    "sink.void": (1, True),
}


@pytest.mark.parametrize(("point", "durable"), REFUSED.items())
def test_killed_while_a_sequence_is_given_up_it_is_given_up_once(
    redis_client: "redis.Redis", point: str, durable: tuple[int, bool]
) -> None:
    refusing = [True]

    def fault(operation: str, name: str) -> str | None:
        refused = operation == "put_if_absent" and name.startswith(names.SHARDS)
        return "refused" if refused and refusing[0] else None

    world = World(redis_client, MemoryStore(fault=fault), prompts=4)
    world.finish(range(4))
    sink = partition_sink(world, token=new_token())
    for _ in range(5):
        with pytest.raises(StoreUnusableError):
            sink.store_one()

    with killed_at(point):
        sink.store_one()

    assert (objects(world.store, names.MANIFEST), standing_intent(world) is not None) == durable
    assert (world.waiting(), world.records()) == (4, [])
    refusing[0] = False
    assert go_on(world) is Standing.COMPLETED
    world.close()


def test_killed_when_a_poison_entry_is_aside_its_failure_stands_once(
    redis_client: "redis.Redis",
) -> None:
    def fault(operation: str, name: str) -> str | None:
        refused = operation == "put_if_absent" and name.startswith(names.SHARDS)
        return "refused" if refused else None

    world = World(redis_client, MemoryStore(fault=fault), prompts=1)
    world.finish([0])
    sink = partition_sink(world, token=new_token())
    for _ in range(5):
        with pytest.raises(StoreUnusableError):
            sink.store_one()

    with killed_at("sink.set_aside"):
        sink.store_one()

    assert [fields[b"o"] for _, fields in world.entries()] == [b"f"]
    assert world.runs.counts(RUN).failed == 1
    hex_ = world.key(0).hex()
    assert world.client.zscore(names.rq_failed(RUN), hex_) is not None
    assert world.client.hget(names.rq_job(hex_), "request") == world.prompt(0)
    assert objects(world.store, names.MANIFEST) == 0
    assert standing_intent(world) is not None
    assert go_on(world) is Standing.FAILED
    assert [record.outcome for record in world.records()] == ["failed"]
    world.close()


@pytest.mark.parametrize(
    ("point", "stored"), [("progress.kept", False), ("progress.stored", True)]
)
def test_killed_while_figures_are_written_each_file_is_whole_or_not_there(
    world: World, tmp_path: Path, point: str, *, stored: bool
) -> None:
    sink = run_sink(world)
    writer = ProgressWriter(world.client, tmp_path / "state", lambda: [sink])

    with killed_at(point):
        writer.write_all()

    assert (tmp_path / "state" / RUN / names.PROGRESS).read_bytes().endswith(b"}")
    assert (world.store.get(names.PROGRESS) is not None) is stored
    world.finish(range(10))
    assert go_on(world) is Standing.COMPLETED


# --- Feeding -------------------------------------------------------------------------------------


class Fed(NamedTuple):
    unfed: int
    listed: int
    moved: bool


@pytest.mark.parametrize(
    ("point", "durable"),
    [
        ("feed.begun", Fed(unfed=20, listed=0, moved=False)),
        ("feed.fed", Fed(unfed=0, listed=20, moved=False)),
        ("feed.advanced", Fed(unfed=0, listed=20, moved=True)),
    ],
)
def test_a_feeder_killed_at_a_point_feeds_nothing_twice(
    redis_client: "redis.Redis", tmp_path: Path, point: str, durable: Fed
) -> None:
    world = World(redis_client, open_store(str(tmp_path / "out")), prompts=30, window=30)
    world.accept(20)
    world.finish(range(30))
    redis_client.delete(names.rq_queue(RUN))

    def where() -> int:
        return int(redis_client.hget(names.run(RUN), "feed_from") or 0)

    began = where()
    with killed_at(point):
        Feeder(redis_client, world.store, world.record).step()

    counts = world.runs.counts(RUN)
    listed = redis_client.llen(names.rq_queue(RUN))
    assert Fed(counts.unfed, int(listed), where() > began) == durable
    assert redis_client.get(names.feed(RUN)) is not None
    redis_client.delete(names.feed(RUN))  # its turn ends
    other = Feeder(redis_client, world.store, world.record)
    while other.step():
        pass
    assert redis_client.llen(names.rq_queue(RUN)) == 20
    assert world.finish(range(30, 50)) == ["ok"] * 20
    assert go_on(world) is Standing.COMPLETED
    world.close()


# --- A rebuild -----------------------------------------------------------------------------------


class Rebuilt(NamedTuple):
    """Of ten prompts 4 are completed and 2 failed in the store, 2 in an orphan, 2 nowhere."""

    manifests: int = 2
    completed: int = 0
    failed: int = 0
    requests: int = 0
    total: int = 0
    reconciled: bool = False


REBUILT = {
    "adopt.made": Rebuilt(),
    "reconcile.begun": Rebuilt(),
    "reconcile.adopting": Rebuilt(),
    "reconcile.closed": Rebuilt(3),
    "reconcile.taught": Rebuilt(3, 6, 2, 0, 8),
    "reconcile.dropped": Rebuilt(3, 6, 2, 0, 8),
    "reconcile.bodies": Rebuilt(3, 6, 2, 2, 8),
    "reconcile.marks": Rebuilt(3, 6, 2, 2, 8),
    "reconcile.inputs": Rebuilt(3, 6, 2, 2, 10),
    "reconcile.marked": Rebuilt(3, 6, 2, 2, 10, reconciled=True),
}


@pytest.mark.parametrize(("point", "durable"), REBUILT.items())
def test_a_rebuild_killed_at_a_point_is_begun_anew(
    world: World, point: str, durable: Rebuilt
) -> None:
    world.finish(range(4))
    world.finish([4, 5], "failed")
    sink = partition_sink(world, token=new_token())
    assert [sink.store_one(), sink.store_one()] == [4, 2]
    world.finish([6, 7])
    with killed_at("sink.shards"):
        sink.store_one()
    world.client.flushall()

    with killed_at(point):
        adopt_run(world.client, world.store)

    counts, state = world.runs.counts(RUN), world.runs.state(RUN)
    assert state is not None
    hexes = [world.key(n).hex() for n in (4, 5)]
    requests = sum(bool(world.client.hget(names.rq_job(hex_), "request")) for hex_ in hexes)
    assert (
        Rebuilt(
            objects(world.store, names.MANIFEST),
            counts.completed,
            counts.failed,
            requests,
            counts.total,
            reconciled=state.reconciled == connect.server_run_id(world.client),
        )
        == durable
    )
    # Failed is never seen outside RQ's registry, and nothing is claimed of a run half rebuilt.
    assert world.client.zcard(names.rq_failed(RUN)) == counts.failed
    world.client.delete(names.maintenance(RUN))
    adopt_run(world.client, world.store)
    while reconcile(world.client, world.store, world.record) is None:
        pass
    assert world.finish([8, 9]) == ["ok", "ok"]
    assert go_on(world) is Standing.FAILED
    assert len(world.records()) == 10


def test_killed_after_lost_records_were_forgotten_their_prompts_come_back(world: World) -> None:
    world.finish(range(10))
    world.client.delete(names.results(RUN, 0))
    world.client.hset(names.counts(RUN), mapping={"stream_bytes": 0, "stream_entries": 0})

    with killed_at("reconcile.forgotten"):
        reconcile(world.client, world.store, world.record, deep=True)

    counts, state = world.runs.counts(RUN), world.runs.state(RUN)
    assert (counts.total, counts.completed) == (0, 0)
    assert state is not None
    assert state.reconciled is None
    world.client.delete(names.maintenance(RUN))
    reconcile(world.client, world.store, world.record)
    assert world.runs.counts(RUN).queued == 10
    assert world.finish(range(10)) == ["ok"] * 10
    assert go_on(world) is Standing.COMPLETED


# --- The end -------------------------------------------------------------------------------------


def ended(world: World) -> None:
    world.finish(range(10))
    sink = partition_sink(world, token=new_token(), rows=100)
    while sink.store_one():
        pass


def noted(world: World) -> Any:
    return world.client.hget(names.run(RUN), "ended")


@pytest.mark.parametrize(("point", "stands_now"), [("end.pending", False), ("end.written", True)])
def test_killed_while_the_end_is_told_redis_says_that_it_may_be_untrue(
    world: World, point: str, *, stands_now: bool
) -> None:
    ended(world)

    with killed_at(point):
        try_to_end(world.client, world.store, world.record)

    assert stands(world.store) is stands_now
    assert noted(world) == b"pending"
    assert go_on(world) is Standing.COMPLETED


def test_killed_when_the_store_has_the_seal_of_redis_the_end_is_tested_anew(world: World) -> None:
    ended(world)
    # The seals of two producers, numbered in another order than they closed in.
    world.seal(sealed=False)
    world.runs.close_producer(RUN, "source", sealed=True)

    with killed_at("end.sealed"):
        try_to_end(world.client, world.store, world.record)

    assert catalog.sealed(world.store, catalog.list_inputs(world.store))
    assert not stands(world.store)
    assert noted(world) in {None, b""}
    assert go_on(world) is Standing.COMPLETED


def test_killed_when_an_untrue_success_is_gone_it_is_written_when_it_is_true(
    world: World,
) -> None:
    ended(world)

    def come(point: str) -> None:
        if point == "end.written":
            world.accept(2)
        if point == "end.untrue":
            raise KilledError(point)

    with watching(come), pytest.raises(KilledError):
        try_to_end(world.client, world.store, world.record)

    assert world.store.get(names.SUCCESS) is None
    assert noted(world) == b"pending"
    assert world.finish([10, 11]) == ["ok", "ok"]
    assert go_on(world) is Standing.COMPLETED


def test_killed_when_a_success_is_revoked_redis_still_names_it(world: World) -> None:
    ended(world)
    assert go_on(world) is Standing.COMPLETED
    told = noted(world)
    world.accept(1)

    with killed_at("end.revoked"):
        revoke(world.client, world.store, world.record)

    assert world.store.get(names.SUCCESS) is None
    assert noted(world) == told != b"pending"
    assert world.finish([10]) == ["ok"]
    assert go_on(world) is Standing.COMPLETED
    assert len(catalog.list_inputs(world.store).rows) == 2
