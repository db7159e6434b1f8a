"""Read a run's whole store once, and prove or refute that it holds what it should.

Order of reading: manifests first, then `inputs/`, since prompts are accepted before they can have
results; so a run that goes on meanwhile looks unfinished, and never wrong.

Memory: two objects of rows at a time, and the sorted lines of `common.catalog.Bins`, which spill
to disk; nothing grows with the run.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from common import catalog, manifests, names, object_names
from common.ending import Success
from common.errors import StoreDamagedError
from common.ids import rows_sha256
from common.models import Manifest, PartFile, RunRecord, Seal
from common.sequences import strays
from common.store import ObjectStore
from producer.evidence import (
    AFTER_KEY,
    RowError,
    accepted_line,
    completion_line,
    failure_line,
    recorded_line,
)
from producer.findings import Finding, Findings
from producer.judging import Judge, Tally, not_accepted
from producer.meter import MeterFor
from producer.objects import Loaded, fault_of, load_all, named_after

BIN_BYTES = 24 << 20
"""Each of the three sorts holds so much in memory."""

_manifest_decoder = msgspec.json.Decoder(Manifest)
_seal_decoder = msgspec.json.Decoder(Seal)


class Proof(msgspec.Struct, kw_only=True):
    """What a proof has found besides what is wrong.

    Attributes:
        tally: The run by its store alone.
        sealed: No more prompts will come.
        cancelled: The run was cancelled on purpose.
        success: `_SUCCESS` is there.
        manifests: Commits, voids included.
        voids: Sequences that were given up.
        strays: Objects that no manifest names; they do not exist for a reader.
        rows: Result rows that were read.
        bytes: Compressed bytes of all objects that manifests name.
    """

    tally: Tally
    sealed: bool = False
    cancelled: bool = False
    success: bool = False
    manifests: int = 0
    voids: int = 0
    strays: int = 0
    rows: int = 0
    bytes: int = 0


def prove(
    store: ObjectStore,
    record: RunRecord,
    findings: Findings,
    *,
    meter: MeterFor,
    wanted: catalog.Bins | None = None,
) -> Proof:
    """Read everything and add to `findings` what is wrong.

    Args:
        store: The run's output.
        record: Its run.json.
        findings: Takes what is wrong.
        meter: Shows how far it is.
        wanted: Prompts that the run should have: key TAB fp TAB id, a line each.

    Raises:
        StoreUnusableError: The store cannot be read.
    """
    return _Prover(store, record, findings, meter).go(wanted)


class _Prover:
    """One pass over one store."""

    def __init__(
        self, store: ObjectStore, record: RunRecord, findings: Findings, meter: MeterFor
    ) -> None:
        self._store = store
        self._record = record
        self._findings = findings
        self._meter = meter
        self._proof = Proof(tally=Tally())

    def go(self, wanted: catalog.Bins | None) -> Proof:
        proof = self._proof
        commits = list(self._manifests())
        proof.manifests = len(commits)
        proof.voids = sum(manifest.void for _, manifest in commits)
        listing = catalog.list_inputs(self._store)
        proof.strays = len(strays(self._store, [manifest for _, manifest in commits]))
        proof.cancelled = self._store.get(names.CANCELLED) is not None
        proof.sealed = self._seals(listing)
        with (
            catalog.Bins(memory_bytes=BIN_BYTES) as accepted,
            catalog.Bins(memory_bytes=BIN_BYTES) as recorded,
            catalog.Bins(memory_bytes=BIN_BYTES) as rows,
        ):
            self._read_inputs(listing.rows, accepted)
            self._read_results(commits, recorded, rows)
            judge = Judge([name for name, _ in commits])
            self._judge(judge, (accepted, recorded, rows), wanted)
        proof.tally = judge.tally
        said = self._store.get(names.SUCCESS)
        if said is not None:
            proof.success = True
            for what in self._differences(said, listing):
                self._add("success", names.SUCCESS, what)
        return proof

    def _differences(self, said: bytes, listing: catalog.InputsListing) -> Iterator[str]:
        """Compare what `_SUCCESS` says with what was found."""
        try:
            success = msgspec.json.decode(said, type=Success)
        except msgspec.MsgspecError:
            yield "cannot be read"
            return
        tally = self._proof.tally
        found = {
            "uid": self._record.uid,
            "total": tally.accepted,
            "completed": tally.outcomes["completed"],
            "failed": tally.outcomes["failed"],
            "cancelled": tally.outcomes["cancelled"],
            "output_tokens": tally.output_tokens,
            "manifests": self._proof.manifests - self._proof.voids,
        }
        for what, value in found.items():
            if getattr(success, what) != value:
                yield f"it says {what} {getattr(success, what)}, there is {value}"
        covered, there = set(success.inputs), set(listing.names)
        yield from (f"it names {name}, which is missing" for name in sorted(covered - there))
        if there - covered:
            yield f"it is void: it does not cover {len(there - covered)} objects of {names.INPUTS}"

    def _judge(
        self,
        judge: Judge,
        sorts: tuple[catalog.Bins, catalog.Bins, catalog.Bins],
        wanted: catalog.Bins | None,
    ) -> None:
        found = [*sorts, wanted] if wanted else sorts
        prefixes = sorted(set[bytes]().union(*(sort.prefixes() for sort in found)))
        with self._meter("comparing", len(prefixes)) as bar:
            for number, prefix in enumerate(prefixes):
                accepted, recorded, rows = (sort.lines(prefix) for sort in sorts)
                self._all(judge.judge(accepted, recorded, rows))
                if wanted:
                    self._all(not_accepted(wanted.lines(prefix), accepted))
                bar.show(number)
        self._all(judge.settle())

    def _add(self, kind: str, name: str, detail: str) -> None:
        self._findings.add(Finding(kind=kind, object=name, detail=detail))

    def _all(self, found: Iterator[Finding]) -> None:
        for finding in found:
            self._findings.add(finding)

    # --- Manifests -------------------------------------------------------------------------------

    def _manifests(self) -> Iterator[tuple[str, Manifest]]:
        """Read all manifests by partition and sequence, and look for gaps."""
        listed = manifests.listed(self._store)
        for place in sorted(listed):
            for name in listed[place]:
                manifest = self._manifest(name, place)
                if manifest is not None:
                    yield name, manifest
        for partition in sorted({place[0] for place in listed}):
            there = {seq for part, seq in listed if part == partition}
            for seq in sorted(set(range(1, max(there))) - there):
                name = object_names.manifest_object(partition, seq)
                self._add("manifest", name, "is missing, though later ones are there")

    def _manifest(self, name: str, place: tuple[int, int]) -> Manifest | None:
        try:
            manifest = _manifest_decoder.decode(self._store.get(name) or b"")
        except msgspec.MsgspecError:
            self._add("manifest", name, "cannot be read")
            return None
        if manifest.uid != self._record.uid:
            self._add("manifest", name, f"belongs to another run, uid {manifest.uid}")
            return None
        if (manifest.partition, manifest.seq) != place or place[0] >= self._record.partitions:
            self._add("manifest", name, "is not the sequence that it is named after")
        if manifest.void and any(manifests.files_of(manifest)):
            self._add("manifest", name, "is void and names objects")
        return manifest

    # --- inputs/ ---------------------------------------------------------------------------------

    def _seals(self, listing: catalog.InputsListing) -> bool:
        """Check every seal; tells whether the last word was that no more will come."""
        sealed = False
        for name in listing.seals:
            data = self._store.get(name) or b""
            try:
                seal = _seal_decoder.decode(data)
            except msgspec.MsgspecError:
                self._add("object", name, "cannot be read")
                continue
            if not named_after(name, rows_sha256(data)):
                self._add("object", name, "it does not hold what its name says")
            sealed = seal.sealed if name == listing.sealing else sealed
        return sealed

    def _read_inputs(self, objects: Sequence[str], accepted: catalog.Bins) -> None:
        with self._meter("reading inputs", None) as bar:
            count = 0
            for loaded in load_all(self._store, objects):
                if loaded.rows is None:
                    self._add("object", loaded.name, loaded.fault)
                    continue
                if not named_after(loaded.name, loaded.sha256):
                    self._add("object", loaded.name, "its rows are not those that its name says")
                rows = catalog.lines_of(loaded.rows)
                accepted.add(self._lines(loaded.name, rows, _accepted))
                count += len(rows)
                bar.show(count)

    # --- Results ---------------------------------------------------------------------------------

    def _read_results(
        self,
        commits: Sequence[tuple[str, Manifest]],
        recorded: catalog.Bins,
        rows: catalog.Bins,
    ) -> None:
        parts = [part for _, manifest in commits for part in manifests.files_of(manifest) if part]
        total = sum(manifests.rows_of(manifest) for _, manifest in commits)
        loaded = load_all(self._store, [part.name for part in parts])
        with self._meter("reading results", total) as bar:
            for number, (name, manifest) in enumerate(commits):
                for part in filter(None, manifests.files_of(manifest)):
                    if part is manifest.keys:
                        lines = self._part(part, next(loaded), number)
                        recorded.add(lines)
                        self._counts(name, manifest, lines)
                    else:
                        rows.add(self._part(part, next(loaded), number))
                        bar.show(self._proof.rows)

    def _part(self, part: PartFile, loaded: Loaded, number: int) -> list[bytes]:
        """Make the lines of one object of manifest `number`, and check it against that."""
        if loaded.rows is None:
            self._add("object", part.name, loaded.fault)
            return []
        make = _maker(part.name, token_ids=self._record.params.keep_token_ids)
        found = catalog.lines_of(loaded.rows)
        lines = list(self._lines(part.name, found, lambda row: make(row, number)))
        fault = fault_of(part, loaded, rows=len(found))
        if fault:
            self._add("object", part.name, fault)
        if make is not recorded_line:
            self._proof.rows += len(found)
            if fault:
                self._all(_unproven(part.name, lines))
        self._proof.bytes += part.bytes
        return lines

    def _lines(
        self, name: str, rows: Sequence[bytes], make: Callable[[bytes], bytes]
    ) -> Iterator[bytes]:
        for at, row in enumerate(rows, 1):
            try:
                yield make(row)
            except (RowError, StoreDamagedError) as error:
                self._add("altered", name, f"line {at}: {error}")

    def _counts(self, name: str, manifest: Manifest, recorded: Sequence[bytes]) -> None:
        if not recorded:
            return  # said already: its list of keys is missing
        outcomes = [line.split(b"\t", 4)[3] for line in recorded]
        listed = [outcomes.count(word) for word in (b"completed", b"failed", b"cancelled")]
        if listed != [manifest.completed, manifest.failed, manifest.cancelled]:
            self._add("manifest", name, "its counts are not those of its list of keys")


def _accepted(row: bytes) -> bytes:
    return accepted_line(*catalog.split_input_row(row))


def _maker(name: str, *, token_ids: bool) -> Callable[[bytes, int], bytes]:
    if name.startswith(names.KEYS):
        return recorded_line
    if name.startswith(names.SHARDS):
        return partial(completion_line, token_ids=token_ids)
    return failure_line


def _unproven(name: str, lines: Sequence[bytes]) -> Iterator[Finding]:
    for line in lines:
        id_json = msgspec.Raw(line[:-1].rpartition(b"\t")[2])
        yield Finding(kind="unproven", key=line[:AFTER_KEY].decode(), id=id_json, object=name)
