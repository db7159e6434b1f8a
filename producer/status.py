"""Say how a run stands: by Redis, or by the store where Redis has lost the run.

Redis knows the run            its figures; where Redis restarted meanwhile, the store is asked
                               whether it has more
Redis does not, the store does `state_lost`: what the store has, and how to bring it back
neither                        an error that says what to try
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec

from common import catalog, connect, ending, manifests, names, snapshot
from common.cancelling import is_cancelled
from common.errors import HeadraceError, RedisUnusableError, StateLostError
from common.figures import ENDED, exit_code, progress
from common.models import Counts, RunRecord
from common.queue import Groups, Runs
from common.reconcile import last_progress, remembered
from common.standing import Standing
from common.store import ObjectStore
from producer.joining import stored_record
from producer.locate import Where, open_output, read_record, unknown

if TYPE_CHECKING:
    import redis


def figures_of(client: "redis.Redis", where: Where) -> dict[str, Any]:
    """Give the figures of one run.

    Args:
        client: From `common.connect`.
        where: The run, and its output where Redis may have lost it.

    Raises:
        StateLostError: Nobody knows the run.
        BackendError: Redis, or an output that was named, cannot be reached.
    """
    read = snapshot.read(client, where.run)
    if read is None:
        return lost_figures(*_in_store(client, where))
    if read.standing.unreconciled or where.output is not None:
        read = _losing(read, _lost(client, read.record, where))
    return _checked(read)


def figures_of_all(client: "redis.Redis") -> list[dict[str, Any]]:
    """Give the figures of every run that Redis knows, in claim order."""
    where = connect.address_of(client)
    groups = Groups(client, where=where).fresh()
    found = [snapshot.read(client, name, groups=groups) for name in Runs(client).names()]
    return [_checked(read) for read in found if read is not None]


def ended_with(figures: dict[str, Any]) -> int:
    """Give the exit code that says how a run stands."""
    return exit_code(figures["status"], figures["unusable_sec"])


def _in_store(client: "redis.Redis", where: Where) -> tuple[RunRecord, ObjectStore]:
    """Find a run that Redis lacks."""
    output, endpoint_url = where.elsewhere()
    if not output:
        address = connect.address_of(client)
        known = Runs(client, where=address).names()
        raise StateLostError(unknown(where.run, address, known=known))
    return read_record(open_output(output, endpoint_url), where.run)


def lost_figures(record: RunRecord, store: ObjectStore) -> dict[str, Any]:
    """Give the figures of a run that Redis has lost, by its store alone; reads `keys/`."""
    every = catalog.manifests_of(store, record.uid)
    listing = catalog.list_inputs(store)
    tally = ending.count(store, every, listing)
    ended = tally.completed + tally.failed + tally.cancelled
    counts = Counts(
        total=tally.accepted,
        completed=tally.completed,
        failed=tally.failed,
        cancelled=tally.cancelled,
        queued=tally.accepted - ended,
        input_tokens=tally.input_tokens,
        output_tokens=tally.output_tokens,
        s3_uploaded=sum(map(manifests.rows_of, every)),
        s3_bytes=sum(map(manifests.bytes_of, every)),
        **remembered(last_progress(store)),
    )
    cancelled = is_cancelled(store)
    lost = (
        f"Redis does not know the run: `producer resume {record.run} --output {store.url}`, or "
        "the same enqueue again, brings it back"
    )
    if cancelled:
        # Of a cancelled run nothing needs to come back, unless some prompt has no end yet.
        again = f"`producer cancel {record.run} --output {store.url}` ends what is left of it"
        lost = f"Redis does not know the run, which was cancelled: {again}" * bool(counts.queued)
    sealed = catalog.sealed(store, listing)
    standing = Standing(lost=lost, sealed=sealed, cancelled=cancelled)
    return {
        "run": record.run,
        "output": store.url,
        "endpoint_url": record.endpoint_url,
        **progress(counts, standing=standing, now_ms=int(time.time() * 1000)),
    }


# --- What Redis or the store has lost -----------------------------------------------------------


def _losing(read: snapshot.Snapshot, lost: str) -> snapshot.Snapshot:
    standing = msgspec.structs.replace(read.standing, lost=lost)
    return msgspec.structs.replace(read, standing=standing)


def _checked(read: snapshot.Snapshot) -> dict[str, Any]:
    """Give the figures; of a run that has ended, only if the store still has what it should."""
    figures = read.figures()
    if figures["status"] not in ENDED:
        return figures
    lost = _emptied(read.record, cancelled=figures["status"] == "cancelled")
    return _losing(read, lost).figures() if lost else figures


def _emptied(record: RunRecord, *, cancelled: bool) -> str:
    """Say that the store no longer holds a run that has ended; empty where it does, or is away."""
    remedy = (
        f"put the objects back and call `producer resume {record.run}`, or call the same "
        f"`producer enqueue FILE --run {record.run}` again, which queues what was lost"
    )
    try:
        store = open_output(record.output, record.endpoint_url)
        stored = stored_record(store)
        ended = cancelled or store.get(names.SUCCESS) is not None
    except HeadraceError:
        if not _is_missing_here(record.output):
            return ""
        stored, ended = None, False
    if stored is None:
        return f"{record.output} holds no {names.RUN_JSON}, so the results are gone: {remedy}"
    if stored.uid != record.uid:
        return (
            f"{record.output} holds run {stored.run} with uid {stored.uid}, and Redis has "
            f"{record.run} with uid {record.uid}: put the run's own output back, or enqueue the "
            "files again with another --run and --output"
        )
    if not ended:
        return f"{record.output} holds no {names.SUCCESS}, which Redis says was written: {remedy}"
    return ""


def _is_missing_here(output: str) -> bool:
    """Tell a directory that was removed from one that this machine never saw."""
    if output.startswith("s3://"):
        return False
    root = Path(unquote(output.removeprefix("file://")))
    return root.parent.is_dir() and not root.exists()


def _lost(client: "redis.Redis", record: RunRecord, where: Where) -> str:
    """Say what the store has and Redis lacks; empty where that is nothing, or it is away."""
    try:
        store = open_output(record.output, record.endpoint_url)
        more = _more_in_store(client, store, record)
    except RedisUnusableError:
        raise
    except HeadraceError:
        # The figures of Redis are worth more than none.
        if where.output is not None:
            raise
        return ""
    if not more:
        return ""
    return f"Redis has lost {more}: a sink, or `producer resume {record.run}`, puts it back"


def _more_in_store(client: "redis.Redis", store: ObjectStore, record: RunRecord) -> str:
    """Compare by names alone: sequences of results and of `inputs/`."""
    listed = manifests.listed(store)
    inputs_seq = catalog.list_inputs(store).last_seq
    partitions = range(record.partitions)
    with connect.mapping_errors(client), client.pipeline(transaction=True) as pipe:
        pipe.hget(names.run(record.run), "inputs_seq")
        for partition in partitions:
            pipe.hmget(names.sink(record.run, partition), ["seq", "intent"])
        known_inputs, *sinks = pipe.execute()
    batches = 0
    for partition, (seq, intent) in zip(partitions, sinks, strict=True):
        # A sink that is at it has written a manifest which Redis learns of in the next instant.
        known = int(seq or 0) + bool(intent)
        batches += sum(part == partition and stored > known for part, stored in listed)
    parts = [f"{batches:,} batches of results"] if batches else []
    if inputs_seq > int(known_inputs or 0):
        parts.append("accepted prompts")
    return " and ".join(parts)
