"""`producer cancel`: end a run for good, what is not done of it as `cancelled`.

    find      the run, in Redis, or in the store where Redis lacks it
    mark      the store first: from here on no wipe and no rewind of Redis revives the run
    end       what waits, then what is in flight (`common.cancelling`), until all has ended
    leave     to a sink, what cannot end yet: in flight for longer, or no room for its records

Killed anywhere, the same call again goes on; and so does a sink, without it.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

from common import connect, ending
from common.cancelling import Canceller, is_cancelled, mark_store
from common.crashpoints import reached
from common.errors import RedisUnusableError, StateLostError
from common.marks.noting import note_of_run
from common.models import Counts, RunRecord
from common.queue import Runs
from common.queue.cancels import Cancels
from common.queue.sinkview import sink_state
from common.reconcile import adopt_run, reconcile
from common.store import ObjectStore, open_store
from producer.locate import Where, connected, open_output, read_record, unknown
from producer.meter import MeterFor
from producer.request import Say

if TYPE_CHECKING:
    import redis

STEP_S = 0.5
AGAIN_S = 0.5

Left = Literal["", "in_flight", "no_room", "lost"]


class Cancelled(msgspec.Struct, kw_only=True):
    """What a call did, and how the run stands then.

    Attributes:
        already: It had been cancelled before this call.
        finished: Every prompt had ended by itself: nothing was changed.
        ended: Prompts that this call ended as cancelled.
        left: Why some have not ended yet: in_flight; no_room, their records wait for a sink; lost,
            `inputs/` lacks them. Empty where all have ended.
        waiting: Records that wait for a sink.
        sinks: How many sinks serve the run.
    """

    run: str
    output: str
    already: bool = False
    finished: bool = False
    ended: int = 0
    total: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    in_flight: int = 0
    queued: int = 0
    left: Left = ""
    waiting: int = 0
    sinks: int = 0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What would be cancelled.

    Attributes:
        counts: None where Redis does not know the run.
        finished: Every prompt has ended and none will come.
        already: It is cancelled.
    """

    record: RunRecord
    store: ObjectStore
    counts: Counts | None
    finished: bool
    already: bool


def plan(client: "redis.Redis", where: Where) -> Plan:
    """Find the run; changes nothing.

    Raises:
        StateLostError: Nobody knows the run.
        StoreUnusableError: Its output cannot be used.
    """
    runs = Runs(client, where=connect.address_of(client))
    record = runs.get(where.run)
    if record is None:
        output, endpoint_url = where.elsewhere()
        if not output:
            raise StateLostError(
                unknown(where.run, connect.address_of(client), known=runs.names())
            )
        record, store = read_record(open_output(output, endpoint_url), where.run)
        store.probe()
        finished = ending.stands(store)
        return _plan(record, store, None, finished=finished)
    store = open_store(record.output, record.endpoint_url)
    store.probe()
    read_record(store, where.run, record)
    state, counts = runs.state(where.run), runs.counts(where.run)
    sealed = state is not None and state.sealed and bool(counts.total)
    finished = sealed and not counts.queued + counts.in_flight
    return _plan(record, store, counts, finished=finished)


def cancel(
    client: "redis.Redis", asked: Plan, *, wait_s: float, meter: MeterFor, say: Say
) -> Cancelled:
    """Carry it out; see the module.

    Args:
        client: From `common.connect`.
        asked: From `plan`.
        wait_s: How long to wait for what is in flight, and for room.
        meter: Shows how far it is.
        say: Tells people what takes its time.
    """
    record, store = asked.record, asked.store
    told = Cancelled(run=record.run, output=store.url)
    told.already, told.finished = asked.already, asked.finished and not asked.already
    runs = Runs(client, where=connect.address_of(client))
    if not told.finished:
        mark_store(store, record)
        if asked.counts is None:
            say(f"Redis does not know run {record.run!r}: reading {store.url}")
            adopt_run(client, store, record)
        Cancels(client, record).mark()
        reached("cancel.told")
        if not told.already:
            note_of_run(client, record.run, "cancelled")
        with meter("cancelling", _unfinished(runs.counts(record.run))) as bar:
            told.left = _settle(client, asked, told, wait_s=wait_s, show=bar.show)
    _count(client, record, told)
    return told


def mark_without_redis(where: Where, error: RedisUnusableError) -> RedisUnusableError:
    """Mark the store all the same where the output is known; returns what to raise."""
    output, endpoint_url = where.elsewhere()
    if not output:
        return RedisUnusableError(
            f"{error} Nothing was changed; with --output URL the run is marked in its store all "
            "the same"
        )
    record, store = read_record(open_output(output, endpoint_url), where.run)
    if ending.stands(store):
        return RedisUnusableError(
            f"{error} {store.url} says that the run has ended: nothing was changed"
        )
    store.probe()
    mark_store(store, record)
    return RedisUnusableError(
        f"{error} The run is marked as cancelled in {store.url}: its sink sees that within a "
        "minute, and the same call again ends its prompts at once"
    )


def connected_or_marked(where: Where, *, marks: bool) -> "redis.Redis":
    """Connect; where Redis is away, mark the store if that was asked for without a question."""
    try:
        return connected(where.redis, writes=True)
    except RedisUnusableError as error:
        raise (mark_without_redis(where, error) if marks else error) from error


def _plan(record: RunRecord, store: ObjectStore, counts: Counts | None, *, finished: bool) -> Plan:
    return Plan(
        record=record,
        store=store,
        counts=counts,
        finished=finished,
        already=is_cancelled(store),
    )


def _settle(
    client: "redis.Redis",
    asked: Plan,
    told: Cancelled,
    *,
    wait_s: float,
    show: Callable[[int], None],
) -> Left:
    """End what is left until nothing is, or only what takes longer than `wait_s`."""
    record, store = asked.record, asked.store
    canceller = Canceller(client, store, record)
    before, until_s = 0, time.monotonic() + wait_s
    while True:
        word = canceller.step(limit_s=STEP_S)
        show(told.ended + canceller.ended)
        if canceller.ended > before:
            before, until_s = canceller.ended, time.monotonic() + wait_s
        if word == "unreconciled":
            while reconcile(client, store, record) is None:
                time.sleep(AGAIN_S)
            told.ended += canceller.ended
            canceller, before = Canceller(client, store, record), 0
        elif word != "on":
            left = _why(word, canceller)
            no_sink = word == "full" and not sink_state(client, record).sinks
            if not left or left == "lost" or no_sink or time.monotonic() >= until_s:
                told.ended += canceller.ended
                return left
            time.sleep(AGAIN_S)


def _why(word: str, canceller: Canceller) -> Left:
    if word == "done":
        return ""
    if word == "full":
        return "no_room"
    return "in_flight" if canceller.held or not canceller.bare else "lost"


def _count(client: "redis.Redis", record: RunRecord, told: Cancelled) -> None:
    runs = Runs(client, where=connect.address_of(client))
    if runs.get(record.run) is None:
        return
    counts = runs.counts(record.run)
    told.total, told.completed, told.failed = counts.total, counts.completed, counts.failed
    told.cancelled, told.in_flight, told.queued = counts.cancelled, counts.in_flight, counts.queued
    told.waiting, told.sinks = counts.stream_entries, sink_state(client, record).sinks


def _unfinished(counts: Counts) -> int:
    return counts.queued + counts.in_flight
