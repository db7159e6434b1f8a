"""Keys of a run that Redis lost one by one (eviction, a DEL): `producer resume` mends it.

B67: no policy that evicts is accepted; what one has taken before it was noticed is put back.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from common import names
from common.models import Outcome
from common.queue.maintenance import recount
from common.reconcile import reconcile
from common.store.directory import DirectoryStore
from producer.locate import Where
from producer.resume import resume
from tests.support.run_world import RUN, World
from tests.support.sinks import drain, run_sink

STORED, WAITING, HELD, ALL = range(4), range(4, 8), range(8, 10), range(14)


def bucket_of(world: World, number: int) -> str:
    return names.ledger_bucket(RUN, world.key(number), world.record.bits)


LOST: dict[str, Callable[[World], list[str]]] = {
    "the list of runs": lambda _: [names.RUNS],
    "the run": lambda _: [names.run(RUN)],
    "the counters": lambda _: [names.counts(RUN)],
    "the leases": lambda _: [names.leases(RUN)],
    "the stream": lambda _: [names.results(RUN, 0)],
    "the sink's place": lambda _: [names.sink(RUN, 0)],
    "the stream and its sink's place": lambda _: [names.results(RUN, 0), names.sink(RUN, 0)],
    "the queue": lambda _: [names.rq_queue(RUN)],
    "a stored prompt of the ledger": lambda world: [bucket_of(world, 0)],
    "a waiting result's prompt of the ledger": lambda world: [bucket_of(world, 4)],
    "a prompt in flight of the ledger": lambda world: [bucket_of(world, 8)],
    "a queued prompt of the ledger": lambda world: [bucket_of(world, 13)],
    "the whole ledger": lambda world: [bucket_of(world, number) for number in ALL],
    "the ledger and the counters": lambda world: [
        names.counts(RUN),
        *(bucket_of(world, number) for number in ALL),
    ],
}


@pytest.mark.parametrize("what", LOST)
def test_whatever_key_is_lost_each_prompt_ends_once_after_a_resume(
    redis_client: "redis.Redis", tmp_path: Path, what: str
) -> None:
    world = World(redis_client, DirectoryStore(tmp_path / "out"), prompts=len(ALL))
    world.finish(STORED)
    sink = run_sink(world, rows=len(STORED))
    sink.step()
    sink.release()
    world.finish(WAITING)
    redis_client.delete(*LOST[what](world))
    # Workers keep what Redis does not take, and send it again.
    kept = dict(zip(HELD, world.finish(HELD), strict=True))

    resume(
        redis_client, Where(run=RUN, output=world.store.url), seal=False, say=lambda _text: None
    )

    assert redis_client.zscore(names.RUNS, RUN) is not None
    counts = world.runs.counts(RUN)
    assert counts.total == len(ALL)
    assert counts.queued + counts.in_flight + counts.completed == counts.total
    assert set(kept.values()) <= {"ok", "unknown", "untaught"}
    world.finish([number for number, word in kept.items() if word != "ok"])
    world.finish(number for number in ALL if is_queued(world, number))
    drain(run_sink(world))
    world.check_store()
    assert len(world.current()) == len(ALL)
    counts = world.runs.counts(RUN)
    assert (counts.total, counts.completed, counts.queued) == (len(ALL), len(ALL), 0)
    assert (counts.stream_entries, counts.stream_bytes) == (0, 0)


@pytest.mark.parametrize("outcome", ["completed", "failed"])
@pytest.mark.parametrize("again", [(), (0, 1)], ids=["lost", "lost and queued again"])
def test_what_waits_for_a_sink_is_not_queued_again_though_the_ledger_lost_it(
    redis_client: "redis.Redis", tmp_path: Path, outcome: Outcome, again: tuple[int, ...]
) -> None:
    world = World(redis_client, DirectoryStore(tmp_path / "out"), prompts=8, partitions=2)
    world.finish(range(6), outcome)
    redis_client.delete(*(bucket_of(world, number) for number in range(4)))
    world.queue(again)
    recount(redis_client, world.record)

    redis_client.hdel(names.run(RUN), "reconciled")  # As after a restart.
    assert reconcile(redis_client, world.store, world.record) is not None

    counts = world.runs.counts(RUN)
    assert (counts.total, counts.queued, getattr(counts, outcome)) == (8, 2, 6)
    failed = 6 if outcome == "failed" else 0
    assert redis_client.zcard(names.rq_failed(RUN)) == failed
    assert world.finish(range(6), outcome) == ["duplicate"] * 6
    assert world.finish([6, 7]) == ["ok"] * 2
    drain(run_sink(world))
    assert len(world.records()) == len(world.current()) == 8
    world.check_store()


def test_counting_a_run_that_has_lost_nothing_changes_nothing(
    redis_client: "redis.Redis", tmp_path: Path
) -> None:
    world = World(redis_client, DirectoryStore(tmp_path / "out"), prompts=0)
    assert not recount(redis_client, world.record)
    world.accept(10)
    world.finish(range(4))
    world.finish([5], "failed")
    before = redis_client.hgetall(names.counts(RUN))

    assert not recount(redis_client, world.record)

    assert redis_client.hgetall(names.counts(RUN)) == before


def test_lost_counters_are_those_that_were_lost(
    redis_client: "redis.Redis", tmp_path: Path
) -> None:
    world = World(redis_client, DirectoryStore(tmp_path / "out"), prompts=30, window=12)
    world.finish(range(4))
    world.finish([5], "failed")
    before = world.runs.counts(RUN)
    assert before.unfed > 0
    redis_client.delete(names.counts(RUN))
    world.finish([6])

    assert recount(redis_client, world.record)
    assert not recount(redis_client, world.record)

    after = world.runs.counts(RUN)
    assert (after.total, after.completed, after.failed) == (
        30,
        before.completed + 1,
        before.failed,
    )
    assert after.unfed == before.unfed
    assert after.stream_entries == world.waiting() == 6
    assert after.stream_bytes > before.stream_bytes


def is_queued(world: World, number: int) -> bool:
    """Whether the ledger wants it: a worker asks for nothing else."""
    (entry,) = world.ledger.lookup([world.key(number)])
    return entry is not None and entry.state == "queued"
