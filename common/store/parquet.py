"""Keep a shard as Parquet: for readers that stream from s3:// and take no compressed JSON lines.

The columns of `common.store.columns`, and beside them `row`: the very JSON line that a .jsonl.zst
shard would hold. So nothing of a row is lost to a schema, its hash is the same in both formats,
and whoever reads a shard back (export, verify, a rebuild) gets the same bytes.

Needs pyarrow, which nothing else does: `pip install 'headrace[parquet]'`.
"""

import io
from collections.abc import Sequence

from common.errors import StoreDamagedError
from common.store.columns import ROW, arrow, table

SUFFIX = "parquet"
LEVEL = 3


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
        StoreDamagedError: It is no shard of ours.
        UsageError: pyarrow is not installed.
    """
    pa, parquet = arrow()
    try:
        # Without Arrow's own threads: one that lets go of our bytes while the interpreter ends
        # takes the process down, though all was done.
        file = parquet.ParquetFile(pa.BufferReader(data), pre_buffer=False)
        column = file.read(columns=[ROW], use_threads=False).column(ROW)
    except (pa.ArrowException, KeyError, OSError) as error:
        raise StoreDamagedError(f"no shard in Parquet ({type(error).__name__})") from error
    return "\n".join([*column.to_pylist(), ""]).encode()


def check_pyarrow() -> None:
    """Refuse a run in Parquet before anything is generated where it could not be stored."""
    arrow()
