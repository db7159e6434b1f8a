"""Find repeated keys among any number of rows, in bounded memory. Pure but for its own files.

Each row leaves a record of 32 bytes (key, fingerprint, place) in one of 256 partitions by the
key's first byte. A partition holds every row of its keys, in order, so each is settled alone. What
is found is kept as 16 bytes a repeat, nothing for the rows that are the only ones of their key.
"""

import heapq
import struct
from array import array
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

RECORD = struct.Struct(">16s8sQ")
"""Key, fingerprint, place; a place's highest bit says that the row brought no id."""

NO_ID = 1 << 63
PARTITIONS = 256
_FLUSH_ROWS = 200_000
_KIND_SHIFT = 60
_VALUE = (1 << _KIND_SHIFT) - 1


class Kind(IntEnum):
    """What a row is that is not the first of its key."""

    REPEAT = 1
    CONFLICT = 2
    OCCURRENCE = 3


class Finding(NamedTuple):
    """One row that is not the first of its key.

    Attributes:
        place: Where it stands.
        value: CONFLICT and REPEAT: the place of the first row; OCCURRENCE: how many equal rows
            without id stood before this one.
    """

    place: int
    kind: Kind
    value: int


class Repeats:
    """Collect the records of all rows, then tell which repeat another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting = [bytearray() for _ in range(PARTITIONS)]
        self._waiting_rows = 0
        self._found: list[array[int]] = []
        self.counts = dict.fromkeys(Kind, 0)

    def add(self, record: bytes) -> None:
        """Take one row's record (`RECORD`)."""
        self._waiting[record[0]] += record
        self._waiting_rows += 1
        if self._waiting_rows >= _FLUSH_ROWS:
            self._flush()

    def settle(self) -> None:
        """Look through all records; afterwards `counts` and `findings` stand."""
        for number, waiting in enumerate(self._waiting):
            path = self._path(number)
            records = path.read_bytes() + waiting if path.exists() else bytes(waiting)
            path.unlink(missing_ok=True)
            keys = {records[at : at + 16] for at in range(0, len(records), RECORD.size)}
            if len(keys) * RECORD.size != len(records):
                self._settle(records)
        self._waiting.clear()

    def findings(self) -> Iterator[Finding]:
        """Give every finding in the order of the rows."""
        for place, packed in heapq.merge(*(_pairs(found) for found in self._found)):
            yield Finding(place, Kind(packed >> _KIND_SHIFT), packed & _VALUE)

    def _settle(self, records: bytes) -> None:
        found = array("Q")
        first: dict[bytes, tuple[bytes, int]] = {}
        occurrences: dict[bytes, int] = {}
        for key, fingerprint, marked in RECORD.iter_unpack(records):
            place = marked & ~NO_ID
            known = first.setdefault(key, (fingerprint, place))
            if known[1] == place:
                continue
            if marked & NO_ID:
                value = occurrences.get(key, 0) + 1
                occurrences[key] = value
                kind = Kind.OCCURRENCE
            else:
                kind = Kind.REPEAT if known[0] == fingerprint else Kind.CONFLICT
                value = known[1]
            self.counts[kind] += 1
            found.append(place)
            found.append(kind << _KIND_SHIFT | value)
        self._found.append(found)

    def _flush(self) -> None:
        for number, waiting in enumerate(self._waiting):
            if waiting:
                with self._path(number).open("ab") as file:
                    file.write(waiting)
                waiting.clear()
        self._waiting_rows = 0

    def _path(self, number: int) -> Path:
        return self._folder / f"keys-{number:02x}"


def _pairs(found: "array[int]") -> Iterator[tuple[int, int]]:
    numbers = iter(found)
    return zip(numbers, numbers, strict=True)
