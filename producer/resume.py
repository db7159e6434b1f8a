"""Make a run go on: lift its pause, and put back whatever Redis, or RQ's tools, took from it.

    1. a run that Redis lacks is made from the store; one that it has is reconciled with it
    2. the pause is lifted
    3. store and Redis are counted against each other; where Redis has fewer, all is taught anew
    4. the audit: every unfinished prompt is listed, leased or parked, and has its request
    5. `--seal`: producers that died open are closed, and the run takes no more prompts

Every step may be repeated: the same call again does nothing more.
"""

import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import psutil

from common import catalog, connect, ending
from common.crashpoints import reached
from common.emptied import unaccepted
from common.errors import ConflictError, StateLostError
from common.marks.noting import note_of_run
from common.models import RunRecord
from common.queue import Runs, RunState
from common.queue.maintenance import recount
from common.reconcile import adopt_run, reconcile
from common.reconcile_steps import Report
from common.restore import audit_and_restore
from common.store import ObjectStore, open_store, same_output
from producer.accepted import Inputs
from producer.joining import stored_record
from producer.locate import Where, read_record, unknown
from producer.request import Say

if TYPE_CHECKING:
    import redis

AGAIN_S = 1.0


class Resumed(msgspec.Struct, kw_only=True):
    """What a call did; all zero and empty when there was nothing to do.

    Attributes:
        adopted: Redis did not know the run.
        lifted: The reason of the pause that was lifted.
        taught: Keys whose state came from the store.
        added: Prompts that were accepted and not in Redis.
        forgotten: Prompts that had ended without a result anywhere; they are queued again.
        unaccepted: Prompts that had ended, and that the output lacks in every way: see `notes`.
        relisted: Jobs that were in no list.
        restored: Jobs that had lost their request.
        cancelled: Jobs that somebody cancelled in RQ, which have ended now.
        closed: Producers that were closed.
        sealed: Whether the run takes no more prompts.
        open_producers: What is known of producers that are open.
        notes: What keeps the run from ending, and what to do; empty as a rule.
    """

    run: str
    output: str
    adopted: bool = False
    lifted: str = ""
    taught: int = 0
    added: int = 0
    forgotten: int = 0
    unaccepted: int = 0
    relisted: int = 0
    restored: int = 0
    cancelled: int = 0
    closed: int = 0
    sealed: bool = False
    open_producers: list[str] = []
    notes: list[str] = []


class _Producer(msgspec.Struct):
    """What a producer says of itself when it opens."""

    files: list[str] = []
    host: str = ""
    pid: int = 0


def resume(client: "redis.Redis", where: Where, *, seal: bool, say: Say) -> Resumed:
    """Carry out one call; see the module.

    Args:
        client: From `common.connect`.
        where: The run, and its output where Redis has lost it.
        seal: Close open producers, except one that is seen to be alive.
        say: Tells people what takes its time.

    Raises:
        StateLostError: Nobody knows the run.
        ConflictError: It was cancelled, or a producer that is to be closed is alive.
    """
    runs = Runs(client, where=connect.address_of(client))
    record, store, adopted = find_or_adopt(client, runs, where, say=say)
    told = Resumed(run=record.run, output=store.url, adopted=adopted)
    state = _state(runs, record.run)
    if state.cancelled:
        raise ConflictError(
            f"run {record.run!r} was cancelled and does not go on: enqueue its file as another "
            "--run"
        )
    if not adopted:
        _note(told, _until_done(lambda: reconcile(client, store, record)))
    if state.paused is not None:
        runs.resume(record.run)
        told.lifted = state.paused
        reached("resume.lifted")
        note_of_run(client, record.run, "resumed")
    _put_back(client, store, record, told, say=say)
    reached("resume.compared")
    _audit(client, store, record, told)
    reached("resume.audited")
    if seal:
        told.closed = _seal(runs, Inputs(runs, store, record.run, say=say), record.run)
    state = _state(runs, record.run)
    told.sealed = state.sealed
    told.open_producers = [_named(about) for about in state.open_producers.values()]
    return told


def find_or_adopt(
    client: "redis.Redis", runs: Runs, where: Where, *, say: Say
) -> tuple[RunRecord, ObjectStore, bool]:
    """Find the run, and make it from the store where Redis lacks it."""
    record = runs.get(where.run)
    if record is not None:
        _refuse_other_output(record, where)
        store = open_store(record.output, record.endpoint_url)
        store.probe()
        return read_record(store, where.run, record)[0], store, False
    output, endpoint_url = where.elsewhere()
    if not output:
        raise StateLostError(unknown(where.run, connect.address_of(client), known=runs.names()))
    store = open_store(output, endpoint_url, create=False)
    record, _ = read_record(store, where.run)
    store.probe()
    say(f"Redis does not know run {record.run!r}: reading {store.url}")
    return adopt_run(client, store, record), store, True


def _refuse_other_output(record: RunRecord, where: Where) -> None:
    """See that `--output` names the output that the run has, before anything is done.

    Raises:
        ConflictError: It is another run's, or another place.
    """
    if where.output is None:
        return
    store = open_store(where.output, where.endpoint_url, create=False)
    stored = stored_record(store)
    if stored is not None and (stored.run, stored.uid) != (record.run, record.uid):
        raise ConflictError(
            f"{store.url} is the output of run {stored.run!r} with uid {stored.uid}, and Redis "
            f"has run {record.run!r} with uid {record.uid} and output {record.output}: leave "
            "--output out, or name the right one"
        )
    if not same_output(store.url, record.output):
        raise ConflictError(
            f"run {record.run!r} with uid {record.uid} has the output {record.output}, and not "
            f"{store.url}: leave --output out"
        )


def _put_back(
    client: "redis.Redis", store: ObjectStore, record: RunRecord, told: Resumed, *, say: Say
) -> None:
    """Count store and Redis against each other, and teach Redis anew where it has lost something.

    `inputs/` is listed first, since prompts are accepted before Redis has them; results are read
    last, since those that had ended are in a stream, or come into the store meanwhile.
    """
    lost_keys = recount(client, record)
    listing = catalog.list_inputs(store)
    counts = Runs(client, where=connect.address_of(client)).counts(record.run)
    tally = ending.count(store, catalog.manifests_of(store, record.uid), listing)
    in_redis = counts.completed + counts.failed + counts.cancelled
    in_store = tally.completed + tally.failed + tally.cancelled
    fits = tally.accepted <= counts.total and in_redis <= in_store + counts.stream_entries
    if fits and not lost_keys:
        return
    say("Redis and the store differ: comparing every prompt")
    report = _until_done(lambda: reconcile(client, store, record, deep=True))
    _note(told, report)
    told.unaccepted = report.unaccepted
    if report.unaccepted:
        told.notes.append(unaccepted(store, record, report.unaccepted))


def _note(told: Resumed, report: Report) -> None:
    told.taught += report.taught
    told.added += report.added
    told.forgotten += report.forgotten


def _until_done(call: Callable[[], Report | None]) -> Report:
    """Repeat while another process is at it."""
    while True:
        report = call()
        if report is not None:
            return report
        time.sleep(AGAIN_S)


def _audit(client: "redis.Redis", store: ObjectStore, record: RunRecord, told: Resumed) -> None:
    report = audit_and_restore(client, store, record)
    told.relisted, told.cancelled = report.relisted, report.cancelled
    told.restored = report.restored


# --- Producers that died open --------------------------------------------------------------------


def _seal(runs: Runs, inputs: Inputs, run: str) -> int:
    """Write the last word that a dead producer could not say, then close it; returns how many."""
    state = _state(runs, run)
    if state.sealed:
        return 0
    for about in state.open_producers.values():
        if _lives(about):
            raise ConflictError(
                f"the producer {_named(about)} is at work: let it end, it seals the run itself"
            )
    inputs.seal("producer resume --seal", sealed=True, rows=0)
    reached("resume.sealed")
    # One call more than there are: where none is open, the last one said that more would come.
    for source in [*state.open_producers, ""]:
        runs.close_producer(run, source, sealed=True)
    return len(state.open_producers)


def _lives(about: str) -> bool:
    producer = _read(about)
    return producer.host == socket.gethostname() and psutil.pid_exists(producer.pid)


def _named(about: str) -> str:
    producer = _read(about)
    return f"of {', '.join(producer.files)} (process {producer.pid} on {producer.host})"


def _read(about: str) -> _Producer:
    try:
        return msgspec.json.decode(about, type=_Producer)
    except msgspec.MsgspecError:
        return _Producer()


def _state(runs: Runs, run: str) -> RunState:
    state = runs.state(run)
    if state is None:
        raise StateLostError(f"run {run!r} has gone from Redis meanwhile: call this again")
    return state
