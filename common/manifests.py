"""The store's commit records: write one, read them.

A sequence of a partition is closed only by its manifest: a commit, an adoption, or `void`. So the
manifests of a partition have no gaps, and sequence s + 1 is used only when that of s exists.

Where the store does not honour conditional writes a manifest's name ends in its identity, so that
two writers of one sequence cannot overwrite each other; then one sequence may have two manifests,
and a reader takes both.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from common import names, object_names
from common.errors import ConflictError, StoreDamagedError
from common.models import Manifest, PartFile
from common.store import ObjectStore

_decoder = msgspec.json.Decoder(Manifest)


def identity(manifest: Manifest) -> str:
    """Hash what a manifest commits (64 hex digits), leaving out when and how it was written."""
    parts = [part.sha256 if part else "-" for part in files_of(manifest)]
    head = f"{manifest.uid} {manifest.partition} {manifest.seq} {'void' if manifest.void else ''}"
    return hashlib.sha256(" ".join([head, *parts]).encode()).hexdigest()


def files_of(manifest: Manifest) -> Sequence[PartFile | None]:
    """Give the objects of a batch, in the order in which they are written."""
    return manifest.shard, manifest.failures, manifest.keys


def rows_of(manifest: Manifest) -> int:
    """Count the records that a manifest commits."""
    return manifest.completed + manifest.failed + manifest.cancelled


def bytes_of(manifest: Manifest) -> int:
    """Add up the bytes of the objects that a manifest commits."""
    return sum(part.bytes for part in files_of(manifest) if part)


def void(uid: str, partition: int, seq: int, *, written_at: str) -> Manifest:
    """Make the manifest that closes a sequence without committing anything."""
    return Manifest(uid=uid, partition=partition, seq=seq, void=True, written_at=written_at)


def write(store: ObjectStore, manifest: Manifest) -> Manifest:
    """Close a sequence: from then on what the manifest names exists for readers.

    Returns:
        The manifest that stands: this one, or another that was there before.

    Raises:
        StoreUnusableError: Not known whether it was written; the same call again finds out.
    """
    digest = identity(manifest)
    # Looked for under both kinds of names, and whatever the store promises: another sink's probe
    # may have found otherwise, or the store have changed. It is no guard against a writer at the
    # same instant: hence the condition, or the name below.
    others = list(of_sequence(store, manifest.partition, manifest.seq))
    if others:
        return next((other for other in others if identity(other) == digest), others[0])
    ending = None if store.conditional else digest[:16]
    name = object_names.manifest_object(manifest.partition, manifest.seq, ending)
    if store.put_if_absent(name, msgspec.json.encode(manifest), rows_sha256=digest):
        return manifest
    stands = read(store, name)
    if stands is None:
        raise StoreDamagedError(f"{store.url}/{name} came and went while it was written")
    return stands


def of_sequence(store: ObjectStore, partition: int, seq: int) -> Iterator[Manifest]:
    """Read every manifest of one sequence."""
    for found in store.list(object_names.manifest_object(partition, seq).removesuffix(".json")):
        manifest = read(store, found.name)
        if manifest is not None and object_names.parse_part(found.name) == (partition, seq):
            yield manifest


def read(store: ObjectStore, name: str) -> Manifest | None:
    """Read one manifest; None when it does not exist.

    Raises:
        StoreDamagedError: It is no manifest.
    """
    data = store.get(name)
    if data is None:
        return None
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise StoreDamagedError(
            f"{store.url}/{name} is no manifest of Headrace ({error}): restore it from a version "
            "or a copy"
        ) from error


def listed(store: ObjectStore) -> dict[tuple[int, int], list[str]]:
    """List the names of all manifests by (partition, sequence); reads none of them."""
    found: dict[tuple[int, int], list[str]] = {}
    for stored in store.list(names.MANIFEST):
        part = object_names.parse_part(stored.name)
        if part is not None:
            found.setdefault(part, []).append(stored.name)
    return found


def read_all(store: ObjectStore, uid: str, listing: Iterable[str]) -> Iterator[Manifest]:
    """Read manifests by name.

    Raises:
        ConflictError: One belongs to another run that shares the output.
    """
    for name in listing:
        manifest = read(store, name)
        if manifest is None:
            raise StoreDamagedError(f"{store.url}/{name} was listed and is gone")
        if manifest.uid != uid:
            raise ConflictError(
                f"{store.url}/{name} belongs to run uid {manifest.uid}, this run has uid {uid}: "
                "two runs must not share an output"
            )
        yield manifest
