"""Write a run's results in the order of its input: the current record of each key, once.

    1. inputs/ and keys/, joined by key     which row of which shard counts, and its place
    2. shards/ (and failures/)              each read once, its rows put to their places
    3. the rows, in order                   to the file

Memory: two objects of rows at a time, and what `catalog.Bins` and `producer.ordering` hold before
they spill to the temporary directory.
"""

from collections.abc import Iterator, Sequence

import msgspec

from common import catalog
from common.errors import NotDoneError, StoreDamagedError
from common.models import Manifest, PartFile, Record, RunRecord
from common.reader import parse_key_line, rank
from common.store import ObjectStore
from producer.meter import Meter, MeterFor
from producer.objects import load_all
from producer.ordering import Ordering
from producer.outfile import whole_file, write_lines

BIN_BYTES = 12 << 20
"""Each sort holds so much in memory, and some three times as much with what Python adds."""

GROUPS = 256
SMALLEST_GROUP = 8
"""Manifests are worked on in groups: what is known of the rows of one group fits in memory."""


class Exported(msgspec.Struct, kw_only=True):
    """What came of an export.

    Attributes:
        accepted: Distinct prompts.
        completed: Rows written.
        failed: Prompts whose current record is a failure or a cancellation.
        sealed: No more prompts will come.
    """

    accepted: int = 0
    completed: int = 0
    failed: int = 0
    sealed: bool = False

    @property
    def whole(self) -> bool:
        """Every prompt of the run is completed, and in the file."""
        return self.sealed and self.completed == self.accepted


class _Row(msgspec.Struct):
    """Which record a row is of."""

    key: str
    try_: int = msgspec.field(name="try")


_rows = msgspec.json.Decoder(_Row)


def export(
    record: RunRecord, store: ObjectStore, *, to: str, failures: str | None, meter: MeterFor
) -> Exported:
    """Write the completions of a run to a file, and its failures to another.

    Args:
        record: Its run.json.
        store: Its output.
        to: File for completions, `-` for stdout; by its ending .gz or .zst it is compressed.
        failures: Likewise for failures and cancellations; None leaves them out.
        meter: Shows how far it is.

    Raises:
        NotDoneError: The store lacks rows that it says it has.
        StoreDamagedError: An object is missing or damaged.
        BackendError: The store or a file cannot be used.
    """
    export_ = Exported()
    manifests = catalog.manifests_of(store, record.uid)
    listing = catalog.list_inputs(store)
    export_.sealed = catalog.sealed(store, listing)
    with catalog.Bins(memory_bytes=BIN_BYTES) as wanted:
        choice = _Choice(told=export_, failures=failures is not None, manifests=manifests)
        _choose(store, choice, inputs=listing.rows, wanted=wanted, meter=meter)
        sizes = _row_bytes(manifests)
        with Ordering(row_bytes=sizes) as completions, Ordering(row_bytes=sizes) as others:
            with meter("reading results", export_.completed) as bar:
                for count in _collect(store, manifests, wanted, into=(completions, others)):
                    bar.show(count)
            with whole_file(to) as write, meter("writing", completions.rows) as bar:
                write_lines(write, _shown(completions, bar))
            if failures:
                with whole_file(failures) as write:
                    write_lines(write, others)
    return export_


def _shown(rows: Ordering, bar: Meter) -> Iterator[bytes]:
    for count, row in enumerate(rows):
        yield row
        if not count % 1_000:
            bar.show(count)


# --- Which row counts ----------------------------------------------------------------------------


class _Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What is chosen from: `told` takes the counts; `failures` are wanted too."""

    told: Exported
    failures: bool
    manifests: Sequence[Manifest]

    def group(self, manifest: int) -> int:
        """Give the group in which a manifest is worked on."""
        return manifest // max(SMALLEST_GROUP, -(-len(self.manifests) // GROUPS))


def _choose(
    store: ObjectStore,
    choice: _Choice,
    *,
    inputs: Sequence[str],
    wanted: catalog.Bins,
    meter: MeterFor,
) -> None:
    """Find the current record of every accepted key, and note where its row is and belongs.

    A line of `wanted`: group (2 hex digits) manifest TAB key TAB try TAB place.
    """
    with (
        catalog.Bins(memory_bytes=BIN_BYTES) as places,
        catalog.Bins(memory_bytes=BIN_BYTES) as records,
    ):
        with meter("reading inputs", None) as bar:
            place = 0
            for name in inputs:
                rows = list(catalog.input_rows(store, name))
                places.add(b"%b\t%d\n" % (row[0], place + at) for at, row in enumerate(rows))
                place += len(rows)
                bar.show(place)
        for number, manifest in enumerate(choice.manifests):
            lines = catalog.key_lines(store, manifest)
            records.add(b"%b\t%d\n" % (line[:-1], number) for line in lines)
        for placed, recorded in catalog.matched(places, records):
            wanted.add(_chosen(placed, recorded, choice))


def _chosen(
    placed: Sequence[bytes], recorded: Sequence[bytes], choice: _Choice
) -> Iterator[bytes]:
    first: dict[bytes, bytes] = {}
    for line in placed:
        key, _, place = line.partition(b"\t")
        first.setdefault(key, place)
    choice.told.accepted += len(first)
    current: dict[bytes, tuple[Record, int]] = {}
    for line in recorded:
        text, _, number = line.rpartition(b"\t")
        record = parse_key_line(text)
        key = text[: catalog.HEX_KEY]
        known = current.get(key)
        if key in first and (known is None or rank(record) > rank(known[0])):
            current[key] = record, int(number)
    for key, (record, manifest) in current.items():
        completed = record.outcome == "completed"
        choice.told.completed += completed
        choice.told.failed += not completed
        if completed or choice.failures:
            fixed = (choice.group(manifest), manifest, key, record.try_, first[key])
            yield b"%02x%d\t%b\t%d\t%b\n" % fixed


def _row_bytes(manifests: Sequence[Manifest]) -> int:
    """Guess how long a row is: text shrinks to about a quarter."""
    shards = [manifest.shard for manifest in manifests if manifest.shard]
    rows = sum(shard.rows for shard in shards)
    return 4 * sum(shard.bytes for shard in shards) // rows if rows else 1


# --- The rows ------------------------------------------------------------------------------------

_Places = dict[tuple[bytes, int], int]
"""(key in hex, try) -> place."""


def _collect(
    store: ObjectStore,
    manifests: Sequence[Manifest],
    wanted: catalog.Bins,
    *,
    into: tuple[Ordering, Ordering],
) -> Iterator[int]:
    """Read every shard once, and put the wanted rows to their places; gives how many there are."""
    for prefix in sorted(wanted.prefixes()):
        places = _places(wanted.lines(prefix))
        parts = [
            (number, part, ordering)
            for number in sorted(places)
            for part, ordering in zip(_parts(manifests[number]), into, strict=True)
            if part
        ]
        loaded = load_all(store, [part.name for _, part, _ in parts])
        for (number, part, ordering), found in zip(parts, loaded, strict=True):
            if found.rows is None:
                raise StoreDamagedError(
                    f"{store.url}/{part.name} {found.fault}: `producer verify` names what it held"
                )
            _take(catalog.lines_of(found.rows), places[number], ordering)
            yield into[0].rows
        lacking = sum(map(len, places.values()))
        if lacking:
            raise NotDoneError(
                f"{store.url} lacks the rows of {lacking:,} results: `producer verify` names them"
            )


def _parts(manifest: Manifest) -> tuple[PartFile | None, PartFile | None]:
    return manifest.shard, manifest.failures


def _places(lines: Sequence[bytes]) -> dict[int, _Places]:
    places: dict[int, _Places] = {}
    for line in lines:
        number, key, try_, place = line[2:].split(b"\t")
        places.setdefault(int(number), {})[key, int(try_)] = int(place)
    return places


def _take(rows: Sequence[bytes], places: _Places, ordering: Ordering) -> None:
    for row in rows:
        found = _rows.decode(row)
        place = places.pop((found.key.encode(), found.try_), None)
        if place is not None:
            ordering.add(place, row)
