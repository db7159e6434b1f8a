"""Guards that no longer story reaches; a mutant takes each away, and only these tests see it."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import redis
from typing_extensions import override

from common import catalog, connect, ending, names, object_names
from common.errors import ConflictError, RedisUnusableError, StoreDamagedError, StoreUnusableError
from common.models import Record, Result
from common.queue import Jobs
from common.queue.feed import FeedLostError, FeedTurn
from common.queue.forgets import Forgets
from common.queue.maintenance import Facts, Maintenance, TurnLostError
from common.queue.sinklease import PartitionLostError
from common.reader import current_records
from common.reconcile import reconcile
from common.store import open_store
from tests.support.memory_store import MemoryStore
from tests.support.queue_world import QueueWorld
from tests.support.run_world import RUN, World
from tests.support.sinks import expire_lease, partition_sink
from workers.engine.desk import RedisDesk
from workers.engine.draining import Draining
from workers.engine.finisher import Finisher
from workers.engine.holdings import Holdings
from workers.engine.keeper import Keeper

LEASE_MS = 60_000


@pytest.fixture
def world(redis_client: "redis.Redis", tmp_path: Path) -> Iterator[World]:
    made = World(redis_client, open_store(str(tmp_path / "out")), prompts=10)
    yield made
    made.close()


def now_ms(client: "redis.Redis") -> int:
    seconds, micros = client.time()
    return int(seconds) * 1000 + int(micros) // 1000


# --- Leases --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("since_ms", "last_ms", "renews", "reaps"),
    [
        (70_000, 1_000, False, 1),
        (70_000, 40_000, False, 0),  # the last renewal is too old
        (70_000, 40_000, True, 0),  # a gap before this one
        (70_000, 1_000, True, 1),
        (5_000, 1_000, False, 0),  # not yet for one lease
        (None, None, False, 0),
    ],
)
def test_a_gap_in_ones_own_renewals_takes_the_right_to_reap(
    redis_client: "redis.Redis",
    since_ms: int | None,
    last_ms: int | None,
    *,
    renews: bool,
    reaps: int,
) -> None:
    world = QueueWorld(redis_client, prompts=1)
    dead, mine = world.jobs("dead"), world.jobs("mine")
    world.claim(dead)
    world.expire_leases([0])
    if since_ms is not None and last_ms is not None:
        now = now_ms(redis_client)
        redis_client.set(names.renewed("mine"), f"{now - since_ms} {now - last_ms}")
    if renews:
        mine.renew([], lease_ms=LEASE_MS)

    assert mine.reap(steady=True, lease_ms=LEASE_MS)[0] == reaps


def test_a_cancelled_run_takes_no_prompts_at_the_last_moment(redis_client: "redis.Redis") -> None:
    world = QueueWorld(redis_client, prompts=1)
    redis_client.hset(names.run(world.run), "cancelled", "1")

    with pytest.raises(ConflictError, match="was cancelled"):
        world.add([1])

    assert world.states() == {0: "queued/1"}


def test_a_feeder_whose_turn_ran_out_feeds_nothing(
    redis_client: "redis.Redis", tmp_path: Path
) -> None:
    world = World(redis_client, open_store(str(tmp_path / "out")), prompts=15, window=10)
    world.finish(range(10))
    turn = FeedTurn(redis_client, world.record, token="mine")
    assert turn.begin() is not None
    redis_client.delete(names.feed(RUN))

    with pytest.raises(FeedLostError):
        turn.feed([(world.key(12), world.fingerprint(12), world.prompt(12))], most=5)

    assert world.runs.counts(RUN).unfed == 5
    world.close()


@pytest.mark.parametrize("comes", ["leased", "waiting", "unknown"])
def test_what_comes_between_the_look_and_the_act_stands_in_the_way(
    world: World, comes: str
) -> None:
    if comes == "leased":
        hex_ = world.key(0).hex()
        world.client.zadd(names.leases(RUN), {hex_: now_ms(world.client) + LEASE_MS})
    elif comes == "waiting":
        world.finish([0])
    uid = "another" if comes == "unknown" else world.record.uid

    assert Forgets(world.client, RUN).begin(uid, lose_results=False) == comes

    assert world.runs.get(RUN) is not None
    assert not world.client.exists(names.tombstone(RUN))


# --- The ledger and the store --------------------------------------------------------------------


def record(world: QueueWorld, outcome: str, *, try_: int) -> Record:
    key, fingerprint, _ = world.item(0)
    return Record(key=key, fingerprint=fingerprint, try_=try_, outcome=cast("Any", outcome))


@pytest.mark.parametrize(
    ("ended", "taught", "stands"),
    [
        # What Redis has, what the store has, and the reader function over both.
        (("failed", 2), ("failed", 1), "failed/2"),
        (("failed", 1), ("failed", 2), "failed/2"),
        (("failed", 1), ("completed", 2), "completed/2"),
        (("failed", 2), ("completed", 1), "completed/1"),
        (("completed", 1), ("failed", 2), "completed/1"),
        (("completed", 2), ("completed", 1), "completed/2"),
    ],
)
def test_what_is_taught_is_taken_by_the_reader_function(
    redis_client: "redis.Redis",
    ended: tuple[Any, int],
    taught: tuple[str, int],
    stands: str,
) -> None:
    world = QueueWorld(redis_client, prompts=1)
    jobs = world.jobs("e1")
    for try_ in range(1, ended[1] + 1):
        outcome: Any = ended[0] if try_ == ended[1] else "failed"
        jobs.finish([world.result(0, outcome, try_=try_)])
        if try_ < ended[1]:
            world.add([0], retry=True)

    with Maintenance(redis_client, world.record) as turn:
        turn.teach([record(world, taught[0], try_=taught[1])])

    assert world.states() == {0: stands}
    counts = world.counts()
    assert (counts.completed, counts.failed, counts.total) == (
        int(stands.startswith("completed")),
        int(stands.startswith("failed")),
        1,
    )
    assert bool(world.failed_registry()) == stands.startswith("failed")


def test_a_restart_between_the_first_read_and_the_turn_is_seen(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "server_run_id", lambda _client: "of before")

    with pytest.raises(TurnLostError), Maintenance(world.client, world.record):
        pass

    assert not world.client.exists(names.maintenance(RUN))


def test_a_gap_in_the_manifests_is_closed(world: World) -> None:
    world.finish(range(8))
    sink = partition_sink(world, token="mine")
    assert [sink.store_one(), sink.store_one()] == [4, 4]
    world.store.delete(object_names.manifest_object(0, 1))

    reconcile(world.client, world.store, world.record, deep=True)

    every = catalog.manifests_of(world.store, world.record.uid)
    # What the removed one had named is adopted: nothing of it is lost.
    assert [(m.seq, m.void, m.completed) for m in every] == [
        (1, False, 4),
        (2, False, 4),
        (3, True, 0),
    ]


def test_a_prompt_that_stands_twice_in_inputs_is_one(world: World) -> None:
    world.accepted = 0
    world.accept(10, queue=False)

    listing = catalog.list_inputs(world.store)

    assert len(listing.rows) == 2
    assert ending.count(world.store, [], listing).accepted == 10


@pytest.mark.parametrize("what", ["total", "completed", "failed", "cancelled"])
def test_each_count_by_the_store_must_be_that_of_the_ledger(what: str) -> None:
    counts = {"total": 9, "completed": 4, "failed": 3, "cancelled": 2}
    tally = ending.Tally(
        accepted=9, completed=4, failed=3, cancelled=2, input_tokens=0, output_tokens=0
    )

    def facts() -> Facts:
        flags = {"reconciled": True, "sealed": True, "cancelled_run": False}
        return msgspec.convert({**flags, **counts, "entries": 0, "seqs": 1}, Facts)

    assert ending.differing(tally, facts()) == ()
    counts[what] += 1
    assert len(ending.differing(tally, facts())) == 1


def test_only_the_holder_of_a_partition_sets_aside(world: World) -> None:
    world.finish([0])
    frozen = partition_sink(world, token="frozen")
    frozen._lease.take()
    expire_lease(world)
    partition_sink(world, token="other")._lease.take()
    [(entry_id, _)] = world.entries()

    with pytest.raises(PartitionLostError):
        frozen._lease.set_aside(entry_id.decode(), None)

    assert world.waiting() == 1


class ForeignStore(MemoryStore):
    """Holds other rows under the names of all shards."""

    @override
    def put_if_absent(self, name: str, data: bytes, *, rows_sha256: str = "") -> bool:
        if name.startswith(names.SHARDS):
            return False
        return super().put_if_absent(name, data, rows_sha256=rows_sha256)


def test_an_object_with_other_rows_than_its_name_says_is_no_commit(
    redis_client: "redis.Redis",
) -> None:
    world = World(redis_client, ForeignStore(), prompts=4)
    world.finish(range(4))

    with pytest.raises(StoreDamagedError, match="holds other bytes"):
        partition_sink(world, token="mine").store_one()

    assert all(m.void for m in catalog.manifests_of(world.store, world.record.uid))
    assert world.waiting() == 4
    world.close()


def test_a_store_that_takes_nothing_is_no_fault_of_a_batch(redis_client: "redis.Redis") -> None:
    store = MemoryStore(
        fault=lambda operation, _: "refused" if operation == "put_if_absent" else None
    )
    world = World(redis_client, MemoryStore(), prompts=4)
    world.store = store
    store.denied = "quota"
    world.finish(range(4))
    sink = partition_sink(world, token="mine")

    for _ in range(7):
        with pytest.raises(StoreUnusableError):
            sink.store_one()

    assert redis_client.hget(names.sink(RUN, 0), "tries") == b"0"
    assert world.waiting() == 4
    world.close()


# --- Pure ----------------------------------------------------------------------------------------


def of_key(outcome: str, try_: int) -> Record:
    return Record(key=b"k" * 16, fingerprint=b"f" * 8, try_=try_, outcome=cast("Any", outcome))


@pytest.mark.parametrize("other", ["failed", "cancelled"])
def test_a_completion_beats_every_other_end_whatever_its_try(other: str) -> None:
    both = [of_key("completed", 1), of_key(other, 2)]

    assert current_records(both) == current_records(both[::-1]) == {b"k" * 16: both[0]}


@pytest.mark.parametrize("outcome", ["completed", "failed", "cancelled"])
def test_of_equal_ends_the_highest_try_counts(outcome: str) -> None:
    both = [of_key(outcome, 1), of_key(outcome, 2)]

    assert current_records(both) == current_records(both[::-1]) == {b"k" * 16: both[1]}


def test_an_address_is_shown_without_user_and_password() -> None:
    secret = "hunter2"

    shown = connect.public_address(f"redis://user:{secret}@queue:6379/0")

    assert shown == "redis://queue:6379/0"


def test_what_a_client_says_of_an_address_is_not_told() -> None:
    secret = "hunter2"
    error = redis.ConnectionError(f"cannot reach redis://user:{secret}@queue:6379/0")

    told = connect.mapped(error, "redis://queue:6379/0")

    assert secret not in str(told)
    assert "redis://queue:6379/0" in str(told)


# --- A worker group's parts ----------------------------------------------------------------------


class Queue:
    """`Jobs.finish`, answered as told; the last answer stays."""

    def __init__(self, *answers: str | Exception) -> None:
        self._answers = list(answers)
        self.repeats: list[bool] = []

    def finish(self, results: Sequence[Result]) -> list[str]:
        self.repeats += [result.repeat for result in results]
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return [answer for _ in results]


def result() -> Result:
    return Result(
        run="r",
        uid="u",
        key=b"k" * 16,
        fingerprint=b"f" * 8,
        try_=1,
        outcome="completed",
        row=b"{}",
        input_tokens=0,
        output_tokens=0,
    )


async def sent(queue: Queue, calls: int) -> tuple[Finisher, Holdings]:
    holdings, desk = Holdings(), RedisDesk("test")
    group = SimpleNamespace(finish=queue.finish, group="gpu0@test")
    finisher = Finisher(cast("Jobs", group), holdings, desk, on_room=lambda: None)
    finisher.add(result())
    for _ in range(calls):
        await finisher._send()
    desk.close()
    return finisher, holdings


async def test_a_finish_whose_answer_was_lost_is_repeated_and_says_so() -> None:
    queue = Queue(RedisUnusableError("away"), "repeated")

    finisher, holdings = await sent(queue, 2)

    assert queue.repeats == [False, True]
    assert (finisher.completed, finisher.blocked, holdings.unsent) == (1, False, {})


@pytest.mark.parametrize("word", ["unknown", "untaught"])
async def test_what_redis_does_not_know_yet_is_kept_and_stops_claims(word: str) -> None:
    finisher, holdings = await sent(Queue(word), 1)

    assert finisher.blocked
    assert list(holdings.unsent) == [("r", b"k" * 16)]
    assert holdings.leased() == [("r", b"k" * 16)]


@pytest.mark.parametrize("word", ["ok", "changed", "unknown", None])
async def test_the_answer_to_a_result_does_not_end_the_next_result_of_the_same_job(
    word: str | None,
) -> None:
    holdings, desk = Holdings(), RedisDesk("test")
    loop, calls = asyncio.get_running_loop(), []
    later = msgspec.structs.replace(result(), uid="anew", row=b'{"later": 1}')

    def finish(batch: list[Result]) -> list[str]:
        calls.append([each.uid for each in batch])
        if len(calls) > 1:
            return ["ok"]
        # The run was made anew, and its prompt has ended before this answer is read.
        loop.call_soon_threadsafe(finisher.add, later)
        if word is None:
            raise RedisUnusableError("away")
        return [word]

    jobs = SimpleNamespace(finish=finish, group="gpu0@test")
    finisher = Finisher(cast("Jobs", jobs), holdings, desk, on_room=lambda: None)
    finisher.add(result())

    await finisher._send()
    assert list(holdings.unsent.values()) == [later]
    await finisher._send()
    desk.close()

    assert calls == [["u"], ["anew"]]
    assert not holdings.unsent
    assert finisher._waiting_bytes == 0


async def test_past_its_own_deadline_a_process_holds_no_slot() -> None:
    await asyncio.sleep(0)
    core = SimpleNamespace(
        jobs=None,
        holdings=None,
        beat=None,
        watch=None,
        rids=None,
        timing=None,
        bound=lambda: 5,
        draining=Draining(),
    )
    keeper = Keeper(cast("Any", core), cast("Any", None))
    keeper._granted = 3

    keeper._deadline_s = time.monotonic() + 1000
    assert keeper.slots == 3
    keeper._deadline_s = time.monotonic()
    assert keeper.slots == 0
