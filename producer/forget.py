"""`producer forget`: take one run out of Redis, and leave its store as it is.

    look      whoever works on it, and what of it is not in the store yet, stands in the way
    begin     one step: the run is nobody's any more; a tombstone of 24 h drops late results
    sweep     its ledger and jobs slice by slice, then every other key; nothing is searched for

Killed anywhere after the begin, the same call again goes on. Until then a run of that name can be
neither made nor brought back.
"""

import socket
from typing import TYPE_CHECKING

import msgspec
import psutil

from common import connect
from common.advice import count_of
from common.crashpoints import reached
from common.errors import ConflictError, StateLostError
from common.models import Counts, RunRecord
from common.queue import Groups, Runs
from common.queue.forgets import ForgetLook, Forgets, Left
from producer.locate import unknown
from producer.meter import MeterFor

if TYPE_CHECKING:
    import redis


class Forgotten(msgspec.Struct, kw_only=True):
    """What a call did.

    Attributes:
        output: Where the run's results are, empty where the call went on with an earlier one.
        already: The run had been forgotten before, and nothing was left.
        prompts: How many Redis knew of.
        lost_results: Results that were not in the store; 0 unless that was asked for.
    """

    run: str
    output: str = ""
    already: bool = False
    prompts: int = 0
    lost_results: int = 0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What would be forgotten; `record` is None where an earlier call began it."""

    run: str
    record: RunRecord | None
    counts: Counts
    look: ForgetLook
    forgotten: bool


class _Producer(msgspec.Struct):
    """What a producer says of itself when it opens."""

    files: list[str] = []
    host: str = ""
    pid: int = 0


def plan(client: "redis.Redis", run: str, *, lose_results: bool) -> Plan:
    """See what stands in the way; changes nothing.

    Raises:
        StateLostError: Redis does not know the run.
        ConflictError: Somebody works on it, or it has results that only Redis has.
    """
    where = connect.address_of(client)
    runs = Runs(client, where=where)
    look = Forgets(client, run).look()
    record = runs.get(run)
    forgotten = record is None and look.left is None and runs.tombstoned(run)
    if record is None and look.left is None and not forgotten:
        raise StateLostError(unknown(run, where, known=runs.names()))
    counts = runs.counts(run)
    if record is not None:
        _refuse_at_work(client, run, look)
        _refuse_open_producer(runs, run)
        if look.waiting and not lose_results:
            raise _results_wait(run, look.waiting)
    return Plan(run=run, record=record, counts=counts, look=look, forgotten=forgotten)


def forget(
    client: "redis.Redis", asked: Plan, *, lose_results: bool, meter: MeterFor
) -> Forgotten:
    """Carry it out; see the module.

    Args:
        client: From `common.connect`.
        asked: From `plan`.
        lose_results: Also results that are not in the store.
        meter: Shows how far it is.

    Raises:
        ConflictError: Somebody has begun to work on it meanwhile.
    """
    told = Forgotten(run=asked.run, already=asked.forgotten)
    if asked.forgotten:
        return told
    forgets, left = Forgets(client, asked.run), asked.look.left
    if asked.record is not None:
        told.output = asked.record.output
        told.lost_results = asked.look.waiting
        left = _begun(client, forgets, asked.record, lose_results=lose_results)
    if left is None:
        raise StateLostError(f"run {asked.run!r} has gone from Redis meanwhile")
    reached("forget.begun")
    with meter("forgetting", asked.counts.total or None) as bar:
        for _, swept in forgets.sweep(left, total=asked.counts.total):
            told.prompts += swept
            bar.show(told.prompts)
    return told


def _begun(
    client: "redis.Redis", forgets: Forgets, record: RunRecord, *, lose_results: bool
) -> Left:
    left = forgets.begin(record.uid, lose_results=lose_results)
    if left == "leased":
        _refuse_at_work(client, record.run, forgets.look())
    if left == "waiting":
        raise _results_wait(record.run, forgets.look().waiting)
    if isinstance(left, str):
        raise ConflictError(
            f"run {record.run!r} was changed while this call looked at it: call it again"
        )
    return left


def _refuse_at_work(client: "redis.Redis", run: str, look: ForgetLook) -> None:
    if not look.live:
        return
    groups = {
        figures.epoch: figures.group
        for figures in Groups(client, where=connect.address_of(client)).fresh()
    }
    held_by = sorted({groups.get(epoch, "one that says nothing") for epoch in look.holders})
    raise ConflictError(
        f"{count_of(look.live, 'prompt')} of run {run!r} {'is' if look.live == 1 else 'are'} at "
        f"work (worker group {', '.join(held_by)}): `producer pause {run}` and wait, or `producer "
        f"cancel {run}`, then call this again; the lease of a process that died runs out in a "
        "minute"
    )


def _refuse_open_producer(runs: Runs, run: str) -> None:
    state = runs.state(run)
    for about in state.open_producers.values() if state else ():
        try:
            producer = msgspec.json.decode(about, type=_Producer)
        except msgspec.MsgspecError:
            producer = _Producer()
        if producer.host == socket.gethostname() and not psutil.pid_exists(producer.pid):
            continue
        raise ConflictError(
            f"the producer of {', '.join(producer.files)} (process {producer.pid} on "
            f"{producer.host}) has begun and not ended: let it end, or, if it died, close it with "
            f"`producer resume {run} --seal`"
        )


def _results_wait(run: str, waiting: int) -> ConflictError:
    return ConflictError(
        f"{count_of(waiting, 'result')} of run {run!r} {'is' if waiting == 1 else 'are'} not in "
        "the store yet: `workers sink` stores them; --lose-results forgets them all the same"
    )
