"""Move one partition's entries into the store, a batch at a time (protocol.md §5, steps 1 to 4).

    1  intent       sequence, first and last entry, count, written to Redis
    2  objects      shard, failures, keys, each under a name that ends in the hash of its rows
    3  manifest     the commit: from here on the rows exist for readers
    4  acknowledge  one script: entries deleted by id, next sequence, intent cleared

Whatever dies between two steps, the next sink finds the intent, reads the same entries, builds the
same objects under the same names and goes on; what was written is recognised as its own.

Failures:
    Redis away, store away or full   the pass raises; the intent stands, the same batch comes again
    the partition is another's now   `PartitionLostError`; nothing was acknowledged
    a batch fails by itself          counted in Redis; after five tries its sequence is given up
                                     with a `void`, the next batches are smaller, and one entry
                                     that fails alone becomes a failure (`unstorable`)
    a name holds other bytes         a foreign object, or one cut off: the sequence is given up,
                                     its entries go under the next one's names
    the sequence has other rows      a sink of a past that this Redis has forgotten wrote them:
                                     the whole run is reconciled before anything goes on
"""

import logging
from typing import TYPE_CHECKING, NoReturn

from common import manifests
from common.crashpoints import reached
from common.errors import StoreDamagedError, StoreDeniedError, StoreUnusableError
from common.models import Entry, RunRecord
from common.queue.sinklease import (
    NO_LIMIT,
    Intent,
    Limit,
    PartitionLease,
    PartitionLostError,
    Standing,
)
from common.store import ObjectStore
from common.streams import BrokenEntry, read_entries
from common.utc import utc_now
from workers.sink.batch import Batch, Limits, Place, build
from workers.sink.reading import Reader
from workers.sink.unstorable import unstorable

if TYPE_CHECKING:
    import redis

log = logging.getLogger(__name__)

MOST_TRIES = 5
_STORED = {"shards": "sink.shards", "failures": "sink.failures", "keys": "sink.keys"}
SHRINK = 8
"""A batch that keeps failing is cut into pieces of an eighth: 20,000 rows take five rounds."""


class BatchRefusedError(Exception):
    """The store works, but will not take this batch: its own fault, as far as one can tell."""


class PartitionSink:
    """One partition of one run, held by this process.

    Args:
        client: From `common.connect`.
        store: Probed.
        record: The run.
        lease: Of the partition; taken again at each pass.
        limits: Of a batch.
    """

    def __init__(
        self,
        client: "redis.Redis",
        store: ObjectStore,
        record: RunRecord,
        *,
        lease: PartitionLease,
        limits: Limits,
    ) -> None:
        self._client = client
        self._objects = store
        self._record = record
        self._lease = lease
        self._reader = Reader(client, record, lease.partition, limits=limits)

    def store_one(self) -> int:
        """Store one batch, the one that is begun or a new one.

        Returns:
            Records that are now in the store; 0 when nothing waits.

        Raises:
            PartitionLostError: Start over later, or leave the partition to its new sink.
            StoreUnusableError: The same batch will come again.
            RedisUnusableError: Likewise.
        """
        standing = self._lease.take()
        if standing.intent is not None:
            return self._go_on(standing, standing.intent)
        read = self._reader.next_batch(standing)
        for broken in read.broken:
            self._set_aside(broken)
        entries = read.entries
        if not entries:
            return 0
        reached("sink.read")
        intent = Intent(
            seq=standing.seq + 1,
            first=entries[0].entry_id,
            last=entries[-1].entry_id,
            rows=len(entries),
        )
        self._lease.intend(intent)
        reached("sink.intent")
        self._lease.attempt(intent)
        reached("sink.attempted")
        if read.more:
            self._reader.read_ahead(intent.last, after_seq=intent.seq)
        return self._store(intent, entries)

    def close(self) -> None:
        """End the thread that reads ahead."""
        self._reader.close()

    def _go_on(self, standing: Standing, intent: Intent) -> int:
        """Bring a begun sequence to its end."""
        if standing.tries >= MOST_TRIES:
            self._give_up(standing, intent)
            return 0
        self._lease.attempt(intent)
        entries = self._entries_of(intent)
        if len(entries) != intent.rows:
            # A reconcile took out what the store had already, or a poison entry was set aside.
            self._void(intent)
            return 0
        return self._store(intent, entries)

    def _entries_of(self, intent: Intent) -> list[Entry]:
        """Read what is left of an intent's entries."""
        found = read_entries(
            self._client, self._record, self._lease.partition, first=intent.first, last=intent.last
        )
        return [entry for entry in found if isinstance(entry, Entry)]

    def _store(self, intent: Intent, entries: list[Entry]) -> int:
        """Steps 2 to 4."""
        batch = self._build(intent, entries)
        reached("sink.built")
        try:
            foreign = self._put_objects(batch)
            stands = None if foreign else manifests.write(self._objects, batch.manifest)
        except StoreUnusableError as error:
            if not self._fault_of_batch(error):
                self._lease.excuse(intent)
            raise
        if stands is None:
            self._void(intent)
            raise StoreDamagedError(
                f"{self._objects.url}/{foreign} holds other bytes than its name says: what was to "
                "be stored there goes under the next number",
                retryable=True,
            )
        reached("sink.manifest")
        if manifests.identity(stands) != manifests.identity(batch.manifest):
            self._distrust(intent)
        self._lease.close(
            intent,
            entries=batch.entries,
            stored_rows=len(entries),
            stored_bytes=manifests.bytes_of(batch.manifest),
        )
        reached("sink.acknowledged")
        log.info(
            "stored run %s partition %d sequence %d: %d rows, %d bytes",
            *(self._record.run, self._lease.partition, intent.seq, len(entries)),
            manifests.bytes_of(batch.manifest),
        )
        return len(entries)

    def _build(self, intent: Intent, entries: list[Entry]) -> Batch:
        place = Place(
            uid=self._record.uid,
            partition=self._lease.partition,
            seq=intent.seq,
            format=self._record.params.format,
        )
        try:
            return build(entries, place, written_at=utc_now())
        except Exception as error:
            # Whatever it is, it is in the entries: the count of tries finds which.
            raise BatchRefusedError(f"{type(error).__name__} while it was built") from error

    def _put_objects(self, batch: Batch) -> str:
        """Step 2, in an order in which no prefix of it could pass for more than it is.

        Returns:
            The name that holds other bytes; empty when all is written.
        """
        for part in batch.parts:
            name, sha256 = part.file.name, part.file.sha256
            if not self._objects.put_if_absent(name, part.data, rows_sha256=sha256):
                return name
            reached(_STORED[name.partition("/")[0]])
        return ""

    def _fault_of_batch(self, error: StoreUnusableError) -> bool:
        """Tell a store that is away or refuses everything from one that refuses this batch."""
        if error.retryable or isinstance(error, StoreDeniedError | StoreDamagedError):
            # A right that is missing for one folder, or a manifest's name that is taken, is so for
            # every batch: its completions must not become failures one by one.
            return False
        try:
            self._objects.probe()
        except StoreUnusableError:
            return False
        return True

    def _give_up(self, standing: Standing, intent: Intent) -> None:
        """End a sequence whose batch failed too often, so that what stands behind it goes on."""
        if intent.rows > 1:
            known = standing.limit
            until = known.until if known and known.holds_for(intent.first) else intent.last
            self._void(intent, limit=Limit(max(1, intent.rows // SHRINK), until))
            return
        for entry in self._entries_of(intent):
            self._set_aside(
                BrokenEntry(entry_id=entry.entry_id, why="its batch kept failing", entry=entry)
            )
        reached("sink.set_aside")
        self._void(intent, limit=NO_LIMIT)

    def _set_aside(self, broken: BrokenEntry) -> None:
        replacement = unstorable(self._objects, self._record, broken, failed_at=utc_now())
        log.error(
            "set aside entry %s of run %s partition %d, which cannot be stored: %s; %s",
            *(broken.entry_id, self._record.run, self._lease.partition, broken.why),
            f"failed key {replacement.key.hex()}" if replacement else "it is no prompt's result",
        )
        self._lease.set_aside(broken.entry_id, replacement)

    def _void(self, intent: Intent, *, limit: Limit | None = None) -> None:
        """Close a sequence without committing anything."""
        reached("sink.giving_up")
        manifest = manifests.void(
            self._record.uid, self._lease.partition, intent.seq, written_at=utc_now()
        )
        stands = manifests.write(self._objects, manifest)
        reached("sink.void")
        if not stands.void:
            self._distrust(intent)
        self._lease.close(intent, limit=limit)

    def _distrust(self, intent: Intent) -> NoReturn:
        """Another manifest closes our sequence: have everything reconciled, then start over."""
        log.warning(
            "run %s partition %d sequence %d holds other rows than planned: reconciling the run",
            *(self._record.run, self._lease.partition, intent.seq),
        )
        self._lease.distrust(intent)
        raise PartitionLostError("unreconciled")
