"""Bring Redis to what the store holds, after Redis restarted, was rewound, or was lost.

While the run's `reconciled` differs from Redis' run_id, finishes are accepted, claims and sink
reads wait. One process under the run-wide lease then goes these steps, each of which may be
repeated from the start after a death:

    pin      the model that the run began with, where the store knows it
    close    the first missing sequence of each partition: no sink of the past can add to it then
    teach    the ledger all manifests that this Redis does not have, by the reader function
    drop     stream entries whose (key, try) the store has, and all of a key it has completed; what
             remains there is taught where the ledger has lost it
    bodies   failed jobs get their requests back, from the failure rows
    marks    those that the store has and this Redis lacks
    inputs   accepted prompts that the ledger lacks are added and queued; of a cancelled run they
             are added alone, to end as cancelled (`common.cancelling`)
    mark     sequences, seal, stored figures, and `reconciled`, in one script

Finishes go on meanwhile: counters move only by the transitions that the scripts make, and entries
are dropped after their keys have been taught, when no other finish of theirs can come any more.

`deep` also looks for what the ledger calls ended without any record of it, in the store or
waiting: such keys are forgotten, and their prompts queued again. Only what `inputs/` has is ever
forgotten, and nothing where the output has no `run.json` (`common.emptied`).
"""

import time
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from common import connect, names
from common.cancelling import is_cancelled
from common.crashpoints import reached
from common.emptied import refuse_emptied
from common.errors import ConflictError, StateLostError, StoreDamagedError
from common.models import RunRecord
from common.quality import FLAGS
from common.queue.maintenance import Maintenance, TurnLostError
from common.queue.runs import PRIORITY_STEP_MS, being_forgotten, foreign_queue
from common.queue.scripts import call
from common.reconcile_steps import Report, Steps
from common.store import ObjectStore

if TYPE_CHECKING:
    import redis


def reconcile(
    client: "redis.Redis", store: ObjectStore, record: RunRecord, *, deep: bool = False
) -> Report | None:
    """Bring Redis to what the store holds, unless that is so already.

    Args:
        client: From `common.connect`.
        store: The run's output, probed.
        record: The run, which Redis must know; see `adopt_run`.
        deep: Do it in any case, over all that the store has, and look for lost records.

    Returns:
        None when another process is at it, or Redis restarted meanwhile: call again.

    Raises:
        StateLostError: Redis does not know the run.
        StoreUnusableError: Call again when the store works.
        StoreEmptiedError: The output is not the run's any more; nothing was changed.
    """
    try:
        with Maintenance(client, record) as turn:
            if turn.reconciled and not deep:
                return Report()
            refuse_emptied(store, record)
            return Steps(client, store, record, turn=turn).go(deep=deep or turn.deep)
    except TurnLostError:
        return None


def adopt_run(
    client: "redis.Redis",
    store: ObjectStore,
    record: RunRecord | None = None,
    *,
    window: int | None = None,
) -> RunRecord:
    """Make a run that Redis lacks from the store, and reconcile it. Lifts its tombstone.

    Args:
        client: From `common.connect`.
        store: The run's output, probed.
        record: What the caller knows of the run: another uid in the store is a conflict.
        window: Most requests of it in Redis; None takes what its last progress told.

    Raises:
        StateLostError: The store has no run either.
        ConflictError: The store holds another run, or Redis another of this name.
    """
    stored = stored_run(store)
    if stored is None:
        raise StateLostError(
            f"{store.url} holds no {names.RUN_JSON}: there is no run to go on with"
        )
    if record is not None:
        refuse_other_run(store, record)
    with connect.mapping_errors(client):
        stands = _make(client, store, stored, window=window)
    if stands.uid != stored.uid:
        raise ConflictError(
            f"Redis has a run {stored.run!r} with uid {stands.uid}, {store.url} one with uid "
            f"{stored.uid}: give another --run"
        )
    reached("adopt.made")
    while reconcile(client, store, stored) is None:
        time.sleep(1.0)  # another process is at it
    return stored


def stored_run(store: ObjectStore) -> RunRecord | None:
    """Read `run.json`; None where there is none."""
    data = store.get(names.RUN_JSON)
    try:
        return msgspec.json.decode(data, type=RunRecord) if data else None
    except msgspec.MsgspecError as error:
        raise StoreDamagedError(f"{store.url}/{names.RUN_JSON}: {error}") from error


def refuse_other_run(store: ObjectStore, record: RunRecord) -> None:
    """Raise ConflictError where the output is that of another run."""
    stored = stored_run(store)
    if stored is not None and stored.uid != record.uid:
        raise ConflictError(
            f"{store.url} holds run {stored.run!r} with uid {stored.uid}, not {record.run!r} with "
            f"uid {record.uid}: give another --output"
        )


def _make(
    client: "redis.Redis", store: ObjectStore, record: RunRecord, *, window: int | None
) -> RunRecord:
    try:
        created_ms = int(datetime.fromisoformat(record.created_at).timestamp() * 1000)
    except ValueError as error:
        raise StoreDamagedError(f"{store.url}/{names.RUN_JSON}: created_at: {error}") from error
    last = last_progress(store)
    reply = call(
        client,
        "reconcile_adopt",
        *(record.run, record.uid, msgspec.json.encode(record), record.bits, record.partitions),
        *(
            created_ms,
            created_ms - last.priority * PRIORITY_STEP_MS,
            last.priority,
            "1" if is_cancelled(store) else "",
            store.get(names.PINNED) or b"",
            window or last.window or "",
        ),
        *(part for counter in remembered(last).items() for part in counter),
    )
    if reply[0] == b"forgetting":
        raise being_forgotten(record.run)
    if reply[0] == b"foreign":
        raise foreign_queue(record.run)
    return msgspec.json.decode(reply[1], type=RunRecord)


class Progress(msgspec.Struct):
    """What no other object of the store tells; of the last minute of a run, about."""

    duplicates_dropped: int = 0
    retries: int = 0
    truncated: int = 0
    empty: int = 0
    repeating: int = 0
    same_answer: int = 0
    unparsed_reasoning: int = 0
    reasoning_cut: int = 0
    prompt_cut: int = 0
    clamped: int = 0
    elapsed_hours: float = 0.0
    priority: int = 0
    window: int | None = None


def last_progress(store: ObjectStore) -> Progress:
    """Read what progress.json said last; all zero where there is none."""
    try:
        return msgspec.json.decode(store.get(names.PROGRESS) or b"{}", type=Progress)
    except msgspec.MsgspecError:
        return Progress()


def remembered(last: Progress) -> dict[str, int]:
    """Give the counters (`Counts`) that must not begin at zero again."""
    return {
        "duplicates_dropped": last.duplicates_dropped,
        "retries": last.retries,
        **{flag: getattr(last, flag) for flag in FLAGS},
        "active_ms": round(last.elapsed_hours * 3_600_000),
    }
