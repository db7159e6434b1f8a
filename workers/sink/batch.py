"""Decide when a partition's entries are due, and make a batch of them. Pure.

Nothing waits in the sink's memory: what is not yet due stays in Redis, where the stream is, and is
read when it is. So a sink that dies loses nothing that it would have to fetch again, the age of a
batch survives it, and its memory is one batch whatever the number of runs and partitions.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from common import names, object_names
from common.models import Entry, Manifest, Outcome, PartFile, Record
from common.reader import key_line
from common.store.frames import compress, digest_name
from common.store.parquet import SUFFIX, to_parquet

ShardFormat = Literal["jsonl.zst", "parquet"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """When a batch is due, whichever comes first.

    Attributes:
        bytes: Raw bytes of rows.
        rows: Entries.
        seconds: Age of the oldest entry.
        first_seconds: The same for a partition's first batch, so that a new run soon shows that
            all works.
    """

    bytes: int = 64 << 20
    rows: int = 20_000
    seconds: float = 600.0
    first_seconds: float = 60.0


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """What waits in one partition's stream.

    Attributes:
        entries: How many.
        first: Id of the oldest, empty without one; it begins with the instant of its adding.
        bytes: About how many; exact where the run has one partition.
        closed: Last closed sequence; 0 before the first batch.
    """

    entries: int
    first: str
    bytes: int
    closed: int


def due(waiting: Waiting, limits: Limits, *, now_ms: int, flush: bool) -> bool:
    """Tell whether a batch should be stored now.

    Args:
        waiting: What there is.
        limits: When it is due.
        now_ms: Redis TIME, the clock that entry ids are made of.
        flush: Whatever there is is due: the run has ended, or this sink is to stop.
    """
    if not waiting.entries:
        return False
    if flush or waiting.entries >= limits.rows or waiting.bytes >= limits.bytes:
        return True
    limit_s = limits.seconds if waiting.closed else min(limits.seconds, limits.first_seconds)
    return now_ms - added_ms(waiting.first) >= limit_s * 1000


def added_ms(entry_id: str) -> int:
    """Read the instant at which an entry was added (ms of Redis TIME) from its id."""
    return int(entry_id.partition("-")[0])


class Part(msgspec.Struct, frozen=True):
    """One object to write: its name and hash in `file`, its bytes in `data`."""

    file: PartFile
    data: bytes


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch ready to be stored: its objects in their order, its manifest, what it acknowledges.

    Attributes:
        entries: (entry id, length of its row in bytes) of every entry, in the stream's order.
    """

    parts: list[Part]
    manifest: Manifest
    entries: list[tuple[str, int]]


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Whose batch it is, which, and what its shard is written as."""

    uid: str
    partition: int
    seq: int
    format: ShardFormat = "jsonl.zst"


def build(entries: Sequence[Entry], place: Place, *, written_at: str) -> Batch:
    """Make the objects and the manifest of a batch.

    The same entries give the same rows, hence the same names and hashes, whoever builds it and
    however often.

    Args:
        entries: At least one, in the stream's order.
        place: Where in the run it belongs.
        written_at: For people; no part of its identity.
    """
    completed = [entry for entry in entries if entry.outcome == "completed"]
    others = [entry for entry in entries if entry.outcome != "completed"]
    shard = _rows(names.SHARDS, place.format, place, [entry.row for entry in completed])
    failures = _rows(names.FAILURES, "jsonl.zst", place, [entry.row for entry in others])
    keys = _rows(names.KEYS, "tsv.zst", place, [key_line(record_of(entry)) for entry in entries])
    manifest = Manifest(
        uid=place.uid,
        partition=place.partition,
        seq=place.seq,
        shard=shard.file if shard else None,
        failures=failures.file if failures else None,
        keys=keys.file if keys else None,
        first=entries[0].entry_id,
        last=entries[-1].entry_id,
        completed=len(completed),
        failed=_count(others, "failed"),
        cancelled=_count(others, "cancelled"),
        input_tokens=sum(entry.input_tokens for entry in completed),
        output_tokens=sum(entry.output_tokens for entry in completed),
        written_at=written_at,
    )
    return Batch(
        parts=[part for part in (shard, failures, keys) if part],
        manifest=manifest,
        entries=[(entry.entry_id, len(entry.row)) for entry in entries],
    )


def record_of(entry: Entry) -> Record:
    """Give the line of `keys/` that stands for an entry."""
    return Record(
        key=entry.key,
        fingerprint=entry.fingerprint,
        try_=entry.try_,
        outcome=entry.outcome,
        input_tokens=entry.input_tokens,
        output_tokens=entry.output_tokens,
    )


def _rows(folder: str, suffix: str, place: Place, lines: list[bytes]) -> Part | None:
    if not lines:
        return None
    # The empty line at the end gives the last row its newline without another copy of all.
    rows = b"\n".join([*lines, b""])
    sha256, digest = digest_name(rows)
    data = to_parquet(lines) if suffix == SUFFIX else compress(rows)
    name = object_names.part_object(folder, place.partition, place.seq, digest, suffix)
    return Part(PartFile(name=name, rows=len(lines), bytes=len(data), sha256=sha256), data)


def _count(entries: Sequence[Entry], outcome: Outcome) -> int:
    return sum(entry.outcome == outcome for entry in entries)
