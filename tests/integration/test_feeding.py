"""Requests beyond the window wait in `inputs/`, in order, and come as others end."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from common import catalog, names, object_names
from common.cancelling import Canceller
from common.feeder import FROM_START_AGAIN_S, Feeder
from common.models import Counts
from common.queue import Jobs
from common.queue.audit import audit_run
from common.queue.feed import FeedLostError, FeedTurn
from common.reconcile import adopt_run, reconcile
from common.store import ObjectStore, open_store
from common.store.frames import compress, digest_name
from tests.support.queue_world import take
from tests.support.redis_server import RedisServer
from tests.support.run_world import RUN, SERVER, World
from tests.support.sinks import run_sink

EPOCH = "e1"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "out"))


@pytest.fixture
def world(any_redis: RedisServer, store: ObjectStore) -> Iterator[World]:
    made = World(any_redis.client(), store, prompts=0, window=10)
    yield made
    made.close()


def counts(world: World) -> Counts:
    found = world.runs.counts(RUN)
    ended = found.completed + found.failed + found.cancelled
    assert ended + found.in_flight + found.queued == found.total
    assert 0 <= found.unfed <= found.queued
    return found


def listed(world: World) -> list[int]:
    """The prompts in RQ's queue, in its order."""
    number = {world.key(n).hex().encode(): n for n in range(world.accepted)}
    found = cast("list[bytes]", world.client.lrange(names.rq_queue(RUN), 0, -1))
    return [number[hex_] for hex_ in found]


def feeder(world: World) -> Feeder:
    return Feeder(world.client, world.store, world.record)


def feed_all(world: World) -> int:
    one, fed = feeder(world), 0
    while now := one.step():
        fed += now
    one.release()
    return fed


def claim(world: World, count: int) -> list[int]:
    jobs = Jobs(world.client, epoch=EPOCH, group="gpu0@test", server=SERVER)
    assert take(jobs, 100, bound=100, quiet=True).what == "granted"
    reply = jobs.claim(count, stream_mark_bytes=1 << 40, worker_name="gpu0")
    return [int(msgspec.json.decode(each.prompt)["id"]) for each in reply.claims]


def end_all(world: World, one: Feeder | None = None, *, most: int = 10) -> list[int]:
    """Feed, claim and finish until nothing is left; the order in which prompts were claimed."""
    order: list[int] = []
    one = one or feeder(world)
    while counts(world).queued:
        one.step()
        assert len(listed(world)) <= most
        now = claim(world, 4)
        assert now, "nothing to claim, though prompts are queued"
        world.finish(now)
        order += now
    return order


def test_only_the_window_is_in_redis_and_all_is_done_in_order(world: World) -> None:
    for _ in range(5):
        world.accept(7)

    before = counts(world)
    assert (before.total, before.queued, before.unfed) == (35, 35, 25)
    assert len(listed(world)) == 10

    assert end_all(world) == list(range(35))
    assert counts(world).completed == 35
    assert counts(world).unfed == 0


def test_what_waits_goes_before_what_comes_later(world: World) -> None:
    world.accept(15)
    world.finish(claim(world, 10))
    world.accept(5)

    assert counts(world).unfed == 10, "the five new ones queue behind the five that wait"
    assert end_all(world) == list(range(10, 20))


def test_a_second_feeder_changes_nothing(world: World) -> None:
    world.accept(30)
    world.finish(claim(world, 10))
    feed_all(world)
    again = feeder(world)

    assert again.step() == 0
    assert listed(world) == list(range(10, 20))
    assert counts(world).unfed == 10


def test_one_feeds_at_a_time(world: World) -> None:
    world.accept(30)
    world.finish(claim(world, 10))
    one = FeedTurn(world.client, world.record, token="one")
    other = FeedTurn(world.client, world.record, token="other")
    assert one.begin() is not None

    assert other.begin() is None
    with pytest.raises(FeedLostError):
        other.finish()
    one.finish()
    room = other.begin()
    assert room is not None
    assert room.again == 0, "another has fed: what was read is read again"


def test_prompts_that_wait_while_their_object_is_gone_through_are_fed(world: World) -> None:
    """Two calls for one object: the second comes after the feeder has passed its rows."""
    world.accept(14)
    world.accept(0, sealed=False)
    numbers = range(14, 34)
    world.accept(20, queue=False)
    seq = int(world.client.hget(names.run(RUN), "inputs_seq") or 0) - 1
    one = feeder(world)
    world.queue(numbers[:5], inputs_seq=seq)
    world.finish(claim(world, 10))
    assert one.step() == 9
    world.queue(numbers[5:], inputs_seq=seq)

    done = end_all(world, one)

    assert sorted(done) == list(range(10, 34))


def test_an_object_that_comes_late_is_not_passed_over(world: World) -> None:
    """A producer takes a number, another with a later number is quicker."""
    world.accept(12)
    first = world.accepted
    world.accept(3, queue=False)
    late_seq = int(world.client.hget(names.run(RUN), "inputs_seq") or 0) - 1
    name = next(
        each.name for each in world.store.list(names.INPUTS) if f"{late_seq:08d}-" in each.name
    )
    data = world.store.get(name) or b""
    world.store.delete(name)
    world.accept(20)
    one = feeder(world)
    world.finish(claim(world, 10))
    one.step()
    world.store.put_if_absent(name, data)
    world.queue(range(first, first + 3), inputs_seq=late_seq)

    assert sorted(end_all(world, one)) == list(range(10, 35))


def test_two_objects_of_one_number_are_both_gone_through(world: World) -> None:
    """A producer had its number from before Redis was taken back, another has the same after."""
    world.accept(12)
    first = int(world.client.hget(names.run(RUN), "inputs_seq") or 0)
    for _ in range(2):
        world.client.hset(names.run(RUN), "inputs_seq", first)
        world.accept(10)
    numbers = [catalog.inputs_seq(name) for name in catalog.list_inputs(world.store).rows]
    assert len(numbers) == len(set(numbers)) + 1

    assert sorted(end_all(world)) == list(range(32))


def test_what_no_sequence_leads_to_is_found_from_the_start(world: World) -> None:
    world.accept(30)
    world.client.hset(names.run(RUN), "feed_from", 10**6)
    world.client.hdel(names.run(RUN), "feed_dirty")
    now_s = [0.0]
    one = Feeder(world.client, world.store, world.record, clock=lambda: now_s[0])
    world.finish(claim(world, 10))
    assert one.step() == 0
    assert one.step() == 0
    now_s[0] = FROM_START_AGAIN_S + 1
    assert one.step() == 0

    assert one.step() == 10


def test_a_result_for_what_redis_thinks_unfed_is_taken(world: World) -> None:
    """A rewound Redis has forgotten that it was fed and claimed."""
    world.accept(15)

    assert world.finish([12]) == ["ok"]

    assert counts(world).unfed == 4
    assert sorted(end_all(world)) == [n for n in range(15) if n != 12]


def test_whoever_works_on_what_redis_thinks_unfed_goes_on(world: World) -> None:
    world.accept(15)

    assert world.jobs.renew([(RUN, world.key(12))]) == ["unknown"]


def test_the_audit_leaves_what_waits_in_inputs(world: World) -> None:
    world.accept(30)

    report = audit_run(world.client, world.record)

    assert (report.relisted, report.missing) == (0, ())
    world.client.delete(names.rq_queue(RUN), *[names.rq_job(world.key(n).hex()) for n in (0, 1)])
    report = audit_run(world.client, world.record)
    assert set(report.missing) == {world.key(0), world.key(1)}
    assert report.relisted == 8


def test_the_same_prompts_again_change_nothing(world: World) -> None:
    world.accept(30)
    before = counts(world)

    reply = world.ledger.add(
        [(world.key(n), world.fingerprint(n), world.prompt(n)) for n in range(30)]
    )

    assert (reply.added, reply.queued, reply.restored) == (0, 30, 0)
    assert counts(world) == before


def test_a_changed_prompt_that_waits_is_fed_with_its_new_text(world: World) -> None:
    world.accept(12)
    seq = int(world.client.hget(names.run(RUN), "inputs_seq") or 0)
    key, old, prompt = world.key(11), world.fingerprint(11), world.prompt(11)
    new = bytes(reversed(old))
    assert world.ledger.add([(key, new, prompt)]).conflicts == [key]
    world.client.hset(names.run(RUN), "inputs_seq", seq + 1)
    row = b'{"key":"%b","fp":"%b","prompt":%b}\n' % (
        key.hex().encode(),
        new.hex().encode(),
        b'{"id":99}',
    )
    sha256, short = digest_name(row)
    world.store.put_if_absent(
        object_names.inputs_object(seq + 1, short), compress(row), rows_sha256=sha256
    )
    assert world.ledger.add([(key, new, prompt)], inputs_seq=seq + 1, replace=True).replaced == 1

    world.finish(claim(world, 10))
    feed_all(world)

    assert counts(world).unfed == 0
    assert world.client.hget(names.rq_job(key.hex()), "request") == b'{"id":99}'


def test_failed_prompts_do_not_fill_the_window(world: World) -> None:
    world.accept(30)
    for _ in range(2):
        world.finish(claim(world, 10), "failed")
        feed_all(world)

    assert len(listed(world)) == 10


@pytest.mark.parametrize("told", ["by its progress", "by the caller"])
def test_a_rebuild_brings_no_more_requests_than_the_window(world: World, told: str) -> None:
    world.accept(30)
    window = None if told == "by its progress" else 10
    world.store.put(names.PROGRESS, msgspec.json.encode({"window": 10 if window is None else 7}))
    world.client.flushall()

    adopt_run(world.client, world.store, window=window)

    assert counts(world).unfed == 20
    assert sorted(end_all(world)) == list(range(30))


def test_a_wiped_redis_without_word_of_a_window_holds_what_the_default_allows(
    world: World,
) -> None:
    world.accept(30)
    with_sink = run_sink(world)
    world.finish(claim(world, 10))
    while counts(world).stream_entries:
        with_sink.step()
        with_sink.step(flush=True)
    with_sink.release()
    world.client.flushall()

    adopt_run(world.client, world.store)
    world.runs.set_window(RUN, 10)

    found = counts(world)
    assert (found.total, found.completed, found.queued) == (30, 10, 20)
    assert found.unfed == 0, "the default window holds them all"
    assert sorted(end_all(world, most=20)) == list(range(10, 30))


def test_a_restarted_redis_feeds_after_the_reconcile(world: World) -> None:
    world.accept(30)
    world.finish(claim(world, 10))
    world.client.hset(names.run(RUN), "reconciled", "another")

    assert feeder(world).step() == 0
    reconcile(world.client, world.store, world.record)
    assert feeder(world).step() == 10


def test_a_cancelled_run_ends_what_waits_as_cancelled(world: World) -> None:
    world.accept(30)
    world.client.hset(names.run(RUN), "cancelled", "1")

    assert feeder(world).step() == 0
    assert Canceller(world.client, world.store, world.record).step(limit_s=10) == "done"

    found = counts(world)
    assert (found.cancelled, found.queued, found.unfed) == (30, 0, 0)
    entries = cast("list[Any]", world.client.xrange(names.results(RUN, 0)))
    rows = [msgspec.json.decode(fields[b"r"]) for _, fields in entries]
    assert sorted(row["id"] for row in rows) == list(range(30))
    assert all(row["request"]["body"] == world.body(row["id"]) for row in rows)


def test_a_sink_feeds(world: World) -> None:
    world.accept(30)
    world.finish(claim(world, 10))
    sink = run_sink(world)

    sink.step()

    assert sink.fed_rows == 10
    assert len(listed(world)) == 10
    sink.release()


def test_a_sink_does_not_wait_for_a_batch_that_its_redis_cannot_hold(world: World) -> None:
    """Claims stop at a quarter of maxmemory, which may be less than a batch."""
    world.accept(10)
    world.finish(claim(world, 8))
    used = int(world.client.info("memory")["used_memory"])
    sink = run_sink(world, rows=1000)
    sink.step()
    assert counts(world).stream_entries == 8, "the batch is not due by itself"
    world.client.config_set("maxmemory", 4 * used)
    world.client.hset(names.counts(RUN), "stream_bytes", used)
    try:
        sink.step()
    finally:
        world.client.config_set("maxmemory", 0)

    assert world.client.xlen(names.results(RUN, 0)) == 0
    sink.release()


def test_a_redis_without_room_for_requests_takes_the_ledger_and_feeds_later(
    world: World,
) -> None:
    """By its memory, with a window that would hold them all."""
    world.runs.set_window(RUN, 10**6)
    # The ledger's buckets are there before its entries are measured.
    world.accept(1000)
    used = int(world.client.info("memory")["used_memory"])
    world.client.config_set("maxmemory", int(1.6 * used / 0.625))
    try:
        # In small steps: between no room for requests and none for the ledger there is a tenth.
        while counts(world).unfed < 300:
            world.accept(50)
        total = counts(world).total
        assert total > 1300, "some requests found room"

        done: list[int] = []
        one = feeder(world)
        while counts(world).queued:
            one.step()
            now = claim(world, 90)
            world.finish(now)
            done += now
            while world.client.xlen(names.results(RUN, 0)):
                world.client.xtrim(names.results(RUN, 0), maxlen=0)
                world.client.hset(names.counts(RUN), "stream_bytes", 0)
        assert done == list(range(total))
    finally:
        world.client.config_set("maxmemory", 0)
