"""Put rows into an order that is known beforehand, in bounded memory.

Each row comes with its place. Places are cut into chunks of some MiB of rows; a row goes to its
chunk, first in memory, beyond some MiB compressed into a temporary folder. At the end one chunk
after the other is sorted and given out.
"""

import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import zstandard

from common.errors import BackendError

MEMORY_BYTES = 32 << 20
CHUNK_BYTES = 16 << 20
FIRST_ROW_BYTES = 4_096

_HEAD = struct.Struct(">QI")
_LENGTH = struct.Struct(">I")


class Ordering:
    """Rows by place; use it as a context manager.

    Args:
        row_bytes: About how long a row is: it decides how many make a chunk.
        memory_bytes: What is held before it is spilled.
        chunk_bytes: Rows that are sorted together.
    """

    def __init__(
        self,
        *,
        row_bytes: int = FIRST_ROW_BYTES,
        memory_bytes: int = MEMORY_BYTES,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._chunk_places = max(1, chunk_bytes // max(row_bytes, 1))
        self._memory_bytes = memory_bytes
        self._held: dict[int, list[tuple[int, bytes]]] = {}
        self._held_bytes = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.rows = 0

    def add(self, place: int, row: bytes) -> None:
        """Take a row; no two have one place.

        Raises:
            BackendError: The temporary directory is full.
        """
        self._held.setdefault(place // self._chunk_places, []).append((place, row))
        self._held_bytes += len(row)
        self.rows += 1
        if self._held_bytes > self._memory_bytes:
            try:
                self._spill()
            except OSError as error:
                raise BackendError(
                    f"{tempfile.gettempdir()} cannot be written ({error.strerror}): rows wait "
                    "there until they are in order; free space or set TMPDIR to a larger directory"
                ) from error

    def __iter__(self) -> Iterator[bytes]:
        """Give the rows in the order of their places."""
        spilled = {int(path.name) for path in self._files()}
        for chunk in sorted(spilled | self._held.keys()):
            rows = [*self._read(chunk), *self._held.pop(chunk, ())]
            rows.sort()
            yield from (row for _, row in rows)

    def _spill(self) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="headrace-")
        compressor = zstandard.ZstdCompressor(level=1)
        for chunk, rows in self._held.items():
            raw = b"".join(_HEAD.pack(place, len(row)) + row for place, row in rows)
            packed = compressor.compress(raw)
            with (Path(self._folder.name) / str(chunk)).open("ab") as file:
                file.write(_LENGTH.pack(len(packed)) + packed)
        self._held.clear()
        self._held_bytes = 0

    def _files(self) -> list[Path]:
        return list(Path(self._folder.name).iterdir()) if self._folder else []

    def _read(self, chunk: int) -> Iterator[tuple[int, bytes]]:
        path = Path(self._folder.name) / str(chunk) if self._folder else None
        if path is None or not path.exists():
            return
        decompressor = zstandard.ZstdDecompressor()
        with path.open("rb") as file:
            while head := file.read(_LENGTH.size):
                raw = decompressor.decompress(file.read(_LENGTH.unpack(head)[0]))
                yield from _cut(raw)

    def __enter__(self) -> Self:
        """Nothing to prepare."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove what was spilled."""
        if self._folder is not None:
            self._folder.cleanup()


def _cut(raw: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(raw):
        place, length = _HEAD.unpack_from(raw, at)
        at += _HEAD.size
        yield place, raw[at : at + length]
        at += length
