"""Read a Parquet file row by row, in memory that follows its rows and not its size.

A row group is read in pieces of some megabytes, a batch of rows at a time, and each batch becomes
plain objects (`producer.prompts.columns`). A batch with a value that JSON cannot hold is halved
until the rows that hold one stand alone.

Needs pyarrow, which nothing else here does; it takes a second to import, so only a Parquet file
imports it.
"""

import importlib
import tempfile
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from common.errors import BackendError, UsageError
from producer.prompts.columns import UnfitError, doubled_name, plain
from producer.prompts.decompress import PARQUET
from producer.prompts.lines import LINE_LIMIT_BYTES
from producer.prompts.verdicts import FileRefusedError, RowRejectedError, shown

BATCH_ROWS = 1024
BATCH_BYTES = 4 * 1024 * 1024
FIRST_ROWS = 32
"""Rows of a row group that are looked at to learn how long they are."""

_READ_BYTES = 1024 * 1024

Found = dict[str, Any] | RowRejectedError
"""A row, or why it is none."""

_encode = msgspec.json.Encoder().encode


class ParquetInput:
    """One Parquet file.

    Args:
        stream: Its bytes; it must be seekable.
        source: How a person named it, for messages.

    Attributes:
        rows: How many it has.

    Raises:
        UsageError: pyarrow is not installed.
        FileRefusedError: It is damaged, or its columns cannot be told apart.
    """

    def __init__(self, stream: BinaryIO, source: str) -> None:
        self._source = source
        self._arrow, parquet = _pyarrow(source)
        self._refuse_cut(stream)
        try:
            self._file = parquet.ParquetFile(
                stream,
                buffer_size=_READ_BYTES,
                pre_buffer=False,
                page_checksum_verification=True,
            )
            self.rows: int = self._file.metadata.num_rows
            twice = doubled_name(self._arrow.struct(list(self._file.schema_arrow)))
        except (self._arrow.ArrowException, OSError, ValueError, RecursionError) as error:
            raise self._damaged(error) from error
        if twice is not None:
            raise FileRefusedError(
                source, "parquet", f"has two columns {twice!r}: a row can hold only one"
            )

    def batches(self) -> Iterator[list[Found]]:
        """Give all rows in order, some at a time.

        Raises:
            FileRefusedError: It is damaged.
        """
        for group in range(self._file.metadata.num_row_groups):
            for batch in self._read(group, self._batch_rows(group)):
                yield self._rows(batch)

    def _batch_rows(self, group: int) -> int:
        """Choose how many rows of a row group are read at once."""
        about = self._file.metadata.row_group(group)
        rows: int = max(about.num_rows, 1)
        row_bytes: int = about.total_byte_size // rows
        if rows > FIRST_ROWS:
            # A text that stands in many rows is stored once, and comes out in each of them.
            for first in self._read(group, FIRST_ROWS):
                row_bytes = max(row_bytes, first.nbytes // max(first.num_rows, 1))
                break
        return max(1, min(BATCH_ROWS, BATCH_BYTES // max(row_bytes, 1)))

    def _read(self, group: int, size: int) -> Iterator[Any]:
        try:
            yield from self._file.iter_batches(
                batch_size=size, row_groups=[group], use_threads=False
            )
        except (self._arrow.ArrowException, OSError, ValueError, RecursionError) as error:
            raise self._damaged(error) from error

    def _rows(self, batch: Any) -> list[Found]:
        try:
            found: list[dict[str, Any]] = plain(batch.to_struct_array(), "")
        except UnfitError:
            if batch.num_rows > 1:
                half = batch.num_rows // 2
                return [*self._rows(batch.slice(0, half)), *self._rows(batch.slice(half))]
            return [_fault(batch)]
        if batch.nbytes > LINE_LIMIT_BYTES // 2:
            return [_within_limit(row) for row in found]
        return [*found]

    def _refuse_cut(self, stream: BinaryIO) -> None:
        end = stream.seek(0, 2)
        stream.seek(max(0, end - len(PARQUET)))
        if end < 3 * len(PARQUET) or stream.read(len(PARQUET)) != PARQUET:
            raise FileRefusedError(
                self._source,
                "truncated",
                "is truncated: it begins as Parquet and lacks Parquet's end; copy it again",
            )

    def _damaged(self, error: Exception) -> Exception:
        if isinstance(error, OSError) and error.errno:
            return UsageError(f"{shown(self._source)} cannot be read: {error.strerror}")
        return FileRefusedError(
            self._source,
            "corrupt",
            f"is Parquet that cannot be read ({type(error).__name__}): it is damaged or encrypted",
        )


def _fault(row: Any) -> RowRejectedError:
    """Tell what is wrong with a batch of one row; what can be read of it goes along."""
    readable: dict[str, Any] = {}
    fault: RowRejectedError | None = None
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            [value] = plain(column, name)
        except UnfitError as error:
            fault = fault or error
        else:
            if value is not None:
                readable[name] = value
    found = fault or RowRejectedError("bad_type", "holds what JSON does not know")
    found.row = readable
    return found


def _within_limit(row: dict[str, Any]) -> Found:
    size = len(_encode(row))
    if size <= LINE_LIMIT_BYTES:
        return row
    return RowRejectedError(
        "too_large", f"has {size:,} bytes, the limit is {LINE_LIMIT_BYTES:,}: split the row"
    )


def on_disk(chunks: Iterator[bytes]) -> BinaryIO:
    """Put what cannot be sought in (a pipe, a compressed file) into a temporary file.

    Raises:
        BackendError: The temporary directory is full.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        for chunk in chunks:
            file.write(chunk)
        file.seek(0)
    except OSError as error:
        file.close()
        raise BackendError(
            f"{tempfile.gettempdir()} cannot be written ({error.strerror}): Parquet from a pipe "
            "is kept there while it is read; free space or set TMPDIR to a larger directory"
        ) from error
    except BaseException:
        file.close()
        raise
    return file


def _pyarrow(source: str) -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UsageError(
            f"{shown(source)} is Parquet, which needs pyarrow: pip install pyarrow, "
            "or write it as JSON lines"
        ) from error
