"""One Parquet file: the columns of `common.store.columns`, in row groups of bounded size."""

from collections.abc import Iterable, Iterator

from typing_extensions import override

from common.store.columns import arrow, schema, table
from common.store.parquet import LEVEL
from producer.formats.base import Format
from producer.outfile import OutFile

GROUP_BYTES = 16 << 20
GROUP_ROWS = 10_000
"""A row group ends at either; one is held at a time, here and by whoever reads it."""


class Parquet(Format):
    """A row is a completion; failures stay JSON lines."""

    suffixes = (".parquet", "-", ".pq")
    refusal = (
        "--format parquet compresses inside the file, whose name ends in .parquet for its readers"
    )

    @override
    def write(self, to: OutFile, rows: Iterable[bytes]) -> None:
        """Write the file; without any row it has its columns."""
        _, parquet = arrow()
        with parquet.ParquetWriter(
            to, schema(with_row=False), compression="zstd", compression_level=LEVEL
        ) as writer:
            for group in _groups(rows):
                writer.write_table(table(group, with_row=False))
                self.tally.lines += len(group)
        self.tally.completions = self.tally.lines


def _groups(rows: Iterable[bytes]) -> Iterator[list[bytes]]:
    group, size = list[bytes](), 0
    for row in rows:
        group.append(row)
        size += len(row)
        if size >= GROUP_BYTES or len(group) >= GROUP_ROWS:
            yield group
            group, size = [], 0
    if group:
        yield group


def make() -> Parquet:
    """Make what writes one file.

    Raises:
        UsageError: pyarrow is not installed.
    """
    arrow()
    return Parquet()
