"""Redis restarts, is rewound or lost: what the store has is taught, and nothing is doubled."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from common import catalog, manifests, names, object_names
from common.connect import server_run_id
from common.errors import ConflictError, StateLostError, StoreDamagedError
from common.models import Entry, Record
from common.overlap import to_drop
from common.queue.maintenance import Maintenance, StreamItem, TurnLostError
from common.queue.sinklease import PartitionLostError, new_token
from common.reconcile import adopt_run, reconcile
from common.store import ObjectStore, open_store
from common.store.frames import compress, digest_name
from tests.support.memory_store import MemoryStore
from tests.support.redis_server import RedisServer
from tests.support.rewind import rewind, save_point
from tests.support.run_world import RUN, World
from tests.support.sinks import (
    drain,
    expire_lease,
    killed_at,
    partition_sink,
    run_sink,
    standing_intent,
    watching,
)
from workers.sink.batch import Place, build
from workers.sink.run_sink import Standing

POINTS = [
    "reconcile.adopting",
    "reconcile.closed",
    "reconcile.taught",
    "reconcile.dropped",
    "reconcile.bodies",
    "reconcile.inputs",
    "reconcile.marked",
]


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A Redis of the test's own, to rewind."""
    with RedisServer("valkey", appendonly=True, appendfsync="always") as running:
        yield running


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "out"))


@pytest.fixture
def world(server: RedisServer, store: ObjectStore) -> Iterator[World]:
    made = World(server.client(), store, prompts=20)
    yield made
    made.close()


def restart(server: RedisServer, world: World) -> None:
    server.restart()
    world.use(server.client())


def back_to(server: RedisServer, point: Path, world: World) -> None:
    rewind(server, point)
    world.use(server.client())


def wipe(server: RedisServer, world: World) -> None:
    server.wipe()
    world.use(server.client())


def store_some(world: World, batches: int = 1) -> None:
    sink = partition_sink(world, token=new_token())
    for _ in range(batches):
        sink.store_one()
    sink._lease.release()


def states(world: World) -> dict[str, int]:
    counts = world.runs.counts(RUN)
    return {
        state: getattr(counts, state)
        for state in ("total", "completed", "failed", "cancelled", "queued")
    }


def complete(world: World) -> None:
    """Finish whatever is queued, and let a new sink end the run."""
    expire_lease(world)
    sink = run_sink(world)
    sink.step()
    entries = world.ledger.lookup([world.key(n) for n in range(world.accepted)])
    for number, entry in enumerate(entries):
        assert entry is not None, number
        if entry.state == "queued":
            assert world.finish([number], try_=entry.try_) == ["ok"]
    drain(sink)
    assert len(world.current()) == world.accepted
    world.check_store()
    world.check_counts()


# --- A restart that loses nothing ----------------------------------------------------------------


def test_after_a_restart_finishes_are_accepted_and_sinks_wait(
    server: RedisServer, world: World
) -> None:
    world.finish(range(5))
    restart(server, world)

    assert world.finish([5]) == ["ok"]
    with pytest.raises(PartitionLostError, match="unreconciled"):
        partition_sink(world, token=new_token()).store_one()
    state = world.runs.state(RUN)
    assert state is not None
    assert state.reconciled != server_run_id(world.client)

    report = reconcile(world.client, world.store, world.record)
    assert report is not None
    assert (report.taught, report.dropped, report.added) == (0, 0, 0)
    complete(world)


def test_a_second_reconcile_does_nothing(server: RedisServer, world: World) -> None:
    restart(server, world)
    reconcile(world.client, world.store, world.record)
    before = [found.name for found in world.store.list()]

    reconcile(world.client, world.store, world.record)

    assert [found.name for found in world.store.list()] == before


def test_the_first_missing_sequence_is_closed_before_anything_is_taught(
    server: RedisServer, world: World
) -> None:
    world.finish(range(8))
    store_some(world)
    restart(server, world)

    reconcile(world.client, world.store, world.record)

    every = catalog.manifests_of(world.store, world.record.uid)
    assert [(m.seq, m.void) for m in every] == [(1, False), (2, True)]
    assert partition_sink(world, token=new_token()).store_one() == 4
    assert [m.seq for m in catalog.manifests_of(world.store, world.record.uid)] == [1, 2, 3]


def test_a_standing_intents_sequence_is_left_to_the_sinks(
    server: RedisServer, world: World
) -> None:
    world.finish(range(8))
    with killed_at("sink.intent"):
        partition_sink(world, token=new_token()).store_one()
    intent = standing_intent(world)
    restart(server, world)

    reconcile(world.client, world.store, world.record)

    assert standing_intent(world) == intent
    assert catalog.manifests_of(world.store, world.record.uid) == []
    complete(world)


# --- Rewound -------------------------------------------------------------------------------------


def test_what_the_store_has_is_taught_and_leaves_the_stream(
    server: RedisServer, world: World
) -> None:
    world.finish(range(3))
    point = save_point(server)
    world.finish(range(3, 8))
    store_some(world, 2)
    back_to(server, point, world)
    assert states(world)["completed"] == 3
    assert world.waiting() == 3

    report = reconcile(world.client, world.store, world.record)

    assert report is not None
    assert (report.taught, report.dropped) == (5, 3)
    assert states(world) == {
        "total": 20, "completed": 8, "failed": 0, "cancelled": 0, "queued": 12
    }  # fmt: skip
    assert world.finish(range(8)) == ["duplicate"] * 8
    complete(world)


def test_a_sink_of_the_past_cannot_add_to_a_closed_sequence(
    server: RedisServer, world: World
) -> None:
    world.finish(range(4))
    point = save_point(server)
    frozen = new_token()
    with killed_at("sink.built"):
        partition_sink(world, token=frozen).store_one()
    intent = standing_intent(world)
    assert intent is not None
    back_to(server, point, world)
    reconcile(world.client, world.store, world.record)
    store_some(world)

    # It wakes up with what it had built, in the midst of its step 2.
    entries = _entries(world, range(4), seq=intent.seq)
    batch = build(entries, Place(uid=world.record.uid, partition=0, seq=1), written_at="late")
    for part in batch.parts:
        world.store.put_if_absent(part.file.name, part.data, rows_sha256=part.file.sha256)
    stands = manifests.write(world.store, batch.manifest)

    assert stands.void
    complete(world)


def _entries(world: World, numbers: range, *, seq: int) -> list[Entry]:
    return [
        Entry(
            entry_id=f"{seq}-{n}",
            key=world.key(n),
            fingerprint=world.fingerprint(n),
            try_=1,
            outcome="completed",
            row=world.result(n).row,
            input_tokens=10,
            output_tokens=6,
        )
        for n in numbers
    ]


def test_every_entry_of_a_key_with_a_stored_completion_goes(
    server: RedisServer, world: World
) -> None:
    # Try 1 failed, try 2 completed and is stored; the rewound Redis has only the failure waiting.
    world.finish([0], "failed")
    point = save_point(server)
    store_some(world)
    world.retry([0])
    world.finish([0], try_=2)
    store_some(world)
    back_to(server, point, world)
    assert world.waiting() == 1

    reconcile(world.client, world.store, world.record)

    assert world.waiting() == 0
    assert states(world)["completed"] == 1
    assert states(world)["failed"] == 0
    assert world.client.zcard(names.rq_failed(RUN)) == 0
    complete(world)


def test_an_entry_of_a_stored_try_goes_even_where_it_is_a_completion(
    server: RedisServer, world: World
) -> None:
    # In the past that was forgotten, try 1 failed; after the rewind a late worker completes it.
    point = save_point(server)
    world.finish([0], "failed")
    store_some(world)
    back_to(server, point, world)
    assert world.finish([0]) == ["ok"]

    reconcile(world.client, world.store, world.record)

    # One terminal record a (key, try): the stored one. Its job is back for `rq requeue`.
    assert world.waiting() == 0
    assert states(world)["failed"] == 1
    assert world.runs.counts(RUN).output_tokens == 0
    job_id = world.key(0).hex()
    assert world.client.zscore(names.rq_failed(RUN), job_id) is not None
    assert world.client.hget(names.rq_job(job_id), "request") == world.prompt(0)
    complete(world)


def test_a_queued_retry_outlives_a_stored_failure_of_an_earlier_try(
    server: RedisServer, world: World
) -> None:
    world.finish([0], "failed")
    store_some(world)
    world.retry([0])
    restart(server, world)

    reconcile(world.client, world.store, world.record)

    [entry] = world.ledger.lookup([world.key(0)])
    assert entry is not None
    assert (entry.state, entry.try_) == ("queued", 2)
    complete(world)


def test_failed_prompts_come_back_with_their_request_in_rqs_registry(
    server: RedisServer, world: World
) -> None:
    point = save_point(server)
    world.finish([3, 4], "failed")
    world.finish([5], "cancelled")
    store_some(world)
    back_to(server, point, world)

    reconcile(world.client, world.store, world.record)

    listed = set(world.client.zrange(names.rq_failed(RUN), 0, -1))
    assert listed == {world.key(n).hex().encode() for n in (3, 4)}
    for number in (3, 4):
        name = names.rq_job(world.key(number).hex())
        assert world.client.hget(name, "request") == world.prompt(number)
        assert world.client.ttl(name) == -1
    assert not world.client.exists(names.rq_job(world.key(5).hex()))
    complete(world)


def test_failed_is_never_seen_outside_rqs_registry(server: RedisServer, world: World) -> None:
    # The claim takes a failed key outside it for an `rq requeue`.
    point = save_point(server)
    world.finish([3], "failed")
    store_some(world)
    back_to(server, point, world)

    with killed_at("reconcile.taught"):
        reconcile(world.client, world.store, world.record)

    assert states(world)["failed"] == 1
    assert world.client.zscore(names.rq_failed(RUN), world.key(3).hex()) is not None


def test_prompts_of_inputs_that_the_ledger_lacks_are_queued(
    server: RedisServer, world: World
) -> None:
    world.accept(5, queue=False)
    restart(server, world)

    report = reconcile(world.client, world.store, world.record)

    assert report is not None
    assert report.added == 5
    assert states(world)["total"] == 25
    complete(world)


def test_of_two_accepted_texts_of_a_prompt_the_last_counts(
    server: RedisServer, world: World
) -> None:
    world.finish([2])
    store_some(world)
    for text in ("newer", "newest"):
        for number in (1, 2, 19):
            accept_text(world, number, text)
    restart(server, world)

    report = reconcile(world.client, world.store, world.record)

    assert report is not None
    assert report.replaced == 2
    for number in (1, 19):
        request = world.client.hget(names.rq_job(world.key(number).hex()), "request")
        assert request is not None
        assert b"newest" in request
    assert states(world)["completed"] == 1  # what is completed stays
    # The ledger has the last text now; the older ones that still lie in inputs/ do not come back.
    restart(server, world)
    report = reconcile(world.client, world.store, world.record)
    assert report is not None
    assert report.replaced == 0


def accept_text(world: World, number: int, text: str) -> None:
    """Accept a prompt anew with another text, as `--accept-changes` does, without queueing it."""
    prompt = world.prompt(number).replace(b"prompt %d" % number, text.encode())
    fingerprint = digest_name(prompt)[1].encode()
    row = b'{"key":"%b","fp":"%b","prompt":%b}\n' % (
        world.key(number).hex().encode(),
        fingerprint,
        prompt,
    )
    seq = world.runs.next_inputs_seq(RUN)
    world.store.put_if_absent(object_names.inputs_object(seq, digest_name(row)[1]), compress(row))


def test_sequences_never_go_back(server: RedisServer, world: World) -> None:
    world.finish(range(8))
    store_some(world, 2)
    # Somebody removed the store's last manifest by hand.
    world.store.delete(object_names.manifest_object(0, 2))
    restart(server, world)

    reconcile(world.client, world.store, world.record)

    every = catalog.manifests_of(world.store, world.record.uid)
    assert [m.seq for m in every] == [1, 2, 3]
    assert world.client.hget(names.sink(RUN, 0), "seq") == b"3"


# --- Orphans -------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["sink.shards", "sink.failures", "sink.keys"])
def test_objects_without_manifest_are_adopted_for_exactly_the_keys_they_hold(
    server: RedisServer, world: World, point: str
) -> None:
    kept = save_point(server)
    world.finish(range(3))
    world.finish([3], "failed")
    with killed_at(point):
        partition_sink(world, token=new_token()).store_one()
    back_to(server, kept, world)

    reconcile(world.client, world.store, world.record)

    [manifest, *_] = catalog.manifests_of(world.store, world.record.uid)
    assert not manifest.void
    assert manifest.completed == 3
    assert manifest.failed == (0 if point == "sink.shards" else 1)
    assert states(world)["completed"] == 3
    complete(world)


def test_a_sink_of_the_past_that_wakes_after_its_adoption_changes_nothing(
    server: RedisServer, world: World
) -> None:
    kept = save_point(server)
    world.finish(range(3))
    world.finish([3], "failed")
    with killed_at("sink.shards"):
        partition_sink(world, token=new_token()).store_one()
    intent = standing_intent(world)
    assert intent is not None
    entries = list(_entries(world, range(3), seq=1))
    back_to(server, kept, world)
    reconcile(world.client, world.store, world.record)

    late = build(entries, Place(uid=world.record.uid, partition=0, seq=1), written_at="late")
    stands = manifests.write(world.store, late.manifest)

    assert not stands.void
    assert stands.completed == 3
    complete(world)


def test_an_orphan_that_overlaps_a_committed_shard_is_a_stray(
    server: RedisServer, world: World
) -> None:
    kept = save_point(server)
    world.finish(range(4))
    store_some(world)
    # The same answers once more under the next sequence, without a manifest.
    place = Place(uid=world.record.uid, partition=0, seq=2)
    batch = build(_entries(world, range(2, 6), seq=9), place, written_at="now")
    [shard] = [part for part in batch.parts if part.file.name.startswith("shards/")]
    world.store.put_if_absent(shard.file.name, shard.data)
    back_to(server, kept, world)

    reconcile(world.client, world.store, world.record)

    every = catalog.manifests_of(world.store, world.record.uid)
    assert [(m.seq, m.void) for m in every] == [(1, False), (2, True)]
    assert states(world)["completed"] == 4
    complete(world)


def test_a_damaged_orphan_is_left_alone(server: RedisServer, world: World) -> None:
    world.store.put_if_absent(
        object_names.part_object("shards/", 0, 1, "0" * 16, "jsonl.zst"), b"torn"
    )
    restart(server, world)

    reconcile(world.client, world.store, world.record)

    assert [m.void for m in catalog.manifests_of(world.store, world.record.uid)] == [True]
    complete(world)


# --- A sequence with other rows ------------------------------------------------------------------


@pytest.mark.parametrize("what", ["void", "other rows"])
def test_other_rows_under_ones_own_sequence_are_learnt_and_the_batch_planned_anew(
    redis_client: "redis.Redis", store: ObjectStore, what: str
) -> None:
    world = World(redis_client, store, prompts=20)
    world.finish(range(8))
    sink = run_sink(world, rows=8)

    def overtake(point: str) -> None:
        # Another hand closes the sequence while this sink writes its objects.
        if point != "sink.keys" or manifests.listed(store):
            return
        place = Place(uid=world.record.uid, partition=0, seq=1)
        batch = build(_entries(world, range(2, 10), seq=9), place, written_at="now")
        manifest = manifests.void(world.record.uid, 0, 1, written_at="now")
        if what == "other rows":
            for part in batch.parts:
                store.put_if_absent(part.file.name, part.data)
            manifest = batch.manifest
        manifests.write(store, manifest)

    with watching(overtake):
        for _ in range(6):
            sink.step()

    assert states(world)["completed"] == (10 if what == "other rows" else 8)
    complete(world)


# --- Lost altogether -----------------------------------------------------------------------------


def test_a_lost_redis_is_rebuilt_from_the_store_alone(server: RedisServer, world: World) -> None:
    world.finish(range(6))
    world.finish([6], "failed")
    world.finish([7], "cancelled")
    store_some(world, 2)
    world.finish([8, 9])  # not yet stored: redone
    wipe(server, world)

    adopted = adopt_run(world.client, world.store)

    assert adopted == world.record
    assert states(world) == {
        "total": 20, "completed": 6, "failed": 1, "cancelled": 1, "queued": 12
    }  # fmt: skip
    state = world.runs.state(RUN)
    assert state is not None
    assert state.sealed
    assert world.client.llen(names.rq_queue(RUN)) == 12
    assert world.client.zrange(names.rq_failed(RUN), 0, -1) == [world.key(6).hex().encode()]
    counts = world.runs.counts(RUN)
    assert (counts.s3_uploaded, counts.output_tokens) == (8, 36)
    complete(world)


def test_a_result_for_a_key_that_is_not_yet_taught_is_kept_by_its_worker(
    server: RedisServer, world: World
) -> None:
    world.finish(range(4))
    store_some(world)
    late = world.result(9)
    wipe(server, world)
    assert world.jobs.finish([late]) == ["unknown"]

    with killed_at("adopt.made"):
        adopt_run(world.client, world.store)
    assert world.jobs.finish([late]) == ["untaught"]

    adopt_run(world.client, world.store)
    assert world.jobs.finish([late]) == ["ok"]
    complete(world)


def test_numbers_of_inputs_go_on_after_a_rebuild(server: RedisServer, world: World) -> None:
    wipe(server, world)
    adopt_run(world.client, world.store)

    assert world.runs.next_inputs_seq(RUN) == 3


@pytest.mark.parametrize("sealed", [True, False])
def test_the_producers_last_word_is_restored(
    server: RedisServer, store: ObjectStore, *, sealed: bool
) -> None:
    with closing(World(server.client(), store, sealed=sealed)) as world:
        wipe(server, world)

        adopt_run(world.client, store)

        state = world.runs.state(RUN)
        assert state is not None
        assert state.sealed is sealed


def test_the_last_word_of_a_producer_that_is_open_is_not_overruled(
    server: RedisServer, world: World
) -> None:
    world.runs.open_producer(RUN, "other.jsonl", "{}")
    world.client.hset(names.run(RUN), "seal", "0")
    restart(server, world)

    reconcile(world.client, world.store, world.record)

    assert world.client.hget(names.run(RUN), "seal") == b"0"


def test_adopting_lifts_the_tombstone_and_keeps_a_cancellation_and_the_pinned_model(
    server: RedisServer, world: World
) -> None:
    world.store.put_if_absent(names.CANCELLED, b"{}")
    world.store.put_if_absent(names.PINNED, b'{"model":"m"}')
    wipe(server, world)
    world.client.set(names.tombstone(RUN), world.record.uid)

    adopt_run(world.client, world.store)

    assert not world.runs.tombstoned(RUN)
    state = world.runs.state(RUN)
    assert state is not None
    assert state.cancelled
    assert state.pinned == {"model": "m"}


def test_the_stores_pin_stands_against_one_that_a_rewound_redis_took_since(
    server: RedisServer, world: World
) -> None:
    world.store.put_if_absent(names.PINNED, b'{"model":"first"}')
    restart(server, world)
    assert world.runs.pin(RUN, {"model": "other"}) == {"model": "other"}

    reconcile(world.client, world.store, world.record)

    assert world.runs.pin(RUN, {"model": "third"}) == {"model": "first"}


def test_what_only_progress_remembers_goes_on_after_a_rebuild(
    server: RedisServer, world: World
) -> None:
    world.store.put(
        names.PROGRESS,
        b'{"elapsed_hours":1.5,"duplicates_dropped":7,"retries":3,"rate":null,'
        b'"repeating":4,"truncated":2}',
    )
    wipe(server, world)

    adopt_run(world.client, world.store)

    counts = world.runs.counts(RUN)
    assert (counts.active_ms, counts.duplicates_dropped, counts.retries) == (5_400_000, 7, 3)
    assert (counts.repeating, counts.truncated, counts.empty) == (4, 2, 0)


def test_another_run_in_the_store_or_in_redis_is_a_conflict(
    redis_client: "redis.Redis", world: World, tmp_path: Path
) -> None:
    other = msgspec.structs.replace(world.record, uid="f" * 32)
    with pytest.raises(ConflictError):
        adopt_run(redis_client, world.store, other)
    World(redis_client, open_store(str(tmp_path / "other")), uid="f" * 32)
    with pytest.raises(ConflictError):
        adopt_run(redis_client, world.store)


def test_a_store_without_a_run_says_so(redis_client: "redis.Redis") -> None:
    with pytest.raises(StateLostError, match=r"run\.json"):
        adopt_run(redis_client, MemoryStore())


def test_a_damaged_instant_in_the_record_says_where_it_is(redis_client: "redis.Redis") -> None:
    store = MemoryStore()
    world = World(redis_client, store, prompts=1)
    record = msgspec.structs.replace(world.record, created_at="yesterday")
    store.delete(names.RUN_JSON)
    store.put_if_absent(names.RUN_JSON, msgspec.json.encode(record))
    redis_client.flushall()

    with pytest.raises(StoreDamagedError, match=r"run\.json: created_at"):
        adopt_run(redis_client, store)


# --- Kills, restarts and rivals during a reconcile -----------------------------------------------


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_step_the_next_reconcile_ends_it(
    server: RedisServer, world: World, point: str
) -> None:
    kept = save_point(server)
    disturb(world)
    back_to(server, kept, world)
    world.finish([1, 12])

    with killed_at(point):
        reconcile(world.client, world.store, world.record)
    world.client.delete(names.maintenance(RUN))  # its lease ends
    world.finish([2, 13])

    complete(world)


@pytest.mark.parametrize("point", POINTS[:-1])
def test_a_restart_in_the_midst_of_a_reconcile_begins_it_anew(
    server: RedisServer, world: World, point: str
) -> None:
    kept = save_point(server)
    disturb(world)
    back_to(server, kept, world)
    restarted: list[str] = []

    def restart_redis(name: str) -> None:
        if name == point and not restarted:
            restarted.append(name)
            rewind(server, kept)

    with watching(restart_redis):
        assert reconcile(world.client, world.store, world.record) is None
    assert restarted
    world.use(server.client())
    state = world.runs.state(RUN)
    assert state is not None
    assert state.reconciled != server_run_id(world.client)
    complete(world)


def test_a_rewind_to_the_midst_of_this_very_reconcile_is_noticed(
    server: RedisServer, world: World
) -> None:
    # The lease's token stands there too: only Redis' run_id tells that what was taught is gone.
    kept = save_point(server)
    disturb(world)
    back_to(server, kept, world)
    midst: list[Path] = []

    def go_back_once(name: str) -> None:
        if name == "reconcile.closed":
            midst.append(save_point(server, "midst"))
        if name == "reconcile.taught" and len(midst) == 1:
            rewind(server, midst[0])

    with watching(go_back_once):
        assert reconcile(world.client, world.store, world.record) is None
    world.use(server.client())
    world.client.delete(names.maintenance(RUN))
    complete(world)


def disturb(world: World) -> None:
    """Leave a bit of everything in the store that Redis is to forget."""
    world.finish(range(6))
    world.finish([6], "failed")
    store_some(world, 2)
    world.finish(range(8, 11))
    world.accept(3, queue=False)
    with killed_at("sink.shards"):
        partition_sink(world, token=new_token()).store_one()


def test_one_process_at_a_time_reconciles(server: RedisServer, world: World) -> None:
    restart(server, world)
    with Maintenance(world.client, world.record):
        assert reconcile(world.client, world.store, world.record) is None

    assert reconcile(world.client, world.store, world.record) is not None


@pytest.mark.parametrize(("total", "keys"), [(10, 1_000), (2_000_000, 1_000)])
def test_a_ledger_that_has_grown_is_read_in_as_small_pieces(
    world: World, monkeypatch: pytest.MonkeyPatch, total: int, keys: int
) -> None:
    world.finish(range(6))
    # As if the run, begun with few prompts, had been added to since.
    world.client.hset(names.counts(RUN), "total", total)
    read: list[tuple[int, int]] = []

    with Maintenance(world.client, world.record) as turn:
        ask = turn._ledger

        def noted(operation: str, first: int, buckets: int) -> list[Any]:
            read.append((first, buckets))
            return ask(operation, first, buckets)

        monkeypatch.setattr(turn, "_ledger", noted)
        found = [key for key, _ in turn.ended_keys()]

    assert len(found) == len(set(found)) == 6
    every = [bucket for first, buckets in read for bucket in range(first, first + buckets)]
    assert [bucket for bucket in every if bucket < 1 << world.record.bits] == list(
        range(1 << world.record.bits)
    )
    assert max(buckets for _, buckets in read) * total >> world.record.bits <= keys


def test_a_process_that_lost_its_turn_can_write_nothing(server: RedisServer, world: World) -> None:
    restart(server, world)
    turn = Maintenance(world.client, world.record).__enter__()
    world.client.delete(names.maintenance(RUN))  # its lease ends
    reconcile(world.client, world.store, world.record)

    with pytest.raises(TurnLostError):
        turn.teach([Record(key=bytes(16), fingerprint=bytes(8), try_=1, outcome="completed")])
    with pytest.raises(TurnLostError):
        turn.__exit__(None, None, None)

    assert states(world)["completed"] == 0


def test_finishes_during_a_reconcile_are_counted_once(server: RedisServer, world: World) -> None:
    kept = save_point(server)
    disturb(world)
    back_to(server, kept, world)
    numbers = iter(range(20))

    def finish_one(_: str) -> None:
        number = next(numbers, None)
        if number is not None:
            world.finish([number, 19 - number])

    with watching(finish_one):
        reconcile(world.client, world.store, world.record)

    complete(world)


# --- What has ended without a record -------------------------------------------------------------


def test_a_deep_reconcile_puts_back_what_ended_without_a_record(
    redis_client: "redis.Redis", store: ObjectStore
) -> None:
    world = World(redis_client, store, prompts=20)
    world.finish(range(4))
    store_some(world)
    world.finish(range(4, 8))
    redis_client.delete(names.results(RUN, 0))  # somebody's slip
    redis_client.hset(names.counts(RUN), mapping={"stream_bytes": 0, "stream_entries": 0})

    report = reconcile(redis_client, store, world.record, deep=True)

    assert report is not None
    assert (report.forgotten, report.added) == (4, 4)
    assert states(world) == {
        "total": 20, "completed": 4, "failed": 0, "cancelled": 0, "queued": 16
    }  # fmt: skip
    complete(world)


def test_a_deep_reconcile_finds_nothing_where_nothing_is_lost(
    redis_client: "redis.Redis", store: ObjectStore
) -> None:
    world = World(redis_client, store, prompts=20)
    world.finish(range(6))
    store_some(world)
    world.finish([7], "failed")
    world.retry([7])

    report = reconcile(redis_client, store, world.record, deep=True)

    assert report is not None
    assert (report.taught, report.dropped, report.forgotten, report.added) == (0, 0, 0, 0)
    complete(world)


def test_sinks_wait_while_a_deep_reconcile_looks_for_lost_records(
    redis_client: "redis.Redis", store: ObjectStore
) -> None:
    # What went from stream to store between two looks would seem lost.
    world = World(redis_client, store, prompts=20)
    world.finish(range(6))
    waited: list[str] = []

    def try_to_store(point: str) -> None:
        try:
            store_some(world)
        except PartitionLostError as lost:
            waited.append(f"{point} {lost.why}")

    with watching(try_to_store):
        report = reconcile(redis_client, store, world.record, deep=True)

    assert report is not None
    assert report.forgotten == 0
    assert "reconcile.closed unreconciled" in waited
    complete(world)


# --- Which entries go (pure) ---------------------------------------------------------------------


def item(try_: int, outcome: str) -> StreamItem:
    return StreamItem(f"{try_}-0", 0, bytes(16), outcome, try_)


def stored(try_: int, outcome: str) -> Record:
    return msgspec.convert(
        {
            "key": bytes(16),
            "fingerprint": bytes(8),
            "try_": try_,
            "outcome": outcome,
        },
        type=Record,
    )


@pytest.mark.parametrize(
    ("waiting", "records", "gone", "stays"),
    [
        ([(1, "f")], [(1, "failed")], [1], (1, "failed")),
        ([(2, "f")], [(1, "failed")], [], None),
        ([(1, "c")], [(1, "failed")], [1], (1, "failed")),
        ([(1, "f"), (2, "c")], [(1, "failed")], [1], (2, "completed")),
        ([(1, "f"), (2, "f")], [(1, "completed")], [1, 2], (1, "completed")),
        ([(3, "c")], [(1, "completed")], [3], (1, "completed")),
    ],
)
def test_entries_go_by_key_and_try_and_all_where_a_completion_is_stored(
    waiting: list[tuple[int, str]],
    records: list[tuple[int, str]],
    gone: list[int],
    stays: tuple[int, str] | None,
) -> None:
    dropped = to_drop([item(*one) for one in waiting], [stored(*one) for one in records])

    assert [entry.try_ for entry, _ in dropped] == gone
    assert {(record.try_, record.outcome) for _, record in dropped} == (
        {stays} if stays else set()
    )


def test_the_run_ends_completed_after_all(server: RedisServer, world: World) -> None:
    world.finish(range(20))
    restart(server, world)

    assert drain(run_sink(world)) is Standing.COMPLETED
