"""Close the sequences that a past of this Redis may have left open, before anything is taught.

A sink that was frozen since before Redis was rewound may still write the manifest of a sequence
that it had begun. So the first sequence without a manifest is closed first: by objects that lie
there without one (adoption), else by `void`. From then on nothing more can appear, and a listing
of the manifests is complete. Where this Redis has a standing intent for that sequence it is left
to the sinks, who will close it with exactly what the intent says.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from common import catalog, manifests, names, object_names
from common.crashpoints import reached
from common.errors import StoreDamagedError
from common.models import Manifest, Outcome, PartFile, Record, RunRecord, Usage
from common.reader import key_line
from common.store import ObjectStore
from common.store.frames import compress, digest_name
from common.utc import utc_now


def close_open(
    store: ObjectStore, record: RunRecord, *, seqs: Sequence[int], intents: Sequence[int]
) -> list[Manifest]:
    """Close what is open and read every manifest.

    Args:
        store: The run's output.
        record: The run.
        seqs: Last closed sequence of each partition, as Redis knows it.
        intents: Sequence of the standing intent of each partition in Redis, 0 without one.

    Returns:
        All manifests by partition and sequence, the new ones among them.
    """
    known = catalog.manifests_of(store, record.uid)
    closed: list[Manifest] = []
    for partition in range(record.partitions):
        mine = [manifest for manifest in known if manifest.partition == partition]
        used = {manifest.seq for manifest in mine}
        last = max([*used, seqs[partition]], default=0)
        gaps = [seq for seq in range(1, last + 1) if seq not in used]
        unlisted = list(_unlisted(store, record, partition, after=last))
        closed += unlisted
        mine += unlisted
        last += len(unlisted)
        # Gaps are not of our making: somebody removed manifests. Nothing must appear in them.
        for seq in [*gaps, last + 1]:
            if seq == intents[partition]:
                continue
            closed.append(_close(store, record, partition, seq=seq, committed=mine))
    reached("reconcile.closed")
    return sorted([*known, *closed], key=lambda manifest: (manifest.partition, manifest.seq))


def _unlisted(
    store: ObjectStore, record: RunRecord, partition: int, *, after: int
) -> Iterator[Manifest]:
    """Read the manifests behind the last one of the listing: some stores list a little late."""
    for seq in itertools.count(after + 1):
        name = object_names.manifest_object(partition, seq)
        if store.get(name) is None:
            return
        yield from manifests.read_all(store, record.uid, [name])


def _close(
    store: ObjectStore,
    record: RunRecord,
    partition: int,
    *,
    seq: int,
    committed: Sequence[Manifest],
) -> Manifest:
    """Close one sequence; what is there already stands."""
    manifest = adoption(store, record, partition, seq=seq, committed=committed)
    reached("reconcile.adopting")
    if manifest is None:
        manifest = manifests.void(record.uid, partition, seq, written_at=utc_now())
    return manifests.write(store, manifest)


def strays(store: ObjectStore, committed: Iterable[Manifest]) -> list[str]:
    """List objects of batches that no manifest names: they do not exist for a reader."""
    named = {
        part.name
        for manifest in committed
        for part in manifests.files_of(manifest)
        if part is not None
    }
    folders = (names.SHARDS, names.FAILURES, names.KEYS)
    found = itertools.chain.from_iterable(store.list(folder) for folder in folders)
    return [stored.name for stored in found if stored.name not in named]


# --- Adoption ------------------------------------------------------------------------------------


class _Row(msgspec.Struct, frozen=True):
    """What a row of a shard or of failures says of its record."""

    key: str
    fingerprint: str
    try_: int = msgspec.field(name="try")
    outcome: Outcome = "completed"
    usage: Usage = Usage(prompt_tokens=0, completion_tokens=0)


_row_decoder = msgspec.json.Decoder(_Row)


class _Orphan(msgspec.Struct, frozen=True):
    """An object of rows without a manifest, and the records that it holds."""

    file: PartFile
    records: list[Record]


def adoption(
    store: ObjectStore,
    record: RunRecord,
    partition: int,
    *,
    seq: int,
    committed: Sequence[Manifest],
) -> Manifest | None:
    """Make a manifest for what a sink stored of a sequence before it died.

    The manifest lists exactly the keys that the objects hold, in a `keys/` of its own where the
    sink's is missing or lists more. An object that overlaps what is committed is a stray.

    Returns:
        None when there is nothing to adopt.
    """
    found = [
        orphan
        for folder in (names.SHARDS, names.FAILURES)
        for orphan in _orphans(store, folder, partition, seq=seq)
    ]
    taken: list[_Orphan] = []
    held = _Held(store, committed, wanted={r.key for orphan in found for r in orphan.records})
    for orphan in found:
        folder = orphan.file.name.partition("/")[0]
        alone = not any(other.file.name.startswith(f"{folder}/") for other in taken)
        if alone and not held.overlaps(orphan.records):
            taken.append(orphan)
            held.add(orphan.records)
    if not taken:
        return None
    return _manifest(store, record, partition, seq=seq, taken=taken)


class _Held:
    """Which records of some keys the store has."""

    def __init__(
        self, store: ObjectStore, committed: Sequence[Manifest], *, wanted: set[bytes]
    ) -> None:
        self._tries: set[tuple[bytes, int]] = set()
        self._completed: set[bytes] = set()
        if wanted:
            for manifest in committed:
                self.add(r for r in catalog.records(store, manifest) if r.key in wanted)

    def add(self, records: Iterable[Record]) -> None:
        for record in records:
            self._tries.add((record.key, record.try_))
            if record.outcome == "completed":
                self._completed.add(record.key)

    def overlaps(self, records: Iterable[Record]) -> bool:
        return any(
            record.key in self._completed or (record.key, record.try_) in self._tries
            for record in records
        )


def _orphans(store: ObjectStore, folder: str, partition: int, *, seq: int) -> Iterator[_Orphan]:
    for stored in store.list(f"{folder}{partition:02d}-{seq:08d}"):
        if object_names.parse_part(stored.name) != (partition, seq):
            continue
        try:
            rows = catalog.fetch(store, stored.name)
            records = [_record(_row_decoder.decode(line)) for line in catalog.lines_of(rows)]
        except (StoreDamagedError, msgspec.MsgspecError, ValueError):
            continue  # it stays a stray, and verify names it
        sha256, digest = digest_name(rows)
        if digest in stored.name and len({r.key for r in records}) == len(records):
            file = PartFile(
                name=stored.name, rows=len(records), bytes=stored.size_bytes, sha256=sha256
            )
            yield _Orphan(file, records)


def _record(row: _Row) -> Record:
    completed = row.outcome == "completed"
    return Record(
        key=bytes.fromhex(row.key),
        fingerprint=bytes.fromhex(row.fingerprint),
        try_=row.try_,
        outcome=row.outcome,
        input_tokens=row.usage.prompt_tokens if completed else 0,
        output_tokens=row.usage.completion_tokens if completed else 0,
    )


def _manifest(
    store: ObjectStore,
    record: RunRecord,
    partition: int,
    *,
    seq: int,
    taken: Sequence[_Orphan],
) -> Manifest:
    records = [r for orphan in taken for r in orphan.records]
    completed = [r for r in records if r.outcome == "completed"]
    files = {orphan.file.name.partition("/")[0] + "/": orphan.file for orphan in taken}
    return Manifest(
        uid=record.uid,
        partition=partition,
        seq=seq,
        shard=files.get(names.SHARDS),
        failures=files.get(names.FAILURES),
        keys=_keys(store, partition, seq, records=records),
        completed=len(completed),
        failed=sum(r.outcome == "failed" for r in records),
        cancelled=sum(r.outcome == "cancelled" for r in records),
        input_tokens=sum(r.input_tokens for r in completed),
        output_tokens=sum(r.output_tokens for r in completed),
        written_at=utc_now(),
    )


def _keys(store: ObjectStore, partition: int, seq: int, *, records: Sequence[Record]) -> PartFile:
    """Find the sink's own list of exactly these records, or write one."""
    lines = sorted(key_line(record) for record in records)
    for stored in store.list(f"{names.KEYS}{partition:02d}-{seq:08d}"):
        try:
            rows = catalog.fetch(store, stored.name)
        except StoreDamagedError:
            continue
        if sorted(catalog.lines_of(rows)) == lines:
            sha256, _ = digest_name(rows)
            return PartFile(
                name=stored.name, rows=len(lines), bytes=stored.size_bytes, sha256=sha256
            )
    rows = b"\n".join([*lines, b""])
    sha256, digest = digest_name(rows)
    data = compress(rows)
    name = object_names.part_object(names.KEYS, partition, seq, digest, "tsv.zst")
    store.put_if_absent(name, data, rows_sha256=sha256)
    return PartFile(name=name, rows=len(lines), bytes=len(data), sha256=sha256)
