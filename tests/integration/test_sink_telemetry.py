"""A run's `telemetry/`: whole, once, only of its own time and groups, and in nobody's way."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from typing_extensions import override

from common import catalog, names
from common.errors import StoreUnusableError
from common.reconcile import adopt_run
from common.store import ObjectStore, open_store
from common.telemetry import UID_CHARS, Sample, TelemetryRow, encode, end_of
from tests.support.finished_run import FinishedRun
from tests.support.memory_store import MemoryStore
from tests.support.producer_cli import producer
from tests.support.run_world import RUN, World
from tests.support.sinks import drain, expire_lease, killed_at, run_sink
from workers.sink import archive
from workers.sink.archive import SETTLED_MS, WINDOW_MS, Archive
from workers.sink.run_sink import Standing

START_MS = 1_793_361_600_000
GROUPS = ("gpu0@host", "gpu1@host")


@pytest.fixture
def world(redis_client: "redis.Redis", tmp_path: Path) -> Iterator[World]:
    made = World(redis_client, open_store(str(tmp_path / "out")), prompts=10)
    yield made
    made.close()


def say(world: World, at_ms: int, group: str = GROUPS[0], *, uid: str = "", **own: Any) -> None:
    """A sample of a worker group that holds a prompt of the run, or of another."""
    values: dict[str, Any] = {"epoch": "e1", "server": "s", "state": "ready"}
    values |= {"in_flight": 3, "leased": 4, "bound": 5, "completed": 6}
    runs = {(uid or world.record.uid)[:UID_CHARS]: 2}
    sample = Sample(**{**values, "runs": runs, **own})
    world.client.xadd(names.telemetry(group), {"s": encode(sample)}, id=f"{at_ms}-0")
    world.client.zadd(names.TELEMETRY_GROUPS, {group: at_ms})


def objects(store: ObjectStore) -> list[str]:
    return [found.name for found in store.list(names.TELEMETRY)]


def rows(store: ObjectStore) -> list[TelemetryRow]:
    return [
        msgspec.json.decode(line, type=TelemetryRow)
        for name in objects(store)
        for line in catalog.lines_of(catalog.fetch(store, name))
    ]


class Keeper:
    """The archive of one sink, on a clock of the test's."""

    def __init__(self, world: World, store: ObjectStore | None = None) -> None:
        self.now_s = 0.0
        self.archive = Archive(
            world.client, store or world.store, world.record, clock=lambda: self.now_s
        )

    def step(self, now_ms: int, *, ended: bool = False) -> None:
        """One that is due."""
        self.now_s += 1000.0
        self.archive.step(now_ms, ended=ended)


def test_a_window_is_stored_when_it_is_over_and_once(world: World) -> None:
    keeper = Keeper(world)
    for n in range(60):
        say(world, START_MS + 5000 * n, GROUPS[n % 2])
    keeper.step(START_MS + WINDOW_MS + SETTLED_MS - 1)
    assert objects(world.store) == []

    keeper.step(START_MS + WINDOW_MS + SETTLED_MS)
    [name] = objects(world.store)
    assert name.startswith("telemetry/20261030T120000Z-20261030T120500Z-")
    told = rows(world.store)
    assert [row.at_ms for row in told] == [START_MS + 5000 * n for n in range(60)]
    assert {row.group for row in told} == set(GROUPS)
    assert (told[0].of_run, told[0].in_flight, told[0].bound) == (2, 3, 5)
    for _ in range(3):
        keeper.step(START_MS + WINDOW_MS + 60_000)
        Keeper(world).step(START_MS + WINDOW_MS + 60_000)

    assert objects(world.store) == [name]


def test_only_what_served_the_run_is_its_telemetry(world: World) -> None:
    say(world, START_MS + 1000)
    say(world, START_MS + 2000, "gpu7@host", uid="f" * 32)
    say(world, START_MS + 3000, "gpu8@host", runs={})
    # A time in which nobody served it leaves no object.
    say(world, START_MS + 2 * WINDOW_MS, "gpu7@host", uid="f" * 32)
    say(world, START_MS + 3 * WINDOW_MS)
    keeper = Keeper(world)
    for _ in range(4):
        keeper.step(START_MS + 5 * WINDOW_MS)

    assert [row.at_ms - START_MS for row in rows(world.store)] == [1000, 3 * WINDOW_MS]
    assert len(objects(world.store)) == 2


def test_when_the_run_ends_the_rest_is_stored_at_once_and_what_comes_late_after_it(
    world: World,
) -> None:
    keeper = Keeper(world)
    say(world, START_MS + 10_000)
    keeper.step(START_MS + 20_500, ended=True)
    assert [row.at_ms - START_MS for row in rows(world.store)] == [10_000]

    say(world, START_MS + 24_000)
    keeper.archive.step(START_MS + 30_000, ended=True)
    assert len(rows(world.store)) == 1
    keeper.step(START_MS + 30_000, ended=True)
    assert len(rows(world.store)) == 2
    # It goes on (a retry), in the same window: what follows joins without a gap.
    say(world, START_MS + 200_000)
    keeper.step(START_MS + WINDOW_MS + SETTLED_MS)

    assert [row.at_ms - START_MS for row in rows(world.store)] == [10_000, 24_000, 200_000]
    ends = [end_of(name) for name in objects(world.store)]
    assert ends == sorted(ends, key=lambda end: end or 0)
    assert ends[-1] == START_MS + WINDOW_MS


def test_a_late_start_catches_up_window_by_window(world: World) -> None:
    for n in range(8):
        say(world, START_MS + n * WINDOW_MS + 1)
    keeper = Keeper(world)
    keeper.step(START_MS + 9 * WINDOW_MS)
    # Results come first: a few at a time.
    assert len(objects(world.store)) == archive.MOST_WINDOWS
    keeper.step(START_MS + 9 * WINDOW_MS)
    keeper.step(START_MS + 9 * WINDOW_MS)

    assert [row.at_ms - START_MS for row in rows(world.store)] == [
        n * WINDOW_MS + 1 for n in range(8)
    ]


def test_a_redis_that_was_wiped_or_taken_back_brings_no_row_twice(world: World) -> None:
    say(world, START_MS)
    say(world, START_MS + 1000, GROUPS[1])
    Keeper(world).step(START_MS + 2 * WINDOW_MS)
    kept = objects(world.store)
    world.client.delete(names.telemetry(GROUPS[1]))
    say(world, START_MS + WINDOW_MS)
    Keeper(world).step(START_MS + 2 * WINDOW_MS + SETTLED_MS)

    assert objects(world.store)[: len(kept)] == kept
    assert [row.at_ms - START_MS for row in rows(world.store)] == [0, 1000, WINDOW_MS]


def test_a_frozen_sink_that_wakes_writes_the_same_object_or_none(world: World) -> None:
    say(world, START_MS)
    frozen, next_one = Keeper(world), Keeper(world)
    frozen.step(START_MS + 10_000)
    next_one.step(START_MS + WINDOW_MS + SETTLED_MS)
    frozen.step(START_MS + WINDOW_MS + SETTLED_MS + 60_000)

    assert len(objects(world.store)) == len(rows(world.store)) == 1


def test_several_sinks_store_each_sample_once(redis_client: "redis.Redis", tmp_path: Path) -> None:
    world = World(redis_client, open_store(str(tmp_path / "out")), prompts=10, partitions=4)
    try:
        now_ms = int(redis_client.time()[0]) * 1000
        for n in range(3):
            say(world, now_ms - 3 * WINDOW_MS + n * WINDOW_MS)
        world.finish(range(10))
        sinks = [run_sink(world), run_sink(world), run_sink(world)]
        for _ in range(6):
            for sink in sinks:
                sink.step()
        assert [drain(sink) for sink in sinks] == [Standing.COMPLETED] * 3

        assert len(rows(world.store)) == 3
        archived = [sink._archive._done_ms is not None for sink in sinks]
        assert archived == [0 in sink.leases for sink in sinks]
        assert sum(archived) == 1
    finally:
        world.close()


def test_a_sink_killed_when_an_object_is_stored_leaves_the_next_one_nothing_to_double(
    world: World,
) -> None:
    now_ms = int(world.client.time()[0]) * 1000
    for n in range(4):
        say(world, now_ms - 3 * WINDOW_MS + n * WINDOW_MS // 2)
    world.finish(range(10))
    with killed_at("archive.stored"):
        run_sink(world).step()
    assert len(objects(world.store)) == 1
    stored = len(rows(world.store))

    expire_lease(world)
    world.client.delete(names.maintenance(RUN))
    assert drain(run_sink(world)) is Standing.COMPLETED

    told = rows(world.store)
    assert 0 < stored < len(told) == 4
    assert [row.at_ms for row in told] == sorted({row.at_ms for row in told})
    world.check_store()


class Refusing(MemoryStore):
    """A store that takes no telemetry."""

    refuses = True

    @override
    def put_if_absent(self, name: str, data: bytes, *, rows_sha256: str = "") -> bool:
        if self.refuses and name.startswith(names.TELEMETRY):
            raise StoreUnusableError("denied")
        return super().put_if_absent(name, data, rows_sha256=rows_sha256)


def test_a_store_that_takes_no_telemetry_takes_the_run_all_the_same(
    redis_client: "redis.Redis",
) -> None:
    world = World(redis_client, Refusing(), prompts=10)
    try:
        say(world, int(redis_client.time()[0]) * 1000 - 2 * WINDOW_MS)
        world.finish(range(10))
        assert drain(run_sink(world)) is Standing.COMPLETED
        assert len(world.current()) == 10
    finally:
        world.close()


def test_what_could_not_be_stored_is_when_it_can(redis_client: "redis.Redis") -> None:
    store = Refusing()
    world = World(redis_client, store, prompts=10)
    try:
        say(world, START_MS)
        keeper = Keeper(world)
        keeper.step(START_MS + 2 * WINDOW_MS)
        assert objects(store) == []
        store.refuses = False
        keeper.step(START_MS + 2 * WINDOW_MS)
        assert len(rows(store)) == 1
    finally:
        world.close()


def test_an_emptied_output_gets_no_telemetry_that_would_hide_it(world: World) -> None:
    say(world, START_MS)
    world.store.delete(names.RUN_JSON)
    Keeper(world).step(START_MS + 2 * WINDOW_MS)

    assert objects(world.store) == []


def test_a_redis_whose_list_of_groups_is_somebody_elses_stops_nothing(world: World) -> None:
    world.client.set(names.TELEMETRY_GROUPS, "planted")
    world.finish(range(10))

    assert drain(run_sink(world)) is Standing.COMPLETED


# --- Whoever reads the output --------------------------------------------------------------------


def strew(store: ObjectStore) -> None:
    """Telemetry as a sink writes it, and what others may leave beside it."""
    name = "telemetry/20261030T120000Z-20261030T120500Z-0123456789abcdef.jsonl.zst"
    store.put_if_absent(name, b"\x28\xb5\x2f\xfd")
    store.put_if_absent("telemetry/notes.txt", b"mine")


def test_who_compares_redis_with_the_store_passes_telemetry_over(world: World) -> None:
    strew(world.store)
    world.finish(range(10))
    assert drain(run_sink(world)) is Standing.COMPLETED
    world.client.flushall()
    adopt_run(world.client, world.store)

    assert drain(run_sink(world)) is Standing.COMPLETED
    world.check_store()
    world.check_counts()


def test_who_verifies_and_exports_passes_telemetry_over(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "out"))
    FinishedRun(store, prompts=30)
    strew(store)
    where = ("demo", "--output", store.url)
    verified = producer("verify", *where, "--json", cwd=tmp_path)
    exported = producer("export", *where, "--to", "all.jsonl", cwd=tmp_path)

    assert (verified.code, verified.told["strays"]) == (0, 0)
    assert exported.code == 0
    assert len((tmp_path / "all.jsonl").read_bytes().splitlines()) == 30
