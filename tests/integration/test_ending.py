"""The end of a run: what `_SUCCESS` needs, what it says, and when it goes away again."""

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import redis

from common import catalog, names, object_names
from common.ending import EndReport, Success, revoke, stands, try_to_end
from common.models import Seal
from common.queue import Runs
from common.queue.maintenance import Maintenance
from common.queue.sinklease import new_token
from common.queue.sinkview import look
from common.reconcile import reconcile
from common.store import StoredObject, open_store
from common.store.frames import digest_name
from tests.support.run_world import RUN, World
from tests.support.sinks import drain, expire_lease, killed_at, partition_sink, run_sink, watching
from workers.sink.run_sink import Standing


@pytest.fixture
def world(redis_client: "redis.Redis", tmp_path: Path) -> Iterator[World]:
    made = World(redis_client, open_store(str(tmp_path / "out")), prompts=10)
    yield made
    made.close()


@pytest.fixture
def ended(world: World) -> World:
    """All results in the store, the end not yet tested."""
    world.finish(range(8))
    world.finish([8, 9], "failed")
    store_all(world)
    return world


def store_all(world: World) -> None:
    sink = partition_sink(world, token=new_token(), rows=100)
    while sink.store_one():
        pass
    sink._lease.release()


def end_test(world: World) -> EndReport:
    report = try_to_end(world.client, world.store, world.record)
    assert report is not None
    return report


def success(world: World) -> Success | None:
    data = world.store.get(names.SUCCESS)
    return msgspec.json.decode(data, type=Success) if data else None


def test_success_says_what_the_run_came_to_and_names_its_inputs(ended: World) -> None:
    assert end_test(ended).ended

    written = success(ended)
    assert written is not None
    assert written.status == "completed_with_failures"
    assert (written.total, written.completed, written.failed) == (10, 8, 2)
    assert (written.input_tokens, written.output_tokens) == (80, 48)
    assert written.inputs == catalog.list_inputs(ended.store).names
    assert len(written.inputs) == 2  # the prompts, and the producer's seal


def test_without_failures_it_is_completed(world: World) -> None:
    world.finish(range(10))
    assert drain(run_sink(world)) is Standing.COMPLETED
    written = success(world)
    assert written is not None
    assert written.status == "completed"


def test_an_unsealed_run_has_not_ended(ended: World) -> None:
    ended.client.hset(names.run(RUN), "seal", "0")
    assert end_test(ended).missing == ("more prompts may come (not sealed)",)
    assert success(ended) is None


def test_an_open_producer_keeps_the_run_open(ended: World) -> None:
    ended.runs.open_producer(RUN, "more.jsonl", "{}")
    assert not end_test(ended).ended
    assert success(ended) is None


def test_producers_that_close_in_another_order_than_their_seals_leave_a_sealed_store(
    ended: World,
) -> None:
    """Two producers end at once: the one that says `more will come` has the higher number."""
    word = msgspec.json.encode(Seal(sealed=False, source="b", rows=0, ended_at="now"))
    name = object_names.seal_object(ended.runs.next_inputs_seq(RUN), digest_name(word)[1])
    ended.store.put_if_absent(name, word)
    ended.runs.close_producer(RUN, "b", sealed=False)
    ended.runs.close_producer(RUN, "a", sealed=True)

    assert drain(run_sink(ended)) is Standing.FAILED  # some have failed: it has ended

    listing = catalog.list_inputs(ended.store)
    assert catalog.sealed(ended.store, listing)
    written = success(ended)
    assert written is not None
    assert written.inputs == listing.names


def test_a_producer_that_opens_while_the_store_is_sealed_anew_keeps_the_run_open(
    ended: World,
) -> None:
    word = msgspec.json.encode(Seal(sealed=False, source="b", rows=0, ended_at="now"))
    name = object_names.seal_object(ended.runs.next_inputs_seq(RUN), digest_name(word)[1])
    ended.store.put_if_absent(name, word)
    take = Runs.next_inputs_seq

    def opens(runs: Runs, run: str) -> int:
        runs.open_producer(run, "c", "{}")
        return take(runs, run)

    with mock.patch.object(Runs, "next_inputs_seq", opens):
        assert not end_test(ended).ended
    assert not catalog.sealed(ended.store, catalog.list_inputs(ended.store))


def test_a_prompt_that_has_not_ended_keeps_it_open(ended: World) -> None:
    ended.retry([8])
    assert end_test(ended).missing == ("1 prompts have not ended",)


def test_results_that_wait_keep_it_open(world: World) -> None:
    world.finish(range(10))
    assert end_test(world).missing == ("10 results are not yet in the store",)


def test_a_run_that_waits_for_a_reconcile_has_not_ended(ended: World) -> None:
    ended.client.hset(names.run(RUN), "reconciled", "another")
    assert not end_test(ended).ended


def test_a_cancelled_run_gets_no_success(ended: World) -> None:
    ended.client.hset(names.run(RUN), "cancelled", "1")
    assert end_test(ended).missing == ("it is cancelled",)
    assert drain(run_sink(ended)) is Standing.FAILED
    assert success(ended) is None


def test_an_accepted_prompt_that_redis_never_heard_of_is_a_difference(ended: World) -> None:
    ended.accept(1, queue=False)

    report = end_test(ended)

    assert report.differs
    assert report.missing == ("accepted prompts: 11 in the store, 10 in Redis",)
    # The sink puts it back by itself.
    expire_lease(ended)
    sink = run_sink(ended)
    for _ in range(3):
        sink.step()
    assert ended.runs.counts(RUN).queued == 1
    ended.finish([10])
    assert drain(sink) is Standing.FAILED
    ended.check_counts()


def test_sums_of_rows_do_not_decide_but_current_records(world: World) -> None:
    # 10 keys in 12 records: a failed try was stored, then tried again.
    world.finish(range(8))
    world.finish([8, 9], "failed")
    store_all(world)
    world.retry([8, 9])
    world.finish([8], try_=2)
    world.finish([9], "failed", try_=2)
    store_all(world)

    assert end_test(world).ended

    written = success(world)
    assert written is not None
    assert (written.completed, written.failed) == (9, 1)
    assert len(world.records()) == 12


def test_what_the_ledger_calls_completed_and_the_store_lacks_is_a_difference(
    world: World,
) -> None:
    world.finish(range(10))
    world.client.delete(names.results(RUN, 0))
    world.client.hset(names.counts(RUN), mapping={"stream_bytes": 0, "stream_entries": 0})

    report = end_test(world)

    assert report.differs
    assert success(world) is None
    reconcile(world.client, world.store, world.record, deep=True)
    assert world.runs.counts(RUN).queued == 10
    world.finish(range(10))
    assert drain(run_sink(world)) is Standing.COMPLETED
    world.check_counts()


@pytest.mark.parametrize("what", ["prompts", "retry", "seal"])
def test_what_comes_while_the_end_is_written_takes_it_back(ended: World, what: str) -> None:
    def come(point: str) -> None:
        if point != "end.written":
            return
        if what == "prompts":
            ended.accept(2)
        elif what == "retry":
            ended.retry([8])
        else:
            ended.seal()

    with watching(come):
        assert not end_test(ended).ended

    assert success(ended) is None


def test_a_producer_between_the_two_looks_is_seen(ended: World) -> None:
    # inputs/ first, then Redis: prompts that come in between make Redis' total the larger.
    store = ended.store
    ended.store = AcceptingStore(ended)  # type: ignore[assignment]

    report = end_test(ended)

    assert report.missing == ("2 prompts have not ended",)
    ended.store = store
    assert success(ended) is None


class AcceptingStore:
    """Lets a producer add two prompts as soon as `inputs/` was listed once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._store = world.store
        self._came = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        listed = list(self._store.list(prefix))
        if prefix == names.INPUTS and not self._came:
            self._came = True
            self._world.accept(2)
        return iter(listed)


@pytest.mark.parametrize("point", ["end.pending", "end.written"])
def test_killed_while_it_is_written_the_next_sink_decides(ended: World, point: str) -> None:
    with killed_at(point):
        end_test(ended)
    ended.client.delete(names.maintenance(RUN))

    assert drain(run_sink(ended)) is Standing.FAILED
    assert stands(ended.store)


def test_killed_before_the_second_look_an_untrue_success_is_taken_away(ended: World) -> None:
    with killed_at("end.written"):
        end_test(ended)
    ended.client.delete(names.maintenance(RUN))
    ended.retry([8])

    run_sink(ended).step()

    assert success(ended) is None


def test_a_retry_after_the_end_takes_success_away_and_its_end_brings_it_back(
    ended: World,
) -> None:
    sink = run_sink(ended)
    assert drain(sink) is Standing.FAILED
    # As `rq requeue` does through the claim: a new try, without anybody who knows the store.
    ended.retry([8])
    sink.step()
    assert success(ended) is None

    ended.finish([8], "failed", try_=2)
    assert drain(sink) is Standing.FAILED
    assert stands(ended.store)


def test_a_success_that_somebody_deleted_is_written_again(ended: World) -> None:
    drain(run_sink(ended))
    ended.store.delete(names.SUCCESS)

    assert drain(run_sink(ended)) is Standing.FAILED
    assert stands(ended.store)


def test_a_success_that_misses_inputs_is_void(ended: World) -> None:
    assert end_test(ended).ended
    assert stands(ended.store)
    ended.seal()
    assert not stands(ended.store)

    expire_lease(ended)
    assert drain(run_sink(ended)) is Standing.FAILED
    assert stands(ended.store)


def test_only_one_process_ends_a_run(ended: World) -> None:
    with Maintenance(ended.client, ended.record):
        assert try_to_end(ended.client, ended.store, ended.record) is None
        assert not revoke(ended.client, ended.store, ended.record)


def test_a_sink_that_looked_before_another_ended_the_run_leaves_its_success(ended: World) -> None:
    drain(run_sink(ended))
    ended.retry([8])
    slow = run_sink(ended)
    view = look(ended.client, ended.record, token=new_token())
    assert view is not None
    assert view.ended
    ended.finish([8], try_=2)
    expire_lease(ended)
    drain(run_sink(ended))
    assert stands(ended.store)

    # It has stored a batch since, which took its time, and may be told to stop after this step.
    slow._end(view)

    assert stands(ended.store)


def test_killed_while_success_is_revoked_it_is_revoked_again(ended: World) -> None:
    drain(run_sink(ended))
    ended.retry([8])
    with killed_at("end.revoked"):
        revoke(ended.client, ended.store, ended.record)
    ended.client.delete(names.maintenance(RUN))

    run_sink(ended).step()

    assert ended.client.hget(names.run(RUN), "ended") is None
