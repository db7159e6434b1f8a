"""The steps of a reconcile; `common.reconcile` tells what they are for, and in which order."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from common import catalog, connect, manifests, names
from common.cancelling import is_cancelled
from common.crashpoints import reached
from common.marks.archive import restore
from common.missing import add_missing
from common.models import Manifest, Record, RunRecord
from common.overlap import to_drop
from common.queue.ledger import Ledger
from common.queue.maintenance import Maintenance, StreamItem
from common.queue.records import LedgerEntry
from common.reader import current_records, rank
from common.sequences import close_open
from common.store import ObjectStore

if TYPE_CHECKING:
    import redis

log = logging.getLogger(__name__)


class Report(msgspec.Struct, kw_only=True):
    """What a reconcile did.

    Attributes:
        taught: Keys whose ledger state changed to what the store says.
        dropped: Stream entries that the store had already.
        forgotten: Keys that had ended without a record; `inputs/` brings them back.
        unaccepted: Likewise, but `inputs/` lacks them too: they stay as Redis has them.
        added: Prompts of `inputs/` that the ledger lacked.
        replaced: Prompts that had been accepted with another text since.
    """

    taught: int = 0
    dropped: int = 0
    forgotten: int = 0
    unaccepted: int = 0
    added: int = 0
    replaced: int = 0


class _FailedRow(msgspec.Struct, frozen=True):
    """What a failed job needs of its row."""

    key: str
    outcome: str
    request: msgspec.Raw


_failed = msgspec.json.Decoder(_FailedRow)


class Steps:
    """One pass, in the turn of this process."""

    def __init__(
        self, client: "redis.Redis", store: ObjectStore, record: RunRecord, *, turn: Maintenance
    ) -> None:
        self._client = client
        self._store = store
        self._record = record
        self._turn = turn
        self._ledger = Ledger(client, record, where=connect.address_of(client))
        self._report = Report()
        self._tokens: tuple[int, int] | None = None

    def go(self, *, deep: bool) -> Report:
        """Go them all, in order."""
        turn = self._turn
        cancelled = is_cancelled(self._store)
        if cancelled:
            # Before anything that Redis may have forgotten could be claimed again.
            turn.mark_cancelled()
        if deep:
            # From here on sinks wait: an entry that went from stream to store would look lost.
            turn.distrust()
        self._pin()
        reached("reconcile.begun")
        every = close_open(self._store, self._record, seqs=turn.seqs, intents=turn.intents)
        unknown = [m for m in every if deep or m.seq > turn.seqs[m.partition]]
        for _, lines in catalog.all_key_lines(self._store, unknown):
            self._report.taught += turn.teach(catalog.parsed(lines))
        reached("reconcile.taught")
        if deep:
            self._forget_lost(every)
            reached("reconcile.forgotten")
        self._drop(unknown)
        reached("reconcile.dropped")
        for manifest in unknown:
            self._give_bodies(manifest)
        reached("reconcile.bodies")
        restore(self._client, self._store, self._record)
        reached("reconcile.marks")
        # What a cancelled run has left counts, and is not queued: `common.cancelling` ends it.
        self._report.added, self._report.replaced = add_missing(
            self._store, self._ledger, self._turn, cancelled=cancelled
        )
        reached("reconcile.inputs")
        self._mark(every)
        reached("reconcile.marked")
        log.info("reconciled run %s: %s", self._record.run, msgspec.to_builtins(self._report))
        return self._report

    def _pin(self) -> None:
        pinned = self._store.get(names.PINNED)
        if pinned:
            self._turn.pin(pinned)

    def _drop(self, unknown: Sequence[Manifest]) -> None:
        waiting: dict[bytes, list[StreamItem]] = {}
        for item in self._turn.stream_items():
            waiting.setdefault(item.key, []).append(item)
        if not waiting:
            return
        stored: dict[bytes, list[Record]] = {}
        for _, lines in catalog.all_key_lines(self._store, unknown):
            for record in catalog.parsed(lines):
                if record.key in waiting:
                    stored.setdefault(record.key, []).append(record)
        self._report.dropped += self._turn.drop(
            [pair for key, records in stored.items() for pair in to_drop(waiting[key], records)]
        )

    def _give_bodies(self, manifest: Manifest) -> None:
        rows = [_failed.decode(line) for line in catalog.rows(self._store, manifest.failures)]
        self._turn.give_bodies(
            [
                (bytes.fromhex(row.key), bytes(row.request))
                for row in rows
                if row.outcome == "failed"
            ]
        )

    def _forget_lost(self, every: Sequence[Manifest]) -> None:
        """Take ended keys without a record out of the ledger, and teach what there is instead."""
        self._tokens = 0, 0
        with catalog.Bins() as ended, catalog.Bins() as stored, catalog.Bins() as accepted:
            # The ledger first: what has ended by then has its entry in a stream read later.
            for key, value in self._turn.ended_keys():
                ended.add([b"%b\t%b\n" % (key.hex().encode(), value.hex().encode())])
            waiting = {(item.key, item.try_) for item in self._turn.stream_items()}
            for _, lines in catalog.all_key_lines(self._store, every):
                stored.add(lines)
            for _, rows in catalog.all_inputs(self._store, catalog.list_inputs(self._store).rows):
                accepted.add(row[0] + b"\n" for row in rows)
            for prefix in sorted(ended.prefixes() | stored.prefixes()):
                back = set(accepted.lines(prefix))
                self._forget_lost_of(
                    ended.lines(prefix), stored.lines(prefix), waiting, may_forget=back
                )

    def _forget_lost_of(
        self,
        keys: list[bytes],
        lines: list[bytes],
        waiting: set[tuple[bytes, int]],
        *,
        may_forget: set[bytes],
    ) -> None:
        current = current_records(catalog.parsed(lines))
        done = [record for record in current.values() if record.outcome == "completed"]
        known = self._tokens or (0, 0)
        self._tokens = (
            known[0] + sum(record.input_tokens for record in done),
            known[1] + sum(record.output_tokens for record in done),
        )
        lost, instead = [], []
        for line in keys:
            key, value = (bytes.fromhex(part.decode()) for part in line.split(b"\t"))
            entry, record = LedgerEntry.read(value), current.get(key)
            if (key, entry.try_) in waiting:
                continue
            if record and rank(record) >= (entry.state == "completed", entry.try_):
                continue
            if not record and key.hex().encode() not in may_forget:
                # Forgotten, it would be gone for good: the store could not give it back.
                self._report.unaccepted += 1
                continue
            lost.append((key, value))
            if record:
                instead.append(record)
        self._report.forgotten += self._turn.forget(lost)
        self._turn.teach(instead)

    def _mark(self, every: Sequence[Manifest]) -> None:
        closed = [
            max((m.seq for m in every if m.partition == partition), default=0)
            for partition in range(self._record.partitions)
        ]
        listing = catalog.list_inputs(self._store)
        self._turn.close(
            closed,
            inputs_seq=listing.last_seq,
            sealed=catalog.sealed(self._store, listing),
            stored=(
                sum(map(manifests.rows_of, every)),
                sum(map(manifests.bytes_of, every)),
            ),
            tokens=self._tokens,
        )
