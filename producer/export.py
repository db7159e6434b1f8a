"""Write a run's results as one file: the current record of each key, once.

    1. inputs/ and keys/, joined by key     which row of which shard counts, and its place
    2. shards/ (and failures/)              each read once, its rows put to their places
    3. the rows, in order                   to the file, as its format wants them

A place is that of the prompt in the input, or that of the result in the result streams.

Memory: two objects of rows at a time, and what `catalog.Bins` and `producer.ordering` hold before
they spill to the temporary directory.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from common import catalog
from common.cancelling import is_cancelled
from common.errors import NotDoneError, StoreDamagedError, UsageError
from common.models import Manifest, PartFile, Record, RunRecord
from common.reader import parse_key_line, rank
from common.store import ObjectStore
from producer.formats import Format, make_format
from producer.meter import Meter, MeterFor
from producer.objects import load_all
from producer.ordering import Ordering
from producer.outfile import check_target, is_stdout, whole_file, write_lines

BIN_BYTES = 12 << 20
"""Each sort holds so much in memory, and some three times as much with what Python adds."""

GROUPS = 256
SMALLEST_GROUP = 8
"""Manifests are worked on in groups: what is known of the rows of one group fits in memory."""


Order = Literal["input", "completed"]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be written.

    Attributes:
        to: File for completions, `-` for stdout; by its ending .gz or .zst it is compressed.
        failures: Likewise for failures and cancellations; None leaves them out.
        format: One of `producer.formats.FORMATS`.
        order: That of the input, or that in which results came: shard after shard, which with
            several partitions is exact within each of them.
        token_ids: Write them where the format has a place for them.
    """

    to: str
    failures: str | None = None
    format: str = "jsonl"
    order: Order = "input"
    token_ids: bool = True


class Exported(msgspec.Struct, kw_only=True):
    """What came of an export.

    Attributes:
        accepted: Distinct prompts.
        completed: Prompts whose current record is a completion.
        failed: Prompts whose current record is a failure or a cancellation.
        sealed: No more prompts will come.
        written: Completions in the file.
        lines: Its lines or rows.
        skipped: Completions that the format cannot hold, by the reason.
        notes: Sentences about the file, for people.
    """

    accepted: int = 0
    completed: int = 0
    failed: int = 0
    sealed: bool = False
    written: int = 0
    lines: int = 0
    skipped: Counter[str] = msgspec.field(default_factory=Counter)
    notes: list[str] = []

    @property
    def whole(self) -> bool:
        """Every prompt of the run is completed, and in the file."""
        return self.sealed and self.written == self.accepted


class _Row(msgspec.Struct):
    """Which record a row is of."""

    key: str
    try_: int = msgspec.field(name="try")


_rows = msgspec.json.Decoder(_Row)


def export(record: RunRecord, store: ObjectStore, target: Target, *, meter: MeterFor) -> Exported:
    """Write the completions of a run to a file, and its failures to another.

    Args:
        record: Its run.json.
        store: Its output.
        target: What to write.
        meter: Shows how far it is.

    Raises:
        NotDoneError: The store lacks rows that it says it has.
        StoreDamagedError: An object is missing or damaged.
        BackendError: The store or a file cannot be used.
        UsageError: A file cannot be, or none of the completions fits into the format.
    """
    form = make_format(target.format, token_ids=target.token_ids)
    form.check_name(target.to)
    for name in (target.to, target.failures):
        if name and not is_stdout(name):
            check_target(name)
    told = Exported()
    manifests = catalog.manifests_of(store, record.uid)
    listing = catalog.list_inputs(store)
    told.sealed = catalog.sealed(store, listing) or is_cancelled(store)
    with catalog.Bins(memory_bytes=BIN_BYTES) as wanted:
        choice = _Choice(
            told=told, failures=bool(target.failures), order=target.order, manifests=manifests
        )
        _choose(store, choice, inputs=listing.rows, wanted=wanted, meter=meter)
        sizes = _row_bytes(manifests)
        with Ordering(row_bytes=sizes) as completions, Ordering(row_bytes=sizes) as others:
            into = (_Taker(completions, form.look), _Taker(others))
            with meter("reading results", told.completed) as bar:
                for count in _collect(store, manifests, wanted, into=into):
                    bar.show(count)
            _write(target, form, completions, meter)
            if target.failures:
                with whole_file(target.failures) as file:
                    write_lines(file.write, map(form.failure, others))
    tally = form.tally
    told.written, told.lines = tally.completions, tally.lines
    told.skipped, told.notes = tally.skipped, tally.notes
    return told


def _write(target: Target, form: Format, rows: Ordering, meter: MeterFor) -> None:
    with whole_file(target.to) as file, meter("writing", rows.rows) as bar:
        form.write(file, _shown(rows, bar))
        if form.tally.skipped and not form.tally.completions:
            [(why, count), *_] = form.tally.skipped.most_common()
            raise UsageError(
                f"--format {target.format} holds none of this run's {rows.rows:,} completions: "
                f"{count:,} {why}; --format jsonl, parquet and openai hold them"
            )


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
    order: Order
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
        for number, start in enumerate(_starts(choice.manifests)):
            lines = catalog.key_lines(store, choice.manifests[number])
            records.add(
                b"%b\t%d\t%d\n" % (line[:-1], number, at) for at, line in enumerate(lines, start)
            )
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
    current: dict[bytes, tuple[Record, int, bytes]] = {}
    for line in recorded:
        text, number, stored = line.rsplit(b"\t", 2)
        record = parse_key_line(text)
        key = text[: catalog.HEX_KEY]
        known = current.get(key)
        if key in first and (known is None or rank(record) > rank(known[0])):
            current[key] = record, int(number), stored
    for key, (record, manifest, stored) in current.items():
        completed = record.outcome == "completed"
        choice.told.completed += completed
        choice.told.failed += not completed
        if completed or choice.failures:
            place = stored if choice.order == "completed" else first[key]
            fixed = (choice.group(manifest), manifest, key, record.try_, place)
            yield b"%02x%d\t%b\t%d\t%b\n" % fixed


def _starts(manifests: Sequence[Manifest]) -> list[int]:
    """Give the place of each manifest's first record among all, in the order of their coming.

    The first entry's id begins with its instant; a manifest without entries (an adopted shard)
    comes after the one before it.
    """
    at_ms, came = 0, list[tuple[int, int, int]]()
    for number, manifest in enumerate(manifests):
        if manifest.seq == 1:
            at_ms = 0
        at_ms = int(manifest.first.partition("-")[0] or at_ms)
        came.append((at_ms, manifest.partition, number))
    starts, place = [0] * len(manifests), 0
    for _, _, number in sorted(came):
        keys = manifests[number].keys
        starts[number] = place
        place += keys.rows if keys else 0
    return starts


def _row_bytes(manifests: Sequence[Manifest]) -> int:
    """Guess how long a row is: text shrinks to about a quarter."""
    shards = [manifest.shard for manifest in manifests if manifest.shard]
    rows = sum(shard.rows for shard in shards)
    return 4 * sum(shard.bytes for shard in shards) // rows if rows else 1


# --- The rows ------------------------------------------------------------------------------------

_Places = dict[tuple[bytes, int], int]
"""(key in hex, try) -> place."""


def _unseen(_row: bytes) -> None:
    pass


class _Taker(NamedTuple):
    """Where rows go, and who sees them on their way."""

    ordering: Ordering
    look: Callable[[bytes], None] = _unseen

    def take(self, rows: Sequence[bytes], places: _Places) -> None:
        """Put the rows that have a place there."""
        for row in rows:
            found = _rows.decode(row)
            place = places.pop((found.key.encode(), found.try_), None)
            if place is not None:
                self.ordering.add(place, row)
                self.look(row)


def _collect(
    store: ObjectStore,
    manifests: Sequence[Manifest],
    wanted: catalog.Bins,
    *,
    into: tuple[_Taker, _Taker],
) -> Iterator[int]:
    """Read every shard once, and put the wanted rows to their places; gives how many there are."""
    for prefix in sorted(wanted.prefixes()):
        places = _places(wanted.lines(prefix))
        parts = [
            (number, part, taker)
            for number in sorted(places)
            for part, taker in zip(_parts(manifests[number]), into, strict=True)
            if part
        ]
        loaded = load_all(store, [part.name for _, part, _ in parts])
        for (number, part, taker), found in zip(parts, loaded, strict=True):
            if found.rows is None:
                raise StoreDamagedError(
                    f"{store.url}/{part.name} {found.fault}: `producer verify` names what it held"
                )
            taker.take(catalog.lines_of(found.rows), places[number])
            yield into[0].ordering.rows
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
