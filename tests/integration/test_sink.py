"""From result streams to the store: batches, sharing, what stands in the way, and full Redis."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import pytest
import redis

from common import catalog, manifests, names
from common.errors import StoreUnusableError
from common.models import Entry, FailureRow
from common.queue.sinklease import Intent, PartitionLease, PartitionLostError, new_token
from common.queue.sinkview import look
from common.store import open_store
from common.streams import parse
from tests.support.memory_store import MemoryStore
from tests.support.redis_server import RedisServer
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
from workers.sink.batch import Limits, Place, build
from workers.sink.run_sink import Standing


@pytest.fixture
def world(redis_client: "redis.Redis", tmp_path: Path) -> Iterator[World]:
    made = World(redis_client, open_store(str(tmp_path / "out")))
    yield made
    made.close()


def test_every_result_is_stored_once_and_leaves_the_stream(world: World) -> None:
    world.finish(range(8))
    world.finish([8], "failed")
    world.finish([9], "cancelled")

    standing = drain(run_sink(world))

    assert standing is Standing.FAILED
    assert len(world.records()) == 10
    assert world.waiting() == 0
    world.check_store()
    world.check_counts()


def test_a_batch_ends_where_rows_or_bytes_would_exceed_their_limits(world: World) -> None:
    world.finish(range(10))
    sink = partition_sink(world, token=new_token(), rows=4)
    assert [sink.store_one() for _ in range(4)] == [4, 4, 2, 0]

    size = len(world.result(0).row)
    world.accept(5)
    world.finish(range(10, 15))
    small = partition_sink(world, token=sink._lease.token, rows=100)
    small._reader._limits = Limits(rows=100, bytes=2 * size + size // 2)

    assert [small.store_one() for _ in range(4)] == [2, 2, 1, 0]
    world.check_store()


def test_a_row_above_the_batch_limit_is_stored_alone(world: World) -> None:
    world.finish([0, 1, 2])
    sink = partition_sink(world, token=new_token())
    sink._reader._limits = Limits(rows=100, bytes=1)

    assert [sink.store_one() for _ in range(4)] == [1, 1, 1, 0]


def test_nothing_is_stored_before_it_is_due_and_all_when_the_run_has_ended(world: World) -> None:
    world.finish(range(3))
    sink = run_sink(world, rows=100)

    sink.step()
    assert world.records() == []

    world.finish(range(3, 10))
    drain(sink)
    assert len(world.records()) == 10


def test_the_stream_never_shrinks_but_by_deletion_of_what_is_stored(
    redis_client: "redis.Redis", tmp_path: Path
) -> None:
    world = World(redis_client, open_store(str(tmp_path)), prompts=200)
    world.finish(range(200))
    with redis_client.monitor() as monitor:  # type: ignore[no-untyped-call]
        redis_client.ping()
        drain(run_sink(world, rows=50))
        redis_client.echo("end")
        commands = []
        for command in monitor.listen():
            if command["command"].startswith("ECHO"):
                break
            commands.append(command["command"].split()[0].upper())

    assert "XDEL" in commands
    assert not {"XTRIM", "XGROUP", "XREADGROUP", "XACK"} & set(commands)
    assert world.waiting() == 0


def test_sinks_share_the_partitions_and_one_takes_over_from_another(
    redis_client: "redis.Redis", tmp_path: Path
) -> None:
    world = World(redis_client, open_store(str(tmp_path)), prompts=60, partitions=4)
    one, other = run_sink(world), run_sink(world)
    one.step()
    assert len(one.leases) == 4
    for _ in range(2):
        other.step()
        one.step()
    assert len(one.leases) == len(other.leases) == 2
    assert not one.leases.keys() & other.leases.keys()

    world.finish(range(30))
    for _ in range(10):
        one.step()
        other.step()
    # `one` falls silent: its leases and its presence end.
    for partition in one.leases:
        expire_lease(world, partition)
    redis_client.delete(names.sinks(RUN))
    world.finish(range(30, 60))
    drain(other)

    assert len(other.leases) == 4
    assert len(world.current()) == 60
    world.check_store()
    world.check_counts()


def test_a_partition_is_never_held_by_two(world: World) -> None:
    first = PartitionLease(world.client, world.record, partition=0, token=new_token())
    second = PartitionLease(world.client, world.record, partition=0, token=new_token())
    first.take()

    with pytest.raises(PartitionLostError, match="held"):
        second.take()
    expire_lease(world)
    second.take()
    with pytest.raises(PartitionLostError, match="held"):
        first.take()
    second.release()
    first.take()


def test_a_partition_that_was_left_is_not_renewed_into_nobodys_hands(world: World) -> None:
    """The thread that renews may have begun its round before the partition was left."""
    sink = run_sink(world)
    sink.step()
    round_of_renewals = list(sink.leases.values())
    assert round_of_renewals
    heir = PartitionLease(world.client, world.record, partition=0, token=new_token())

    sink.release()
    for lease in round_of_renewals:
        lease.renew()

    heir.take()


def test_a_frozen_sink_that_wakes_up_can_acknowledge_nothing(world: World) -> None:
    world.finish(range(8))
    frozen, heir = new_token(), new_token()
    with killed_at("sink.manifest"):
        partition_sink(world, token=frozen).store_one()
    expire_lease(world)
    heir_sink = partition_sink(world, token=heir)
    heir_sink.store_one()
    world.finish([8])

    intent = heir_sink._lease.take().intent
    assert intent is None
    with pytest.raises(PartitionLostError):
        partition_sink(world, token=frozen).store_one()

    drain_rest = partition_sink(world, token=heir)
    while drain_rest.store_one():
        pass
    assert len(world.records()) == 9
    world.check_store()


def test_a_sink_whose_partition_was_taken_meanwhile_acknowledges_nothing(world: World) -> None:
    world.finish(range(4))
    heir = PartitionLease(world.client, world.record, partition=0, token=new_token())

    def take_over(point: str) -> None:
        if point == "sink.manifest":
            expire_lease(world)
            heir.take()

    with watching(take_over), pytest.raises(PartitionLostError, match="lost"):
        partition_sink(world, token=new_token()).store_one()

    assert world.waiting() == 4
    assert partition_sink(world, token=heir.token).store_one() == 4
    assert len(world.records()) == 4


def test_an_intent_is_replayed_with_exactly_its_entries(world: World) -> None:
    world.finish(range(3))
    with killed_at("sink.shards"):
        partition_sink(world, token=new_token(), rows=100).store_one()
    intent = standing_intent(world)
    assert intent is not None
    assert intent.rows == 3
    world.finish(range(3, 10))
    expire_lease(world)

    assert partition_sink(world, token=new_token(), rows=100).store_one() == 3
    [manifest] = catalog.manifests_of(world.store, world.record.uid)
    assert (manifest.first, manifest.last) == (intent.first, intent.last)


def test_an_acknowledgement_with_another_intent_than_stands_is_refused(world: World) -> None:
    world.finish(range(8))
    token = new_token()
    lease = PartitionLease(world.client, world.record, partition=0, token=token)
    sink = partition_sink(world, token=token)
    with killed_at("sink.intent"):
        sink.store_one()
    stands = standing_intent(world)
    assert stands is not None
    # After a rewind the same token may stand with an older intent.
    other = msgspec.structs.replace(stands, rows=stands.rows + 1)

    with pytest.raises(PartitionLostError, match="changed"):
        lease.close(other, entries=[(stands.first, 1)])
    assert world.waiting() == 8


def test_an_intent_of_which_entries_have_gone_is_closed_with_nothing(world: World) -> None:
    # Under its number a frozen sink may still write all of them: what is left goes under the next.
    world.finish(range(3))
    token = new_token()
    with killed_at("sink.intent"):
        partition_sink(world, token=token).store_one()
    intent = standing_intent(world)
    assert intent is not None
    world.client.xdel(names.results(RUN, 0), intent.last)

    sink = partition_sink(world, token=token)

    assert [sink.store_one() for _ in range(3)] == [0, 2, 0]
    every = catalog.manifests_of(world.store, world.record.uid)
    assert [(m.seq, m.void) for m in every] == [(1, True), (2, False)]


def test_a_sequence_that_is_given_up_but_was_written_after_all_is_learnt(world: World) -> None:
    world.finish(range(4))
    token = new_token()
    with killed_at("sink.keys"):
        partition_sink(world, token=token).store_one()
    world.client.hset(names.sink(RUN, 0), "tries", 5)

    def write_it(point: str) -> None:
        # The sink that was thought dead writes its manifest while the next one gives up.
        if point != "sink.giving_up":
            return
        found = world.entries()
        entries = [parse(raw.decode(), fields) for raw, fields in found]
        place = Place(uid=world.record.uid, partition=0, seq=1)
        batch = build([e for e in entries if isinstance(e, Entry)], place, written_at="late")
        manifests.write(world.store, batch.manifest)

    with watching(write_it), pytest.raises(PartitionLostError, match="unreconciled"):
        partition_sink(world, token=token).store_one()

    expire_lease(world)
    sink = run_sink(world)
    for _ in range(3):
        sink.step()
    assert len(world.current()) == 4
    assert world.waiting() == 0
    world.check_store()
    world.check_counts()


def test_a_sequence_is_used_only_after_the_one_before_it(world: World) -> None:
    world.finish(range(8))
    lease = PartitionLease(world.client, world.record, partition=0, token=new_token())
    lease.take()

    with pytest.raises(PartitionLostError, match="changed"):
        lease.intend(Intent(seq=2, first="1-0", last="1-0", rows=1))
    assert standing_intent(world) is None


# --- Entries that cannot be stored ---------------------------------------------------------------


def test_an_entry_that_is_no_result_does_not_stop_what_stands_behind_it(world: World) -> None:
    bad = cast("bytes", world.client.xadd(names.results(RUN, 0), {"what": "is this"}))
    world.finish(range(10))

    drain(run_sink(world))

    assert len(world.current()) == 10
    kept = world.client.hkeys(names.set_aside(RUN))
    assert kept == [b"00:%b" % bad]
    assert world.client.hget(names.counts(RUN), "set_aside") == b"1"
    world.check_counts()


@pytest.mark.parametrize(
    "row",
    [b'{"a":\n1}', b"", b"no object", b'{"a":"\xff"}'],
    ids=["newline", "empty", "nothing", "bytes"],
)
def test_a_result_that_would_harm_other_rows_becomes_a_failure(world: World, row: bytes) -> None:
    bad = msgspec.structs.replace(world.result(3), row=row)
    world.finish([0, 1, 2])
    world.jobs.finish([bad])
    world.finish(range(4, 10))

    assert drain(run_sink(world)) is Standing.FAILED

    current = world.current()
    assert [n for n, record in current.items() if record.outcome == "failed"] == [3]
    every = catalog.manifests_of(world.store, world.record.uid)
    rows = [row for m in every for row in catalog.rows(world.store, m.failures)]
    failure = msgspec.json.decode(rows[0], type=FailureRow)
    assert failure.reason == "unstorable"
    assert bytes(failure.request) == world.prompt(3)
    # In RQ's registry, with its request and without expiry, as every failed job.
    job_id = world.key(3).hex()
    assert world.client.zscore(names.rq_failed(RUN), job_id) is not None
    assert world.client.hget(names.rq_job(job_id), "request") == world.prompt(3)
    world.check_store()
    world.check_counts()


def test_a_batch_that_the_store_refuses_is_cut_until_the_poison_entry_is_alone(
    redis_client: "redis.Redis",
) -> None:
    poison = b"poison-7"

    def fault(operation: str, name: str) -> str | None:
        refuse = operation == "put_if_absent" and name.startswith("shards/")
        return "refused" if refuse and poisoned() else None

    store = MemoryStore(fault=fault)
    world = World(redis_client, store, prompts=30)
    for number in range(30):
        world.finish([number], text=poison.decode() if number == 7 else "fine")

    def poisoned() -> bool:
        intent = standing_intent(world)
        if intent is None:
            return False
        rows = world.entries(intent.first, intent.last)
        return any(poison in fields[b"r"] for _, fields in rows)

    sink = run_sink(world, rows=20)
    refusals = 0
    for _ in range(200):
        try:
            if sink.step() is Standing.FAILED:
                break
        except StoreUnusableError:
            refusals += 1

    assert [n for n, r in world.current().items() if r.outcome == "failed"] == [7]
    assert len(world.current()) == 30
    # 20 rows, then pieces of 2, then of 1: five tries each.
    assert refusals == 15
    world.check_store()
    world.check_counts()


@pytest.mark.parametrize("point", ["sink.giving_up", "sink.void", "sink.set_aside", "sink.read"])
def test_killed_while_a_poison_entry_is_set_aside_it_is_set_aside_once(
    redis_client: "redis.Redis", point: str
) -> None:
    def fault(operation: str, name: str) -> str | None:
        refuse = operation == "put_if_absent" and name.startswith("shards/")
        return "refused" if refuse and b"poison" in b"".join(built) else None

    built: list[bytes] = []
    store = MemoryStore(fault=fault)
    world = World(redis_client, store, prompts=4)
    for number in range(4):
        world.finish([number], text="poison" if number == 2 else "fine")

    def note(reached: str) -> None:
        intent = standing_intent(world)
        if reached == "sink.built" and intent:
            rows = world.entries(intent.first, intent.last)
            built[:] = [fields[b"r"] for _, fields in rows]
        if reached == point and reached not in died:
            died.add(reached)
            raise KilledError(point)

    died: set[str] = set()
    sink = run_sink(world, rows=2)
    with watching(note):
        for _ in range(60):
            try:
                if sink.step() is Standing.FAILED:
                    break
            except StoreUnusableError:
                continue
            except KilledError:
                expire_lease(world)
                sink = run_sink(world, rows=2)

    assert died
    assert [n for n, r in world.current().items() if r.outcome == "failed"] == [2]
    assert len(world.records()) == 4
    world.check_store()
    world.check_counts()


def test_a_store_that_is_away_convicts_nobody(redis_client: "redis.Redis") -> None:
    away = True
    store = MemoryStore(
        fault=lambda _, name: "away" if away and name.startswith("keys/") else None
    )
    world = World(redis_client, store)
    world.finish(range(10))
    sink = run_sink(world)
    for _ in range(12):
        with pytest.raises(StoreUnusableError):
            sink.step()
    assert world.waiting() == 10

    away = False
    assert drain(sink) is Standing.COMPLETED
    assert {m.void for m in catalog.manifests_of(store, world.record.uid)} == {False}
    world.check_store()


def test_a_store_that_refuses_everything_convicts_nobody(redis_client: "redis.Redis") -> None:
    store = MemoryStore()
    world = World(redis_client, store)
    world.finish(range(10))
    store.denied = "bucket/prefix"
    store.fault = lambda op, _: "refused" if op == "put_if_absent" else None
    sink = run_sink(world)
    for _ in range(12):
        with pytest.raises(StoreUnusableError):
            sink.step()

    store.denied, store.fault = None, lambda _op, _name: None
    assert drain(sink) is Standing.COMPLETED


def test_an_answer_that_was_lost_is_no_second_write(redis_client: "redis.Redis") -> None:
    lost = {"shards/", "keys/", "manifest/"}

    def fault(operation: str, name: str) -> str | None:
        folder = name.partition("/")[0] + "/"
        if operation == "put_if_absent" and folder in lost:
            lost.discard(folder)
            return "lost"
        return None

    store = MemoryStore(fault=fault)
    world = World(redis_client, store)
    world.finish(range(10))
    sink = run_sink(world, rows=10)
    for _ in range(3):
        with pytest.raises(StoreUnusableError):
            sink.step()

    assert drain(sink) is Standing.COMPLETED
    assert set(store.writes.values()) == {1}
    world.check_store()


# --- A full Redis --------------------------------------------------------------------------------


def test_a_sink_empties_a_full_redis(valkey: RedisServer, tmp_path: Path) -> None:
    client = valkey.client()
    world = World(client, open_store(str(tmp_path)), prompts=400)
    world.finish(range(400), text="x" * 2_000)
    client.config_set("maxmemory", "1mb")
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        client.set("more", "x")

    drain(run_sink(world, rows=50))

    client.config_set("maxmemory", "0")
    assert len(world.records()) == 400
    world.check_store()
    world.check_counts()
    client.close()


def test_the_scripts_run_on_every_kind_of_redis(any_redis: RedisServer, tmp_path: Path) -> None:
    client = any_redis.client()
    world = World(client, open_store(str(tmp_path)), partitions=3)
    world.client.xadd(names.results(RUN, 1), {"k": "x"})
    world.jobs.finish([msgspec.structs.replace(world.result(0), row=b"no row")])
    world.finish(range(1, 10))

    assert drain(run_sink(world)) is Standing.FAILED

    assert len(world.current()) == 10
    world.check_store()
    world.check_counts()
    view = look(client, world.record, token="t")
    assert view is not None
    assert view.entries == 0
    client.close()


def test_an_unknown_run_is_served_no_more(world: World) -> None:
    sink = run_sink(world)
    sink.step()
    world.client.delete(names.run(RUN))

    assert sink.step() is Standing.GONE
    assert sink.leases == {}


def test_what_rqs_tools_took_from_a_run_comes_back(world: World) -> None:
    sink = run_sink(world)
    # As `rq empty` does: the list and the jobs' hashes are gone, the ledger counts on them.
    for number in range(10):
        world.client.delete(names.rq_job(world.key(number).hex()))
    world.client.delete(names.rq_queue(RUN))
    sink._audit_again_s = 0.0

    sink.step()

    assert world.client.llen(names.rq_queue(RUN)) == 10
    request = world.client.hget(names.rq_job(world.key(3).hex()), "request")
    assert request == world.prompt(3)


def test_a_cancelled_run_ends_without_a_seal(world: World) -> None:
    world.seal(sealed=False)
    world.client.hset(names.run(RUN), "cancelled", "1")
    world.finish(range(10), "cancelled")

    assert drain(run_sink(world)) is Standing.FAILED
    assert len(world.records()) == 10


def test_figures_of_the_store_are_those_of_its_manifests(world: World) -> None:
    world.finish(range(10))
    drain(run_sink(world))

    every = catalog.manifests_of(world.store, world.record.uid)
    counts = world.runs.counts(RUN)
    assert counts.s3_uploaded == 10
    assert counts.s3_bytes == sum(map(manifests.bytes_of, every))
