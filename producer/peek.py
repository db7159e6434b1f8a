"""Take a few results of a run to look at: from its result streams, then from its newest shards.

What is not yet stored is the newest, so it comes first; with `spread`, shards of the whole run
give some each. How much is read does not depend on how long the run is, the list of its manifests'
names aside: at most `STREAM_BYTES` of the streams, `MOST_MANIFESTS` manifests and `MOST_OBJECTS`
objects of rows. One prompt is found by its key in the small objects of `keys/`, of its partition
alone.

Rows are shown as they were written: one that a retry has superseded may be among them.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from common import catalog, manifests
from common.errors import StoreDamagedError
from common.ids import key_of
from common.models import Entry, Manifest, RunRecord
from common.store import ObjectStore
from common.streams import newest_entries
from producer.meter import MeterFor

if TYPE_CHECKING:
    import redis

T = TypeVar("T")

STREAM_BYTES = 64 << 20
SEARCHED_BYTES = 256 << 20
MOST_OBJECTS = 4
MOST_SPREAD = 8
MOST_MANIFESTS = 200

IN_REDIS = "redis"
"""Where a row is that no sink has stored yet."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What to take.

    Attributes:
        count: At most so many rows.
        failed: Failures and cancellations instead of completions.
        flag: Only completions with this flag.
        spread: From all over the run instead of its end.
    """

    count: int = 5
    failed: bool = False
    flag: str | None = None
    spread: bool = False


class Found(msgspec.Struct, frozen=True):
    """A row as it was written, and where it is: name of its object, or `IN_REDIS`."""

    where: str
    row: msgspec.Raw


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where to look: either may be out of reach."""

    record: RunRecord
    client: "redis.Redis | None" = None
    store: ObjectStore | None = None


class _Row(msgspec.Struct):
    key: str
    try_: int = msgspec.field(name="try")
    flags: list[str] = []


_rows = msgspec.json.Decoder(_Row)


def take(source: Source, wanted: Wanted) -> list[Found]:
    """Take rows, the newest first.

    Raises:
        RedisUnusableError: Redis went away.
        StoreUnusableError: The store cannot be read.
    """
    taken = _Taken(wanted)
    _take_waiting(source, taken)
    if source.store is None or taken.full:
        return taken.found
    listing = manifests.listed(source.store)
    order = sorted(listing, key=lambda place: (-place[1], place[0]))
    order = _spread(order, MOST_SPREAD) if wanted.spread else order[:MOST_MANIFESTS]
    share = -(-wanted.count // max(len(order), 1)) if wanted.spread else wanted.count
    most = MOST_SPREAD if wanted.spread else MOST_OBJECTS
    names = (name for place in order for name in listing[place])
    for manifest in manifests.read_all(source.store, source.record.uid, names):
        part = manifest.failures if wanted.failed else manifest.shard
        if part is None:
            continue
        rows = catalog.rows(source.store, part)
        taken.add(part.name, _spread(rows, share) if wanted.spread else reversed(rows))
        most -= 1
        if taken.full or not most:
            break
    return taken.found


def find(source: Source, prompt_id: str, sample: int, *, meter: MeterFor) -> Found | None:
    """Find the newest record of one prompt; None when it has none.

    Args:
        source: Where to look.
        prompt_id: As its author gave it; digits may be a number or a string.
        sample: Which of its samples.
        meter: Shows how far it is.
    """
    keys = keys_of(source.record.run, prompt_id, sample)
    for key in keys:
        found = _find_waiting(source, key)
        if found is not None:
            return found
    if source.store is None:
        return None
    partitions = {int.from_bytes(key) % source.record.partitions for key in keys}
    listing = manifests.listed(source.store)
    order = sorted((place for place in listing if place[0] in partitions), key=lambda p: -p[1])
    with meter("searching keys", len(order)) as bar:
        names = (name for place in order for name in listing[place])
        for count, manifest in enumerate(
            manifests.read_all(source.store, source.record.uid, names)
        ):
            bar.show(count)
            found = _find_stored(source.store, manifest, keys)
            if found is not None:
                return found
    return None


def keys_of(run: str, prompt_id: str, sample: int) -> list[bytes]:
    """Give the keys that an id may stand for: as text, and as the number that it looks like."""
    spelled = [msgspec.json.encode(prompt_id)]
    try:
        number = msgspec.json.decode(prompt_id.encode())
    except msgspec.MsgspecError:
        number = None
    if isinstance(number, int | float) and not isinstance(number, bool):
        spelled.append(prompt_id.encode())
    return [key_of(run, each, sample) for each in spelled]


# --- Results that wait in Redis ------------------------------------------------------------------


class _Taken:
    """What was taken, each row once: for an instant one may be in Redis and in the store."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self._known: set[tuple[str, int]] = set()
        self.found: list[Found] = []

    @property
    def full(self) -> bool:
        return len(self.found) >= self.wanted.count

    def add(self, where: str, rows: Iterable[bytes]) -> None:
        """Take what is wanted of these rows."""
        for row in rows:
            if self.full:
                return
            try:
                told = _rows.decode(row)
            except msgspec.MsgspecError as error:
                raise StoreDamagedError(
                    f"{where} holds a row that cannot be read: `producer verify` names it"
                ) from error
            known = (told.key, told.try_)
            if known in self._known or (self.wanted.flag or "") not in ["", *told.flags]:
                continue
            self._known.add(known)
            self.found.append(Found(where, msgspec.Raw(row)))


def _take_waiting(source: Source, taken: _Taken) -> None:
    wanted, client = taken.wanted, source.client
    if client is None:
        return
    entries: list[Entry] = []
    for partition in range(source.record.partitions):
        # Of a spread, Redis is but one of the places.
        most = -(-wanted.count // MOST_SPREAD) if wanted.spread else wanted.count
        left_bytes = STREAM_BYTES // source.record.partitions
        for entry in _entries(client, source.record, partition, left_bytes):
            if (entry.outcome == "completed") is not wanted.failed and _has(entry, wanted.flag):
                entries.append(entry)
                most -= 1
            if not most:
                break
    entries.sort(key=_age, reverse=True)
    taken.add(IN_REDIS, [entry.row for entry in entries])


def _entries(
    client: "redis.Redis", record: RunRecord, partition: int, left_bytes: int
) -> Iterator[Entry]:
    for entry in newest_entries(client, record, partition):
        if not isinstance(entry, Entry):
            continue
        yield entry
        left_bytes -= len(entry.row)
        if left_bytes <= 0:
            return


def _has(entry: Entry, flag: str | None) -> bool:
    return flag is None or flag in _rows.decode(entry.row).flags


def _age(entry: Entry) -> tuple[int, int]:
    milliseconds, _, number = entry.entry_id.partition("-")
    return int(milliseconds), int(number)


def _find_waiting(source: Source, key: bytes) -> Found | None:
    if source.client is None:
        return None
    partition = int.from_bytes(key) % source.record.partitions
    for entry in _entries(source.client, source.record, partition, SEARCHED_BYTES):
        if entry.key == key:
            return Found(IN_REDIS, msgspec.Raw(entry.row))
    return None


# --- Results in the store ------------------------------------------------------------------------


def _find_stored(store: ObjectStore, manifest: Manifest, keys: list[bytes]) -> Found | None:
    wanted = [key.hex() for key in keys]
    heads = tuple(key.encode() for key in wanted)
    lines = [line for line in catalog.key_lines(store, manifest) if line.startswith(heads)]
    if not lines:
        return None
    completed = any(b"\tcompleted\t" in line for line in lines)
    part = manifest.shard if completed else manifest.failures
    if part is None:
        return None
    # A row that merely quotes the key is told apart when it is read.
    quoting = [row for row in catalog.rows(store, part) if any(key in row for key in heads)]
    own = [row for row in quoting if _rows.decode(row).key in wanted]
    return Found(part.name, msgspec.Raw(own[-1])) if own else None


def _spread(items: Sequence[T], most: int) -> list[T]:
    """Take at most so many, evenly from first to last."""
    if len(items) <= most:
        return list(items)
    return [items[at * len(items) // most] for at in range(most)]
