"""Keep a shard as Parquet: for readers that stream from s3:// and take no compressed JSON lines.

The columns of `common.store.columns`, and beside them `row`: the very JSON line that a .jsonl.zst
shard would hold. So nothing of a row is lost to a schema, its hash is the same in both formats,
and whoever reads a shard back (export, verify, a rebuild) gets the same bytes.

Needs pyarrow, which nothing else does: `pip install 'headrace[parquet]'`.
"""

import io
from collections.abc import Sequence
from typing import Any

from common.errors import StoreDamagedError
from common.store import frames
from common.store.columns import ROW, arrow, table

SUFFIX = "parquet"
LEVEL = 3
_MOST_AT_ONCE = 1_024
"""Rows."""


def to_parquet(rows: Sequence[bytes]) -> bytes:
    """Write rows (JSON lines without newline, at least one) as one Parquet file.

    Raises:
        UsageError: pyarrow is not installed.
    """
    _, parquet = arrow()
    file = io.BytesIO()
    columns = table(rows, with_row=True)
    parquet.write_table(columns, file, compression="zstd", compression_level=LEVEL)
    return file.getvalue()


def from_parquet(data: bytes) -> bytes:
    """Give back the rows of a shard as JSON lines, byte for byte.

    Raises:
        StoreDamagedError: It is no shard of ours, or unpacks to more than one may hold.
        UsageError: pyarrow is not installed.
    """
    pa, parquet = arrow()
    try:
        # Without Arrow's own threads: one that lets go of our bytes while the interpreter ends
        # takes the process down, though all was done.
        file = parquet.ParquetFile(pa.BufferReader(data), pre_buffer=False)
        rows = _bounded_rows(file, data)
    except (pa.ArrowException, KeyError, OSError) as error:
        raise StoreDamagedError(f"no shard in Parquet ({type(error).__name__})") from error
    return "\n".join([*rows, ""]).encode()


def _bounded_rows(file: Any, data: bytes) -> list[str]:
    """Read the rows; a text that stands in many rows is stored once, and unpacked for each."""
    stored_bytes = _unpacked_bytes(file.metadata)
    if stored_bytes > frames.MOST_UNPACKED_BYTES:
        raise frames.too_large(data)
    # No row is longer than all that is stored: so few at a time cannot pass the limit by much.
    at_once = max(1, min(_MOST_AT_ONCE, frames.MOST_UNPACKED_BYTES // max(1, stored_bytes)))
    rows: list[str] = []
    room_bytes = frames.MOST_UNPACKED_BYTES
    for batch in file.iter_batches(batch_size=at_once, columns=[ROW], use_threads=False):
        column = batch.column(ROW)
        room_bytes -= column.nbytes
        if room_bytes < 0:
            raise frames.too_large(data)
        rows += column.to_pylist()
    return rows


def _unpacked_bytes(about: Any) -> int:
    """Add up the pages of the rows, as the file's own metadata give them."""
    chunks = [
        about.row_group(group).column(column)
        for group in range(about.num_row_groups)
        for column in range(about.num_columns)
    ]
    return sum(each.total_uncompressed_size for each in chunks if each.path_in_schema == ROW)


def check_pyarrow() -> None:
    """Refuse a run in Parquet before anything is generated where it could not be stored."""
    arrow()
