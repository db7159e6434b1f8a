"""Read a partition's next batch from its stream, and the one after it ahead of time.

While a batch is compressed and stored, the next is read by another thread: both spend most of
their time outside Python. What was read ahead is used only when the partition stands exactly where
it stood then: any reconcile in between closes a sequence, and so does any other sink's batch.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from common.errors import HeadraceError
from common.models import Entry, RunRecord
from common.queue.sinklease import Limit, Standing
from common.streams import BrokenEntry, read_entries
from workers.sink.batch import Limits

if TYPE_CHECKING:
    import redis


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What was read for one batch.

    Attributes:
        broken: Entries among them that cannot be stored.
        more: The limits ended it, so that there is more to come.
    """

    entries: list[Entry]
    broken: list[BrokenEntry]
    more: bool


class Reader:
    """Reads the batches of one partition; used by one thread.

    Args:
        client: From `common.connect`.
        record: Whose stream.
        partition: Which of its streams.
        limits: Of a batch.
    """

    def __init__(
        self, client: "redis.Redis", record: RunRecord, partition: int, *, limits: Limits
    ) -> None:
        self._client = client
        self._record = record
        self._partition = partition
        self._limits = limits
        self._pool = ThreadPoolExecutor(1, f"read-{record.run}-{partition}")
        # The sequence after which it was read, and what was.
        self._ahead: tuple[int, Future[Reading]] | None = None

    def next_batch(self, standing: Standing) -> Reading:
        """Read the batch that follows the last closed sequence."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == standing.seq and standing.limit is None:
            with suppress(HeadraceError):
                return ahead[1].result()
        return self._read("-", standing.limit)

    def read_ahead(self, last: str, *, after_seq: int) -> None:
        """Begin to read what follows the entry `last`, for use after `after_seq` is closed."""
        self._ahead = after_seq, self._pool.submit(self._read, f"({last}", None)

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, first: str, limit: Limit | None) -> Reading:
        found = read_entries(self._client, self._record, self._partition, first=first)
        return collect(found, self._limits, limit)


def collect(
    found: Iterable[Entry | BrokenEntry], limits: Limits, limit: Limit | None = None
) -> Reading:
    """Take entries up to the limits of a batch, at least one of those that can be stored.

    Args:
        found: In the stream's order.
        limits: Of a batch.
        limit: A lower one, after batches that kept failing.
    """
    most_rows, total_bytes = limits.rows, 0
    entries: list[Entry] = []
    broken: list[BrokenEntry] = []
    for entry in found:
        if isinstance(entry, BrokenEntry):
            broken.append(entry)
            continue
        if not entries and limit and limit.holds_for(entry.entry_id):
            most_rows = min(most_rows, limit.rows)
        total_bytes += len(entry.row)
        if len(entries) == most_rows or (entries and total_bytes > limits.bytes):
            return Reading(entries=entries, broken=broken, more=True)
        entries.append(entry)
    return Reading(entries=entries, broken=broken, more=False)
