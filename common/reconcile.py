"""Bring Redis to what the store holds, after Redis restarted, was rewound, or was lost.

While the run's `reconciled` differs from Redis' run_id, finishes are accepted, claims and sink
reads wait. One process under the run-wide lease then goes these steps, each of which may be
repeated from the start after a death:

    close    the first missing sequence of each partition: no sink of the past can add to it then
    teach    the ledger all manifests that this Redis does not have, by the reader function
    drop     stream entries whose (key, try) the store has, and all of a key it has completed
    bodies   failed jobs get their requests back, from the failure rows
    inputs   accepted prompts that the ledger lacks are added and queued
    mark     sequences, seal, stored figures, and `reconciled`, in one script

Finishes go on meanwhile: counters move only by the transitions that the scripts make, and entries
are dropped after their keys have been taught, when no other finish of theirs can come any more.

`deep` also looks for what the ledger calls ended without any record of it, in the store or
waiting: such keys are forgotten, and their prompts queued again.
"""

import logging
import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from common import catalog, connect, manifests, names
from common.crashpoints import reached
from common.errors import ConflictError, StateLostError, StoreDamagedError
from common.missing import add_missing
from common.models import Manifest, Record, RunRecord
from common.overlap import to_drop
from common.queue.ledger import Ledger
from common.queue.maintenance import Maintenance, StreamItem, TurnLostError
from common.queue.records import LedgerEntry
from common.queue.scripts import call
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
        forgotten: Keys that had ended without a record.
        added: Prompts of `inputs/` that the ledger lacked.
        replaced: Prompts that had been accepted with another text since.
    """

    taught: int = 0
    dropped: int = 0
    forgotten: int = 0
    added: int = 0
    replaced: int = 0


def reconcile(
    client: "redis.Redis", store: ObjectStore, record: RunRecord, *, deep: bool = False
) -> Report | None:
    """Bring Redis to what the store holds, unless that is so already.

    Args:
        client: From `common.connect`.
        store: The run's output, probed.
        record: The run, which Redis must know; see `adopt_run`.
        deep: Do it in any case, over all that the store has, and look for lost records.

    Returns:
        None when another process is at it, or Redis restarted meanwhile: call again.

    Raises:
        StateLostError: Redis does not know the run.
        StoreUnusableError: Call again when the store works.
    """
    try:
        with Maintenance(client, record) as turn:
            if turn.reconciled and not deep:
                return Report()
            return _Reconcile(client, store, record, turn=turn).go(deep=deep)
    except TurnLostError:
        return None


class _FailedRow(msgspec.Struct, frozen=True):
    """What a failed job needs of its row."""

    key: str
    outcome: str
    request: msgspec.Raw


_failed = msgspec.json.Decoder(_FailedRow)


class _Reconcile:
    """One pass, in the turn of this process."""

    def __init__(
        self, client: "redis.Redis", store: ObjectStore, record: RunRecord, *, turn: Maintenance
    ) -> None:
        self._store = store
        self._record = record
        self._turn = turn
        self._ledger = Ledger(client, record, where=connect.address_of(client))
        self._report = Report()
        self._tokens: tuple[int, int] | None = None

    def go(self, *, deep: bool) -> Report:
        turn = self._turn
        if deep:
            # From here on sinks wait: an entry that went from stream to store would look lost.
            turn.distrust()
        every = close_open(self._store, self._record, seqs=turn.seqs, intents=turn.intents)
        unknown = [m for m in every if deep or m.seq > turn.seqs[m.partition]]
        for _, lines in catalog.all_key_lines(self._store, unknown):
            self._report.taught += turn.teach(catalog.parsed(lines))
        reached("reconcile.taught")
        if deep:
            self._forget_lost(every)
        self._drop(unknown)
        reached("reconcile.dropped")
        for manifest in unknown:
            self._give_bodies(manifest)
        reached("reconcile.bodies")
        self._report.added, self._report.replaced = add_missing(
            self._store, self._ledger, self._turn
        )
        reached("reconcile.inputs")
        self._mark(every)
        reached("reconcile.marked")
        log.info("reconciled run %s: %s", self._record.run, msgspec.to_builtins(self._report))
        return self._report

    def _drop(self, unknown: Sequence[Manifest]) -> None:
        waiting: dict[bytes, list[StreamItem]] = {}
        for item in self._turn.stream_items():
            waiting.setdefault(item.key, []).append(item)
        if not waiting:
            return
        stored: dict[bytes, list[Record]] = {}
        for manifest in unknown:
            self._turn.renew()
            for record in catalog.records(self._store, manifest):
                if record.key in waiting:
                    stored.setdefault(record.key, []).append(record)
        for key, records in stored.items():
            self._report.dropped += self._turn.drop(to_drop(waiting[key], records))

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
        with catalog.Bins() as ended, catalog.Bins() as stored:
            # The ledger first: what has ended by then has its entry in a stream read later.
            for key, value in self._turn.ended_keys():
                ended.add([b"%b\t%b\n" % (key.hex().encode(), value.hex().encode())])
            waiting = {(item.key, item.try_) for item in self._turn.stream_items()}
            for _, lines in catalog.all_key_lines(self._store, every):
                self._turn.renew()
                stored.add(lines)
            for keys, lines in catalog.matched(ended, stored):
                self._forget_lost_of(keys, lines, waiting)

    def _forget_lost_of(
        self, keys: list[bytes], lines: list[bytes], waiting: set[tuple[bytes, int]]
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


def adopt_run(
    client: "redis.Redis", store: ObjectStore, record: RunRecord | None = None
) -> RunRecord:
    """Make a run that Redis lacks from the store, and reconcile it. Lifts its tombstone.

    Args:
        client: From `common.connect`.
        store: The run's output, probed.
        record: What the caller knows of the run: another uid in the store is a conflict.

    Raises:
        StateLostError: The store has no run either.
        ConflictError: The store holds another run, or Redis another of this name.
    """
    data = store.get(names.RUN_JSON)
    if data is None:
        raise StateLostError(
            f"{store.url} holds no {names.RUN_JSON}: there is no run to go on with"
        )
    try:
        stored = msgspec.json.decode(data, type=RunRecord)
    except msgspec.MsgspecError as error:
        raise StoreDamagedError(f"{store.url}/{names.RUN_JSON}: {error}") from error
    if record is not None and record.uid != stored.uid:
        raise ConflictError(
            f"{store.url} holds run {stored.run!r} with uid {stored.uid}, not {record.run!r} with "
            f"uid {record.uid}: give another --output"
        )
    with connect.mapping_errors(client):
        stands = _make(client, store, stored)
    if stands.uid != stored.uid:
        raise ConflictError(
            f"Redis has a run {stored.run!r} with uid {stands.uid}, {store.url} one with uid "
            f"{stored.uid}: give another --run, or `producer forget {stored.run}` first"
        )
    reached("adopt.made")
    while reconcile(client, store, stored) is None:
        time.sleep(1.0)  # another process is at it
    return stored


def _make(client: "redis.Redis", store: ObjectStore, record: RunRecord) -> RunRecord:
    created_ms = int(datetime.fromisoformat(record.created_at).timestamp() * 1000)
    cancelled = store.get(names.CANCELLED) is not None
    reply = call(
        client,
        "reconcile_adopt",
        *(record.run, record.uid, msgspec.json.encode(record), record.bits, record.partitions),
        *(created_ms, created_ms, "1" if cancelled else "", store.get(names.PINNED) or b""),
        *(part for counter in _remembered(store).items() for part in counter),
    )
    return msgspec.json.decode(reply[1], type=RunRecord)


class _Progress(msgspec.Struct):
    """What no other object of the store tells; of the last minute of a run, about."""

    duplicates_dropped: int = 0
    retries: int = 0
    elapsed_hours: float = 0.0


def _remembered(store: ObjectStore) -> dict[str, int]:
    """Read the figures that must not begin at zero again from the last progress.json."""
    try:
        last = msgspec.json.decode(store.get(names.PROGRESS) or b"{}", type=_Progress)
    except msgspec.MsgspecError:
        last = _Progress()
    return {
        "duplicates_dropped": last.duplicates_dropped,
        "retries": last.retries,
        "active_ms": round(last.elapsed_hours * 3_600_000),
    }
