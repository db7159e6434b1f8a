"""Guards that only an unlikely order of events reaches; each is brought about by hand here."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest
import redis

from common import catalog, manifests, names, object_names
from common.cancelling import Canceller
from common.ending import try_to_end
from common.models import Manifest, PartFile, Record, Result
from common.overlap import to_drop
from common.queue.cancels import CancelLook, Cancels
from common.queue.feed import FeedTurn
from common.queue.maintenance import Maintenance, StreamItem, TurnLostError
from common.queue.sinklease import (
    Intent,
    PartitionLease,
    PartitionLostError,
    Replacement,
    new_token,
)
from common.reconcile import reconcile
from common.store import open_store
from common.store.frames import compress, digest_name
from producer.accepted import Inputs
from producer.findings import Findings
from producer.meter import Meter
from producer.proof import prove
from producer.spool import SpooledPrompt
from tests.support.finished_run import FinishedRun
from tests.support.memory_store import MemoryStore
from tests.support.run_world import RUN, World
from tests.support.sinks import killed_at, partition_sink, run_sink, standing_intent, watching

UID = "0" * 31 + "1"


@pytest.fixture
def world(redis_client: "redis.Redis", tmp_path: Path) -> Iterator[World]:
    made = World(redis_client, open_store(str(tmp_path / "out")), prompts=10)
    yield made
    made.close()


def forget_sink(world: World) -> None:
    """Take the partition back to before any sink came, and have the run reconciled."""
    world.client.delete(names.sink(RUN, 0))
    world.client.hdel(names.run(RUN), "reconciled")


def reconciled(world: World) -> list[Manifest]:
    """Reconcile, and read what the store has then."""
    assert reconcile(world.client, world.store, world.record) is not None
    return catalog.manifests_of(world.store, world.record.uid)


# --- The sink ------------------------------------------------------------------------------------


def token_of_a_new_process() -> str:
    code = "from common.queue.sinklease import new_token; print(new_token())"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout.strip()


def test_a_sink_of_the_past_never_has_the_token_of_one_of_today(world: World) -> None:
    past, today = (
        PartitionLease(world.client, world.record, partition=0, token=token_of_a_new_process())
        for _ in range(2)
    )
    past.take()
    # Redis is taken back to before that, and another process begins as the first one did.
    world.client.delete(names.sink(RUN, 0))
    today.take()

    with pytest.raises(PartitionLostError, match="lost"):
        past.intend(Intent(seq=1, first="1-0", last="1-0", rows=1))

    assert standing_intent(world) is None


def test_a_standing_intent_is_not_overwritten(world: World) -> None:
    lease = PartitionLease(world.client, world.record, partition=0, token=new_token())
    lease.take()
    stands = Intent(seq=1, first="1-0", last="2-0", rows=2)
    lease.intend(stands)

    with pytest.raises(PartitionLostError, match="changed"):
        lease.intend(Intent(seq=1, first="1-0", last="3-0", rows=3))

    assert standing_intent(world) == stands


def test_a_superseded_entry_that_is_set_aside_leaves_the_later_try_alone(world: World) -> None:
    world.finish([3], "failed")
    [(entry_id, _)] = world.entries()
    world.retry([3])
    world.finish([3], try_=2)
    lease = PartitionLease(world.client, world.record, partition=0, token=new_token())
    lease.take()

    lease.set_aside(
        entry_id.decode(),
        Replacement(
            key=world.key(3),
            try_=1,
            outcome="f",
            row=b"{}",
            prompt=world.prompt(3),
            job_timeout_s=60,
        ),
    )

    [entry] = world.ledger.lookup([world.key(3)])
    assert entry is not None
    assert (entry.state, entry.try_) == ("completed", 2)
    assert world.waiting() == 1
    assert world.client.zcard(names.rq_failed(RUN)) == 0
    world.check_counts()


def test_without_conditions_two_manifests_of_one_sequence_both_stand() -> None:
    store = MemoryStore(conditional=False)
    keys = PartFile(name="keys/00-00000001-0.tsv.zst", rows=1, bytes=1, sha256="a" * 64)
    mine = Manifest(uid=UID, partition=0, seq=1, keys=keys, completed=1, written_at="now")
    other = manifests.void(UID, 0, 1, written_at="now")
    came: list[str] = []

    def overtake(operation: str, name: str) -> None:
        # The other has looked, too, and writes at the same instant.
        if operation == "put_if_absent" and not came:
            came.append(name)
            manifests.write(store, other)

    store.fault = overtake

    manifests.write(store, mine)

    found = catalog.manifests_of(store, UID)
    assert {manifests.identity(each) for each in found} == {
        manifests.identity(mine),
        manifests.identity(other),
    }


# --- inputs/ -------------------------------------------------------------------------------------


def test_two_producers_with_one_number_overwrite_nothing(redis_client: "redis.Redis") -> None:
    world = World(redis_client, MemoryStore(conditional=False), prompts=0)
    inputs = Inputs(world.runs, world.store, RUN, say=lambda _: None)
    taken = int(redis_client.hget(names.run(RUN), "inputs_seq") or 0)
    for number in (1, 2):
        # Redis is taken back to before the number was given out.
        redis_client.hset(names.run(RUN), "inputs_seq", taken)
        inputs.write(
            [SpooledPrompt(world.key(number), world.fingerprint(number), world.prompt(number))]
        )
        inputs.seal(f"{number}.jsonl", sealed=True, rows=1)

    listing = catalog.list_inputs(world.store)
    rows = [row for _, each in catalog.all_inputs(world.store, listing.rows) for row in each]

    assert {row[0].decode() for row in rows} == {world.key(n).hex() for n in (1, 2)}
    # That of the world, and one of each producer.
    assert len(listing.seals) == 3
    world.close()


# --- Reconcile -----------------------------------------------------------------------------------


def some_record(world: World) -> Record:
    return Record(key=world.key(0), fingerprint=world.fingerprint(0), try_=1, outcome="completed")


@pytest.mark.parametrize(
    "act",
    [
        lambda turn, _: turn.facts(),
        lambda turn, _: turn.note_ended("x"),
        lambda turn, _: turn.close([0], inputs_seq=99, sealed=None, stored=(0, 0)),
        lambda turn, world: turn.teach([some_record(world)]),
        lambda turn, _: list(turn.stream_items()),
    ],
    ids=["facts", "ended", "close", "teach", "stream"],
)
def test_a_turn_that_began_before_a_restart_does_nothing(
    world: World, act: Callable[[Maintenance, World], object]
) -> None:
    """Its token may have outlived the restart: only Redis' run_id tells."""
    with Maintenance(world.client, world.record) as turn:
        run_id, turn._run_id = turn._run_id, "of before"
        with pytest.raises(TurnLostError, match="restarted"):
            act(turn, world)
        turn._run_id = run_id

    assert world.client.hget(names.run(RUN), "ended") is None
    assert world.client.hget(names.run(RUN), "inputs_seq") != b"99"
    assert world.runs.counts(RUN).completed == 0


def test_a_seal_is_not_restored_where_a_producer_took_a_number_since(world: World) -> None:
    world.client.hset(names.run(RUN), "seal", "0")
    world.runs.next_inputs_seq(RUN)
    world.client.hdel(names.run(RUN), "reconciled")

    reconciled(world)

    assert world.client.hget(names.run(RUN), "seal") == b"0"


def test_what_remains_in_the_stream_counts_for_what_stands() -> None:
    """A failure of the store's try goes; the completion of another try that waits counts."""
    key = b"k" * 16
    goes, stays = StreamItem("2-0", 0, key, "f", 2), StreamItem("1-0", 0, key, "c", 1)
    stored = Record(key=key, fingerprint=b"f" * 8, try_=2, outcome="failed")

    [(item, stands)] = to_drop([stays, goes], [stored])

    assert item == goes
    assert (stands.outcome, stands.try_) == ("completed", 1)


def test_an_orphans_manifest_lists_no_more_than_is_there(world: World) -> None:
    world.finish(range(3))
    world.finish([3], "failed")
    with killed_at("sink.keys"):
        partition_sink(world, token=new_token()).store_one()
    [failures] = world.store.list(names.FAILURES)
    world.store.delete(failures.name)
    forget_sink(world)

    [manifest, *_] = reconciled(world)

    assert {record.key for record in catalog.records(world.store, manifest)} == {
        world.key(n) for n in range(3)
    }
    world.check_store()


@pytest.mark.parametrize("what", ["another name", "a key twice", "no rows of ours"])
def test_an_orphan_that_is_not_what_its_name_says_is_no_commit(world: World, what: str) -> None:
    world.finish(range(3))
    with killed_at("sink.shards"):
        partition_sink(world, token=new_token()).store_one()
    [shard] = world.store.list(names.SHARDS)
    rows = catalog.fetch(world.store, shard.name)
    world.store.delete(shard.name)
    rows = {"another name": rows, "a key twice": rows + rows, "no rows of ours": b"[]\n"}[what]
    digest = "0" * 16 if what == "another name" else digest_name(rows)[1]
    name = object_names.part_object(names.SHARDS, 0, 1, digest, "jsonl.zst")
    world.store.put_if_absent(name, compress(rows))
    forget_sink(world)

    assert all(manifest.void for manifest in reconciled(world))

    assert world.waiting() == 3


# --- Pins ----------------------------------------------------------------------------------------


def test_the_first_pin_stays(world: World) -> None:
    assert world.runs.pin(RUN, {"model": "first"}) == {"model": "first"}

    assert world.runs.pin(RUN, {"model": "second"}) == {"model": "first"}

    state = world.runs.state(RUN)
    assert state is not None
    assert state.pinned == {"model": "first"}


def test_a_sink_that_finds_another_pin_in_the_store_believes_that(world: World) -> None:
    world.store.put_if_absent(names.PINNED, b'{"model":"first"}')
    world.runs.pin(RUN, {"model": "second"})

    run_sink(world).step()

    state = world.runs.state(RUN)
    assert state is not None
    assert state.pinned == {"model": "first"}


# --- The end -------------------------------------------------------------------------------------


def test_a_manifest_that_comes_while_the_end_is_written_takes_it_back(world: World) -> None:
    """A frozen sink's PUT, of which Redis hears nothing."""
    world.finish(range(10))
    sink = partition_sink(world, token=new_token(), rows=100)
    assert sink.store_one() == 10

    def come(point: str) -> None:
        if point == "end.written":
            late = manifests.void(world.record.uid, 0, 2, written_at="late")
            manifests.write(world.store, late)

    with watching(come):
        report = try_to_end(world.client, world.store, world.record)

    assert report is not None
    assert not report.ended
    assert world.store.get(names.SUCCESS) is None


def test_a_manifest_of_another_run_is_named() -> None:
    store = MemoryStore()
    run = FinishedRun(store, prompts=8)
    name = object_names.manifest_object(0, 1)
    manifest = manifests.read(store, name)
    assert manifest is not None
    store.delete(name)
    other = msgspec.structs.replace(manifest, uid="0" * 31 + "2")
    store.put_if_absent(name, msgspec.json.encode(other))
    findings = Findings()

    prove(store, run.record, findings, meter=partial(Meter, shown=False))

    found = findings.first.get("manifest", [])
    told = [each.detail for each in found if each.object == name]
    assert told == [f"belongs to another run, uid {other.uid}"]


# --- Feeding -------------------------------------------------------------------------------------


@pytest.fixture
def waiting(redis_client: "redis.Redis", tmp_path: Path) -> Iterator[World]:
    """Ten in the window, all of them ended; two wait, of objects 3 and 7."""
    store = open_store(str(tmp_path / "out"))
    made = World(redis_client, store, prompts=10, window=10)
    made.queue([10], inputs_seq=3)
    made.queue([11], inputs_seq=7)
    made.finish(range(10))
    assert made.runs.counts(RUN).unfed == 2
    yield made
    made.close()


def test_a_cancelled_run_is_not_fed(waiting: World) -> None:
    turn = FeedTurn(waiting.client, waiting.record, token="mine")
    Cancels(waiting.client, waiting.record).mark()

    assert turn.begin() is None


@pytest.mark.parametrize(("fed_from", "start"), [(2, 2), (5, 3), (9, 3)])
def test_feeding_goes_on_at_the_first_object_in_which_something_waits(
    waiting: World, fed_from: int, start: int
) -> None:
    turn = FeedTurn(waiting.client, waiting.record, token="mine")
    waiting.client.hset(names.run(RUN), mapping={"feed_from": fed_from, "feed_by": "mine"})

    room = turn.begin()

    assert room is not None
    assert (room.start, room.again) == (start, 3)


# --- Cancel --------------------------------------------------------------------------------------


def test_nothing_ends_as_cancelled_in_a_run_that_is_not_marked(world: World) -> None:
    buckets, _ = Cancels(world.client, world.record).slices()

    look = Cancels(world.client, world.record).look(buckets=buckets)

    assert look == CancelLook(why="going_on")


def test_a_redis_that_forgets_the_mark_is_told_again(world: World) -> None:
    Cancels(world.client, world.record).mark()
    canceller = Canceller(world.client, world.store, world.record)
    world.client.hdel(names.run(RUN), "cancelled")

    assert canceller.step(limit_s=60) == "done"

    state = world.runs.state(RUN)
    assert state is not None
    assert state.cancelled
    assert canceller.ended == 10


def test_a_cancelled_run_is_not_closed_while_a_prompt_is_left(world: World) -> None:
    cancels = Cancels(world.client, world.record)
    cancels.mark()
    world.finish(range(9))

    assert not cancels.close(2)
    assert cancels.closed_for() is None
    world.finish([9])
    assert cancels.close(2)
    assert cancels.closed_for() == 2


def test_what_ends_between_the_look_and_the_cancel_is_no_duplicate(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cancels(world.client, world.record).mark()
    canceller = Canceller(world.client, world.store, world.record)
    end = Cancels.end
    came: list[int] = []

    def late(cancels: Cancels, results: Sequence[Result]) -> int:
        if not came:
            came.extend(n for n in range(10) if world.key(n) == results[0].key)
            assert world.finish(came) == ["ok"]
        return end(cancels, results)

    monkeypatch.setattr(Cancels, "end", late)

    assert canceller.step(limit_s=60) == "done"

    counts = world.runs.counts(RUN)
    assert (counts.completed, counts.cancelled) == (1, 9)
    assert canceller.ended == 9
    assert counts.duplicates_dropped == 0
