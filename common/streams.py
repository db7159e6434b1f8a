"""Read a partition's result stream. Nothing here removes an entry: the sink's scripts do.

An entry is what the finish script adds: k key (16 bytes), f fingerprint (8 bytes), t try, o
outcome (c completed, f failed, x cancelled), r the row as a finished JSON line, i prompt tokens,
n completion tokens. Anything else in the stream was put there by another hand, or is damaged; it
is told apart here, so that it cannot stop what stands behind it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import msgspec

from common import connect, names
from common.ids import FINGERPRINT_BYTES
from common.models import Entry, Outcome, RunRecord

if TYPE_CHECKING:
    import redis

OUTCOMES: dict[bytes, Outcome] = {b"c": "completed", b"f": "failed", b"x": "cancelled"}
LETTERS: dict[Outcome, str] = {word: letter.decode() for letter, word in OUTCOMES.items()}

LONGEST_ROW_BYTES = 64 << 20
"""A longer row is refused: common readers of JSON lines stop at about 16 MiB already."""

MOST_WAITING_BYTES = 2 << 30

STEP_ROWS = 500

Fields = dict[bytes, bytes]


class BrokenEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A stream entry that cannot become a row of the store.

    Attributes:
        why: One sentence without anything of its content.
        entry: What could be read of it: None when it does not name the key that it belongs to.
    """

    entry_id: str
    why: str
    entry: Entry | None


def mark_bytes(maxmemory: int) -> int:
    """Give what all result streams may hold before claims stop (`stream_mark_bytes` in Lua too).

    Args:
        maxmemory: Bytes that Redis may use; 0 for no limit.
    """
    return min(MOST_WAITING_BYTES, maxmemory // 4) if maxmemory else MOST_WAITING_BYTES


def read_entries(
    client: "redis.Redis",
    record: RunRecord,
    partition: int,
    *,
    first: str = "-",
    last: str = "+",
) -> Iterator[Entry | BrokenEntry]:
    """Read entries in the stream's order, a step of some hundred at a time.

    Args:
        client: From `common.connect`.
        record: Whose stream.
        partition: Which of its streams.
        first: Id of the first entry.
        last: Id of the last entry, which is included.

    Raises:
        RedisUnusableError: Redis cannot be reached.
    """
    stream = names.results(record.run, partition)
    while True:
        with connect.mapping_errors(client):
            step = cast(
                "list[tuple[bytes, Fields]]",
                client.xrange(stream, min=first, max=last, count=STEP_ROWS),
            )
        for raw_id, fields in step:
            yield parse(raw_id.decode(), fields)
        if len(step) < STEP_ROWS:
            return
        first = f"({step[-1][0].decode()}"


def newest_entries(
    client: "redis.Redis", record: RunRecord, partition: int, *, step: int = 50
) -> Iterator[Entry | BrokenEntry]:
    """Read entries from the newest back to the oldest, `step` at a time: take what is wanted.

    Raises:
        RedisUnusableError: Redis cannot be reached.
    """
    stream, last = names.results(record.run, partition), "+"
    while True:
        with connect.mapping_errors(client):
            found = cast(
                "list[tuple[bytes, Fields]]",
                client.xrevrange(stream, max=last, min="-", count=step),
            )
        for raw_id, fields in found:
            yield parse(raw_id.decode(), fields)
        if len(found) < step:
            return
        last = f"({found[-1][0].decode()}"


def parse(entry_id: str, fields: Fields) -> Entry | BrokenEntry:
    """Read one entry; what is wrong with it is told without any of its content."""
    try:
        entry = Entry(
            entry_id=entry_id,
            key=fields[b"k"],
            fingerprint=fields[b"f"],
            try_=int(fields[b"t"]),
            outcome=OUTCOMES[fields[b"o"]],
            row=fields[b"r"],
            input_tokens=int(fields[b"i"]),
            output_tokens=int(fields[b"n"]),
        )
    except (KeyError, ValueError) as error:
        why = f"a field is missing or of another form ({type(error).__name__})"
        return BrokenEntry(entry_id=entry_id, why=why, entry=None)
    sizes = len(entry.key), len(entry.fingerprint)
    if sizes != (names.KEY_BYTES, FINGERPRINT_BYTES) or entry.try_ < 1:
        why = "it names no key, fingerprint or try"
        return BrokenEntry(entry_id=entry_id, why=why, entry=None)
    why = row_fault(entry.row)
    return BrokenEntry(entry_id=entry_id, why=why, entry=entry) if why else entry


def row_fault(row: bytes) -> str:
    """Say why a row cannot be a line of a shard; empty when it can.

    Only what would harm other rows is looked for: our own encoder wrote the row, and decoding
    every one again would cost the sink a quarter of its speed.
    """
    if len(row) > LONGEST_ROW_BYTES:
        return f"its row has {len(row)} bytes, more than {LONGEST_ROW_BYTES}"
    if row[:1] != b"{" or row[-1:] != b"}":
        return "its row is no JSON object"
    if b"\n" in row:
        return "its row is more than one line"
    if not row.isascii():
        try:
            row.decode()
        except UnicodeDecodeError:
            return "its row is not UTF-8"
    return ""
