"""Find the run that prompts are for, or make it: in Redis and in the store, with one uid.

`run.json` is written before Redis learns of the run: a kill in between leaves a run that the next
call adopts, and two producers with two Redis cannot make two runs of one output.
"""

import uuid
from typing import Any

import msgspec

from common import names
from common.crashpoints import reached
from common.errors import ConflictError, StoreUnusableError, UsageError
from common.models import Params, RunRecord
from common.queue import Runs
from common.queue.runs import refuse_change as refuse_other_record
from common.store import ObjectStore, open_store, same_output
from common.utc import utc_now
from producer.mending import lost_output
from producer.request import Asked


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run stands before anything is written.

    Attributes:
        record: None for a run that neither Redis nor the store knows.
        in_redis: Redis knows it.
        lost: What the output has lost of what Redis knows it had; empty as a rule.
    """

    record: RunRecord | None
    in_redis: bool
    store: ObjectStore
    lost: str = ""


def find_run(runs: Runs, run: str, asked: Asked) -> Joined:
    """Look for the run in Redis, then in the store, and compare it with what is asked.

    Raises:
        ConflictError: It exists with another value, was cancelled or forgotten, or the store holds
            another run.
        UsageError: It does not exist and the output is not said.
        StoreUnusableError: The output cannot be used.
    """
    record = runs.get(run)
    if record is not None:
        refuse_change(record, asked)
        store = open_store(record.output, record.endpoint_url)
        store.probe()
        stored = stored_record(store)
        _refuse_other_uid(store, stored, record)
        lost = lost_output(runs, store, record, has_record=stored is not None)
        return Joined(record=record, in_redis=True, store=store, lost=lost)
    if asked.output is None:
        raise UsageError(
            f"run {run!r} is new: say with --output where its results go (s3://BUCKET/PREFIX or a "
            "directory); later calls need not repeat it"
        )
    store = open_store(asked.output, asked.endpoint_url)
    store.probe()
    record = stored_record(store)
    if record is not None:
        if record.run != run:
            raise _belongs_to(store, record, run)
        refuse_change(record, asked)
    elif runs.tombstoned(run):
        raise ConflictError(
            f"run {run!r} was forgotten on purpose within the last day, and its late results are "
            "still being dropped: give another --run"
        )
    return Joined(record=record, in_redis=False, store=store)


def stored_record(store: ObjectStore) -> RunRecord | None:
    """Read `run.json`; None where there is none."""
    raw = store.get(names.RUN_JSON)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=RunRecord)
    except msgspec.DecodeError as error:
        raise ConflictError(
            f"{names.RUN_JSON} in {store.url} is not a run of Headrace: give another --output"
        ) from error


def new_record(run: str, asked: Asked, *, output: str, rows: int, version: str) -> RunRecord:
    """Describe a run that does not exist yet.

    Args:
        run: Its name.
        asked: What this call says.
        output: The store's own name of the output.
        rows: Counted prompts, by which the ledger is laid out.
        version: Of Headrace.
    """
    params = Params(
        max_tokens=asked.max_tokens,
        model=asked.model,
        sampling=asked.sampling,
        request_timeout_s=asked.request_timeout_s,
        attempts=asked.attempts or 3,
        format=asked.format or "jsonl.zst",
        keep_token_ids=asked.keep_token_ids or False,
    )
    return RunRecord(
        run=run,
        uid=uuid.uuid4().hex,
        # Decoded once, since constraints hold at decoding only.
        params=msgspec.json.decode(msgspec.json.encode(params), type=Params),
        output=output,
        created_at=utc_now(),
        partitions=asked.partitions or 1,
        bits=names.ledger_bits(rows),
        endpoint_url=asked.endpoint_url,
        headrace_version=version,
    )


def make_run(runs: Runs, store: ObjectStore, record: RunRecord, *, priority: int) -> RunRecord:
    """Write `run.json` where it is missing, then create the run in Redis where it is missing.

    Returns:
        What stands: `record`, or that of another producer who was first.

    Raises:
        ConflictError: It was made in between with other values.
    """
    if not store.put_if_absent(names.RUN_JSON, msgspec.json.encode(record)):
        stored = stored_record(store) or record
        if stored.run != record.run:
            raise _belongs_to(store, stored, record.run)
        # Made by another producer since we looked: joined if it is the same in all that counts.
        refuse_other_record(stored, record)
        record = stored
    reached("enqueue.recorded")
    created = runs.create(record, priority=priority)
    _refuse_other_uid(store, stored_record(store), created)
    return created


def _belongs_to(store: ObjectStore, stored: RunRecord, run: str) -> ConflictError:
    return ConflictError(
        f"{store.url} is the output of run {stored.run!r}, not of {run!r}: give another --output"
    )


def _refuse_other_uid(store: ObjectStore, stored: RunRecord | None, record: RunRecord) -> None:
    if stored is not None and stored.uid != record.uid:
        raise ConflictError(
            f"{store.url} holds another run {stored.run!r} (uid {stored.uid}, Redis has "
            f"{record.run!r} with uid {record.uid}): give another --run and --output"
        )


def refuse_change(record: RunRecord, asked: Asked) -> None:
    """Compare what this call says with what the run has.

    Raises:
        ConflictError: Naming the field and both values.
    """
    params = record.params
    pairs: list[tuple[str, Any, Any]] = [
        ("max_tokens", params.max_tokens, asked.max_tokens),
        ("model", params.model, asked.model),
        ("request_timeout", params.request_timeout_s, asked.request_timeout_s),
        ("attempts", params.attempts, asked.attempts),
        ("format", params.format, asked.format),
        ("keep_token_ids", params.keep_token_ids, asked.keep_token_ids),
        ("partitions", record.partitions, asked.partitions),
        ("endpoint_url", record.endpoint_url, asked.endpoint_url),
    ]
    pairs += [(name, params.sampling.get(name), value) for name, value in asked.sampling.items()]
    if asked.output is not None and not same_output(record.output, asked.output):
        # Only named, not made: a mistyped directory must not appear.
        pairs.append(("output", record.output, _named(asked)))
    for field, have, want in pairs:
        if want is not None and have != want:
            raise ConflictError(
                f"run {record.run!r} has {field} {_shown(have)}, this call says {_shown(want)}: "
                "a run keeps what it was created with; leave it out, or give another --run"
            )


def _named(asked: Asked) -> str:
    output = asked.output or ""
    try:
        return open_store(output, asked.endpoint_url, create=False).url
    except StoreUnusableError:
        # A directory that is not there is not the run's, which was opened before.
        return output


def _shown(value: Any) -> str:
    return "not set" if value is None else str(msgspec.json.encode(value), "utf-8")
