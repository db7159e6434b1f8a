"""Read what a run has in the store: accepted prompts, terminal records, in bounded memory.

A pass over millions of keys goes once through the store and sorts what it finds by the first two
hex digits of the key into 256 bins (`Bins`), first in memory, beyond some MiB in a temporary
folder. Each bin is then small enough to be judged whole: the reader function needs all records of
a key together, and a count of distinct keys needs all of them.
"""

import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from common import manifests, names, object_names
from common.errors import BackendError, StoreDamagedError
from common.models import HexRow, InputRow, Manifest, PartFile, RawRow, Record, Seal
from common.reader import parse_key_line
from common.store import ObjectStore
from common.store.frames import decompress
from common.store.parquet import SUFFIX, from_parquet

T = TypeVar("T")
R = TypeVar("R")

MEMORY_BYTES = 64 << 20
LINE_BYTES = 48
"""What an interpreter keeps of a line besides its text."""

AHEAD = 2
HEX_KEY = 2 * names.KEY_BYTES

# The members of an `InputRow` have fixed places, because the key and the fingerprint have a fixed
# length: a row is cut by position where these marks stand, which is ten times as fast as decoding.
_KEY_MARK, _FP_MARK, _PROMPT_MARK = b'{"key":"', b'","fp":"', b'","prompt":'
_KEY_AT = len(_KEY_MARK)
_FP_AT = _KEY_AT + HEX_KEY + len(_FP_MARK)
_PROMPT_AT = _FP_AT + 16 + len(_PROMPT_MARK)

_row_decoder = msgspec.json.Decoder(InputRow)


class Bins:
    """Lines that begin with a hex key, sorted by its first two digits; memory is bounded.

    Use it as a context manager: what was spilled goes when the block ends.
    """

    def __init__(self, *, memory_bytes: int = MEMORY_BYTES) -> None:
        self._memory_bytes = memory_bytes
        self._held: dict[bytes, list[bytes]] = {}
        self._held_bytes = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def add(self, lines: Iterable[bytes]) -> None:
        """Sort lines in; each holds its newline.

        Raises:
            BackendError: The temporary directory is full.
        """
        held = self._held
        for line in lines:
            lane = held.get(line[:2])
            if lane is None:
                lane = held[line[:2]] = []
            lane.append(line)
            self._held_bytes += len(line) + LINE_BYTES
        if self._held_bytes > self._memory_bytes:
            try:
                self._spill()
            except OSError as error:
                raise BackendError(
                    f"{tempfile.gettempdir()} cannot be written ({error.strerror}): what is read "
                    "of the store is sorted there; free space or set TMPDIR to a larger directory"
                ) from error

    def __iter__(self) -> Iterator[list[bytes]]:
        """Give the lines of one bin after the other, without newlines, in order of adding."""
        for prefix in sorted(self.prefixes()):
            yield self.lines(prefix)

    def prefixes(self) -> set[bytes]:
        """Give the bins that hold something: the two hex digits that their keys begin with."""
        return {path.name.encode() for path in self._files()} | self._held.keys()

    def lines(self, prefix: bytes) -> list[bytes]:
        """Give the lines of one bin, without newlines, in order of adding."""
        return lines_of(self._read(prefix) + b"".join(self._held.get(prefix, ())))

    def _spill(self) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="headrace-")
        for prefix, lines in self._held.items():
            with (Path(self._folder.name) / prefix.decode()).open("ab") as file:
                file.write(b"".join(lines))
        self._held.clear()
        self._held_bytes = 0

    def _files(self) -> Iterable[Path]:
        return Path(self._folder.name).iterdir() if self._folder else ()

    def _read(self, prefix: bytes) -> bytes:
        if self._folder is None:
            return b""
        path = Path(self._folder.name) / prefix.decode()
        return path.read_bytes() if path.exists() else b""

    def __enter__(self) -> Self:
        """Nothing to prepare."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove what was spilled."""
        if self._folder is not None:
            self._folder.cleanup()


def matched(one: Bins, other: Bins) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Give the lines of two sorts bin by bin, so that all of a key come together."""
    for prefix in sorted(one.prefixes() | other.prefixes()):
        yield one.lines(prefix), other.lines(prefix)


def ahead(read: Callable[[T], R], items: Iterable[T]) -> Iterator[tuple[T, R]]:
    """Read items in order, the next two while the caller works on one.

    Args:
        read: Called in other threads; what it raises is raised here, at its item.
        items: What to read.
    """
    with ThreadPoolExecutor(AHEAD, "catalog") as pool:
        coming: deque[tuple[T, Future[R]]] = deque()
        try:
            for item in items:
                coming.append((item, pool.submit(read, item)))
                if len(coming) > AHEAD:
                    first, future = coming.popleft()
                    yield first, future.result()
            while coming:
                first, future = coming.popleft()
                yield first, future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def fetch(store: ObjectStore, name: str) -> bytes:
    """Read the rows of an object that must be there, whatever it is written as.

    Raises:
        StoreDamagedError: It is missing or damaged.
    """
    data = store.get(name)
    if data is None:
        raise StoreDamagedError(f"{store.url}/{name} is missing: restore it from a copy")
    try:
        return rows_of(name, data)
    except StoreDamagedError as error:
        raise StoreDamagedError(f"{store.url}/{name}: {error}") from error


def rows_of(name: str, data: bytes) -> bytes:
    """Give the rows that an object holds, as lines; its name says what it is written as.

    Raises:
        StoreDamagedError: It is damaged.
        UsageError: It is Parquet, and pyarrow is not installed.
    """
    return from_parquet(data) if name.endswith(f".{SUFFIX}") else decompress(data)


def lines_of(data: bytes) -> list[bytes]:
    """Cut rows at newlines and nowhere else: JSON may hold a bare carriage return as a blank."""
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    return lines


# --- Terminal records ----------------------------------------------------------------------------


def manifests_of(store: ObjectStore, uid: str) -> list[Manifest]:
    """Read every manifest of a run, by partition and sequence; voids are among them."""
    found = manifests.listed(store)
    return list(
        manifests.read_all(store, uid, [name for part in sorted(found) for name in found[part]])
    )


def key_lines(store: ObjectStore, manifest: Manifest) -> list[bytes]:
    """Read the `keys/` of one manifest: its lines with their newlines; empty for a void."""
    if manifest.keys is None:
        return []
    return [line + b"\n" for line in lines_of(fetch(store, manifest.keys.name))]


def records(store: ObjectStore, manifest: Manifest) -> list[Record]:
    """Read the records that one manifest commits, in its rows' order."""
    return [parse_key_line(line) for line in key_lines(store, manifest)]


def parsed(lines: Iterable[bytes]) -> Iterator[Record]:
    """Read lines of `keys/`."""
    return map(parse_key_line, lines)


def rows(store: ObjectStore, part: PartFile | None) -> list[bytes]:
    """Read the rows of a shard or of a failures object, without newlines; none for None."""
    return lines_of(fetch(store, part.name)) if part else []


# --- Accepted prompts ----------------------------------------------------------------------------


class InputsListing(msgspec.Struct, frozen=True, kw_only=True):
    """What `inputs/` holds, by name.

    Attributes:
        rows: Names of the objects with prompts, in their order.
        seals: Names of the objects in which producers said that they have ended.
        last_seq: The highest sequence; 0 without any.
        sealing: The name of the last object where that is a seal, else None.
    """

    rows: list[str]
    seals: list[str]
    last_seq: int
    sealing: str | None

    @property
    def names(self) -> list[str]:
        """Every name, sorted."""
        return sorted([*self.rows, *self.seals])


def list_inputs(store: ObjectStore) -> InputsListing:
    """List `inputs/` without reading it; what other tools left there is passed over."""
    prompts: list[str] = []
    seals: list[str] = []
    for found in store.list(names.INPUTS):
        kind = object_names.inputs_kind(found.name)
        if kind:
            (seals if kind == "seal" else prompts).append(found.name)
    last = max([*prompts, *seals], key=inputs_seq, default=None)
    return InputsListing(
        rows=prompts,
        seals=seals,
        last_seq=inputs_seq(last) if last else 0,
        sealing=last if last in seals else None,
    )


def sealed(store: ObjectStore, listing: InputsListing) -> bool:
    """Tell whether the last word of the run's producers was that no more will come."""
    if listing.sealing is None:
        return False
    data = store.get(listing.sealing)
    if data is None:
        raise StoreDamagedError(f"{store.url}/{listing.sealing} was listed and is gone")
    return msgspec.json.decode(data, type=Seal).sealed


def input_rows(store: ObjectStore, name: str) -> Iterator[HexRow]:
    """Read the prompts of one object."""
    return map(split_input_row, lines_of(fetch(store, name)))


def raw_rows(rows: Iterable[HexRow]) -> list[RawRow]:
    """Give rows of `inputs/` as the queue takes them."""
    return [(_unhex(key), _unhex(fingerprint), prompt) for key, fingerprint, prompt in rows]


def _unhex(digits: bytes) -> bytes:
    return bytes.fromhex(digits.decode())


def all_inputs(store: ObjectStore, listing: Iterable[str]) -> Iterator[tuple[str, list[HexRow]]]:
    """Read objects of `inputs/` one after the other: (name, rows as `input_rows` gives them)."""
    for name, data in ahead(lambda name: fetch(store, name), listing):
        yield name, [split_input_row(line) for line in lines_of(data)]


def all_key_lines(
    store: ObjectStore, every: Iterable[Manifest]
) -> Iterator[tuple[Manifest, list[bytes]]]:
    """Read the `keys/` of manifests one after the other: (manifest, lines with newlines)."""
    return ahead(lambda manifest: key_lines(store, manifest), every)


def split_input_row(line: bytes) -> HexRow:
    """Cut an `InputRow`."""
    fp_ends = _FP_AT + 16
    if (
        line.startswith(_KEY_MARK)
        and line[_KEY_AT + HEX_KEY : _FP_AT] == _FP_MARK
        and line[fp_ends:_PROMPT_AT] == _PROMPT_MARK
        and line.endswith(b"}")
    ):
        return line[_KEY_AT : _KEY_AT + HEX_KEY], line[_FP_AT:fp_ends], line[_PROMPT_AT:-1]
    try:
        row = _row_decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise StoreDamagedError(
            f"a line of {names.INPUTS} is no accepted prompt: {error}"
        ) from error
    return row.key.encode(), row.fp.encode(), bytes(row.prompt)


def find_prompt(store: ObjectStore, key: bytes) -> bytes | None:
    """Search `inputs/` for one key (16 bytes): the JSON of its `Prompt`, None if it is not there.

    Reads all of `inputs/` in the worst case.
    """
    wanted = key.hex().encode()
    for name in list_inputs(store).rows:
        for found, _, prompt in input_rows(store, name):
            if found == wanted:
                return prompt
    return None


def inputs_seq(name: str) -> int:
    """Read the sequence back from the name of an object of `inputs/`; 0 for another."""
    digits = name.removeprefix(names.INPUTS).partition("-")[0]
    return int(digits) if digits.isdigit() else 0
