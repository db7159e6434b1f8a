"""Sinks and stores that refuse a folder, hold foreign objects, list late or change their mind."""

import threading
from collections.abc import Iterator

import msgspec
import pytest
import redis

from common import catalog, crashpoints, manifests, names, object_names
from common.errors import ConflictError, HeadraceError, StoreUnusableError
from common.queue.sinklease import PartitionLostError, new_token
from common.reconcile import adopt_run
from tests.support.memory_store import MemoryStore
from tests.support.run_world import RUN, World
from tests.support.sinks import (
    drain,
    expire_lease,
    killed_at,
    partition_sink,
    run_sink,
)
from workers.sink.run_sink import Standing

LIMIT_S = 150.0


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def world(redis_client: "redis.Redis", store: MemoryStore) -> Iterator[World]:
    made = World(redis_client, store)
    yield made
    made.close()


def seqs(world: World) -> list[tuple[int, bool]]:
    return [(m.seq, m.void) for m in catalog.manifests_of(world.store, world.record.uid)]


# --- What is refused to every batch --------------------------------------------------------------


@pytest.mark.parametrize("folder", ["shards/", "keys/", "manifest/"])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_right_that_is_missing_for_one_folder_makes_no_completion_a_failure(
    world: World, store: MemoryStore, folder: str, rows: int
) -> None:
    world.finish(range(10))
    store.fault = lambda operation, name: (
        "denied" if operation == "put_if_absent" and name.startswith(folder) else None
    )
    sink = run_sink(world, rows=rows)
    for _ in range(12):
        with pytest.raises(StoreUnusableError, match="denied"):
            sink.step()
    assert seqs(world) == []
    assert world.waiting() == 10

    store.fault = lambda _operation, _name: None

    assert drain(sink) is Standing.COMPLETED
    assert not any(void for _, void in seqs(world))
    world.check_store()


# --- Foreign objects -----------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["shards/", "keys/"])
@pytest.mark.parametrize("rows", [1, 10])
def test_a_name_that_holds_other_bytes_costs_its_number_and_no_result(
    world: World, store: MemoryStore, folder: str, rows: int
) -> None:
    planted: list[str] = []

    def plant(operation: str, name: str) -> None:
        if operation == "put_if_absent" and name.startswith(folder) and not planted:
            planted.append(name)
            store.objects[name], store.identities[name] = b"cut off", "f" * 64

    world.finish(range(10))
    store.fault = plant
    sink = run_sink(world, rows=rows)

    with pytest.raises(StoreUnusableError, match=f"{folder}.*holds other bytes"):
        sink.step()
    assert drain(sink) is Standing.COMPLETED

    assert seqs(world)[:2] == [(1, True), (2, False)]
    assert sum(void for _, void in seqs(world)) == 1
    assert store.objects[planted[0]] == b"cut off"
    assert len(world.records()) == 10
    world.check_store()
    world.check_counts()


@pytest.mark.parametrize("rows", [1, 10])
def test_a_manifests_name_that_holds_something_else_harms_no_result(
    world: World, store: MemoryStore, rows: int
) -> None:
    name = object_names.manifest_object(0, 1)
    store.objects[name] = b"not ours"
    world.finish(range(10))
    sink = run_sink(world, rows=rows)
    for _ in range(12):
        with pytest.raises(StoreUnusableError, match=f"{name}.*restore it"):
            sink.step()
    assert world.waiting() == 10

    del store.objects[name]

    assert drain(sink) is Standing.COMPLETED
    assert not any(void for _, void in seqs(world))
    world.check_store()


@pytest.mark.parametrize(
    "name", ["inputs/.DS_Store", "inputs/notes.txt", "inputs/_$folder$", "inputs/1-x.jsonl.zst"]
)
def test_what_other_tools_leave_in_the_inputs_stops_nothing(
    world: World, store: MemoryStore, name: str
) -> None:
    store.objects[name] = b"not ours"
    world.finish(range(10))

    assert drain(run_sink(world)) is Standing.COMPLETED
    world.client.flushall()
    adopt_run(world.client, store)

    assert world.runs.counts(RUN).completed == 10


@pytest.mark.parametrize("name", [names.PROGRESS, names.SUCCESS, "_probe/x", "shards/readme.md"])
def test_what_stands_under_a_name_that_is_written_anew_stops_nothing(
    world: World, store: MemoryStore, name: str
) -> None:
    store.objects[name] = b"not ours"
    world.finish(range(10))

    assert drain(run_sink(world)) is Standing.COMPLETED

    world.check_store()


def test_a_manifest_of_another_run_is_refused_and_named(world: World, store: MemoryStore) -> None:
    world.finish(range(10))
    drain(run_sink(world))
    other = manifests.void("f" * 32, 0, 4, written_at="now")
    store.objects[object_names.manifest_object(0, 4)] = msgspec.json.encode(other)
    world.client.flushall()

    with pytest.raises(ConflictError, match="two runs must not share an output"):
        adopt_run(world.client, store)


# --- A store that lists late ---------------------------------------------------------------------


@pytest.mark.parametrize("late", [1, 2, 3])
def test_a_redis_that_lost_all_learns_what_the_store_does_not_list_yet(
    world: World, store: MemoryStore, late: int
) -> None:
    world.finish(range(10))
    drain(run_sink(world, rows=2))
    assert len(seqs(world)) == 5
    store.unlisted = {object_names.manifest_object(0, seq) for seq in range(6 - late, 6)}

    world.client.flushall()
    adopt_run(world.client, store)

    assert world.runs.counts(RUN).completed == 10
    assert world.runs.counts(RUN).queued == 0
    store.unlisted = set()
    assert drain(run_sink(world)) is Standing.COMPLETED
    assert len(world.records()) == 10
    world.check_store()
    world.check_counts()


@pytest.mark.parametrize("folder", [names.MANIFEST, names.INPUTS, names.SHARDS, names.KEYS])
def test_a_list_that_lacks_what_was_just_written_ends_no_run_and_redoes_nothing(
    world: World, store: MemoryStore, folder: str
) -> None:
    world.finish(range(10))
    partition = partition_sink(world, token=new_token())
    run_sink(world, token=partition._lease.token).step()
    while partition.store_one():
        pass
    store.unlisted = {name for name in store.objects if name.startswith(folder)}
    sink = run_sink(world, token=partition._lease.token)

    standings = set[Standing]()
    for _ in range(6):
        try:
            standings.add(sink.step())
        except HeadraceError:
            continue

    needed = folder in {names.MANIFEST, names.INPUTS}
    assert (Standing.COMPLETED not in standings) or not needed
    store.unlisted = set()
    sink._look_again_s = 0.0
    assert drain(sink) is Standing.COMPLETED
    assert world.runs.counts(RUN).queued == 0
    assert len(world.records()) == 10
    world.check_store()
    world.check_counts()


# --- A store that changes its mind about conditions ----------------------------------------------


@pytest.mark.parametrize("at_first", [True, False])
@pytest.mark.parametrize("point", ["sink.shards", "sink.manifest"])
def test_sinks_that_found_otherwise_about_conditions_write_one_manifest(
    world: World, store: MemoryStore, point: str, *, at_first: bool
) -> None:
    world.finish(range(10))
    store.conditional = at_first
    with killed_at(point):
        partition_sink(world, token=new_token()).store_one()
    expire_lease(world)

    store.conditional = not at_first

    assert drain(run_sink(world)) is Standing.COMPLETED
    assert len(world.records()) == 10
    world.check_store()
    world.check_counts()


# --- A frozen sink that wakes up -----------------------------------------------------------------

STEPS = ["read", "intent", "built", "shards", "failures", "keys", "manifest", "acknowledged"]


@pytest.mark.parametrize("conditional", [True, False])
@pytest.mark.parametrize("step", STEPS)
def test_a_sink_frozen_at_any_step_for_longer_than_its_lease_changes_nothing_when_it_wakes(
    world: World, store: MemoryStore, step: str, *, conditional: bool
) -> None:
    store.conditional = conditional
    world.accept(10)
    world.finish(range(9))
    world.finish([9], "failed")
    frozen, thaw = threading.Event(), threading.Event()
    sleeper_id: list[int] = []

    def stand_still(point: str) -> None:
        if point == f"sink.{step}" and threading.get_ident() in sleeper_id:
            sleeper_id.clear()
            frozen.set()
            assert thaw.wait(LIMIT_S)

    lost: list[BaseException | None] = []

    def sleep_and_wake() -> None:
        sleeper_id.append(threading.get_ident())
        try:
            sleeper.store_one()
            lost.append(None)
        except (PartitionLostError, HeadraceError) as error:
            lost.append(error)

    sleeper = partition_sink(world, token=new_token(), rows=10)
    crashpoints.watcher = stand_still
    thread = threading.Thread(target=sleep_and_wake)
    try:
        thread.start()
        assert frozen.wait(LIMIT_S)
        expire_lease(world)
        heir = run_sink(world, rows=7)
        for _ in range(4):
            heir.step(flush=False)
        world.finish(range(10, 15))
        heir.step()
        thaw.set()
        thread.join(LIMIT_S)
    finally:
        thaw.set()
        crashpoints.watcher = None

    assert isinstance(lost[0], PartitionLostError) == (step != "acknowledged")
    world.finish(range(15, 20))
    assert drain(heir) is Standing.FAILED
    assert len(world.records()) == 20
    world.check_store()
    world.check_counts()
