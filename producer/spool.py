"""Keep the accepted prompts of one call on disk until it is known what to do with them.

Pass 1 writes, pass 2 and the comparison with the ledger read. So a file is read once: standard
input can be used, and a file that changes while it is read does no harm.

The spool is a folder of the caller's: `rows` (zstd frames of records and prompts) and the
partitions of `producer.repeats`. A kill leaves a folder in the system's temporary directory.
"""

import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import zstandard

from common.errors import BackendError
from common.ids import content_id, fingerprint_of, key_of, typed_id
from common.models import Prompt
from producer.prompts.rows import Row
from producer.repeats import NO_ID, RECORD, Finding, Kind, Repeats

BATCH_ROWS = 1_000
_FRAME_BYTES = 1024 * 1024
_BATCH_BYTES = 8 * 1024 * 1024
_LENGTH = struct.Struct(">I")
_FILE_SHIFT = 40
_LINE = (1 << _FILE_SHIFT) - 1

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Prompt).decode


class _Id(msgspec.Struct):
    id: msgspec.Raw


_decode_id = msgspec.json.Decoder(_Id).decode


class SpooledPrompt(NamedTuple):
    """One distinct prompt: key (16 bytes), fingerprint (8 bytes), JSON of a `Prompt`."""

    key: bytes
    fingerprint: bytes
    prompt: bytes


class Conflict(NamedTuple):
    """A row whose id an earlier row has with another text; lines from 1.

    Attributes:
        source, first_source: Positions in the list of files.
    """

    id_json: bytes
    source: int
    line: int
    first_source: int
    first_line: int
    prompt: bytes


class Spool:
    """Accepted prompts in the order of their files and lines.

    A row is kept once, however many samples are asked of it: they differ in their number and key.

    Args:
        run: Name of the run.
        folder: Where it may write.
        samples: Prompts that each distinct row becomes, one after the other.

    Attributes:
        rows: How many were taken.
    """

    def __init__(self, run: str, folder: Path, *, samples: int = 1) -> None:
        self.rows = 0
        self._samples = samples
        self._run = run
        self._path = folder / "rows"
        self._repeats = Repeats(folder)
        self._frame = bytearray()
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._file: BinaryIO | None = self._path.open("wb")

    def add(self, row: Row, *, source: int, name: str, line: int) -> None:
        """Take a prompt.

        Args:
            row: The accepted row.
            source: Position of its file in the list of files.
            name: Base name of the file, kept with the prompt.
            line: From 1.

        Raises:
            BackendError: The temporary directory is full.
        """
        place = source << _FILE_SHIFT | line
        id_json = row.id_json
        if id_json is None:
            # Most rows without id are the only ones of their content; the others are numbered
            # when all are known.
            id_json = typed_id(content_id(row.endpoint, row.body, 0))
            place |= NO_ID
        prompt = _encode(
            Prompt(
                id=msgspec.Raw(id_json),
                line=line,
                endpoint=row.endpoint,
                body=row.body,
                source=name,
                extra=row.extra,
                turns=row.turns,
            )
        )
        record = RECORD.pack(
            key_of(self._run, id_json), fingerprint_of(row.endpoint, row.body), place
        )
        self._frame += record
        self._frame += _LENGTH.pack(len(prompt))
        self._frame += prompt
        self.rows += 1
        try:
            self._repeats.add(record)
            if len(self._frame) >= _FRAME_BYTES:
                self._write_frame()
        except OSError as error:
            raise no_room(error, self._path) from error

    def finish(self) -> None:
        """End pass 1: from now on the spool is read.

        Raises:
            BackendError: The temporary directory is full.
        """
        try:
            self._write_frame()
            if self._file is not None:
                self._file.close()
            self._file = None
            self._repeats.settle()
        except OSError as error:
            raise no_room(error, self._path) from error

    def close(self) -> None:
        """Leave a spool that is not finished, and will not be read."""
        if self._file is not None:
            # On a full disk closing fails like the write before it, which has been told.
            with suppress(OSError):
                self._file.close()

    @property
    def duplicates(self) -> int:
        """How many rows repeat an earlier one, id and request."""
        return self._repeats.counts[Kind.REPEAT]

    @property
    def conflicts(self) -> int:
        """How many rows have the id of an earlier one and another request."""
        return self._repeats.counts[Kind.CONFLICT]

    @property
    def distinct(self) -> int:
        """How many rows neither repeat nor contradict an earlier one."""
        return self.rows - self.duplicates - self.conflicts

    @property
    def prompts(self) -> int:
        """How many prompts `batches` gives: each sample of a distinct row is one."""
        return self.distinct * self._samples

    def batches(self) -> Iterator[list[SpooledPrompt]]:
        """Give the distinct prompts in order, about BATCH_ROWS at a time, fewer when they are big.

        Of two rows with one id the first stays, and its repeats are left out.
        """
        batch: list[SpooledPrompt] = []
        size = 0
        for prompt in self._prompts():
            batch.append(prompt)
            size += len(prompt.prompt)
            if len(batch) >= BATCH_ROWS or size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _prompts(self) -> Iterator[SpooledPrompt]:
        for _, prompt, finding in self._judged():
            if finding is None:
                found = prompt
            elif finding.kind is Kind.OCCURRENCE:
                found = self._numbered(prompt, finding.value)
            else:
                continue
            yield found
            if self._samples > 1:
                yield from self._further_samples(found)

    def _further_samples(self, first: SpooledPrompt) -> Iterator[SpooledPrompt]:
        id_json = bytes(_decode_id(first.prompt).id)
        for sample in range(1, self._samples):
            yield SpooledPrompt(
                key_of(self._run, id_json, sample),
                first.fingerprint,
                # The first one's JSON leaves the number out, as it does every default.
                b'%b,"sample":%d}' % (first.prompt[:-1], sample),
            )

    def conflicting(self) -> Iterator[Conflict]:
        """Give the rows that are left out because an earlier one has their id, in order."""
        if not self.conflicts:
            return
        for place, prompt, finding in self._judged():
            if finding is not None and finding.kind is Kind.CONFLICT:
                yield Conflict(
                    bytes(_decode(prompt.prompt).id),
                    place >> _FILE_SHIFT,
                    place & _LINE,
                    finding.value >> _FILE_SHIFT,
                    finding.value & _LINE,
                    prompt.prompt,
                )

    def _judged(self) -> Iterator[tuple[int, SpooledPrompt, Finding | None]]:
        findings = self._repeats.findings()
        finding = next(findings, None)
        for place, prompt in self._spooled():
            if finding is not None and finding.place == place:
                yield place, prompt, finding
                finding = next(findings, None)
            else:
                yield place, prompt, None

    def _spooled(self) -> Iterator[tuple[int, SpooledPrompt]]:
        header = RECORD.size + _LENGTH.size
        for frame in self._frames():
            at = 0
            while at < len(frame):
                key, fingerprint, place = RECORD.unpack_from(frame, at)
                (length,) = _LENGTH.unpack_from(frame, at + RECORD.size)
                start = at + header
                at = start + length
                yield place & ~NO_ID, SpooledPrompt(key, fingerprint, frame[start:at])

    def _numbered(self, prompt: SpooledPrompt, occurrence: int) -> SpooledPrompt:
        """Give a row without id, whose content stood before, an id and key of its own."""
        row = _decode(prompt.prompt)
        id_json = typed_id(content_id(row.endpoint, row.body, occurrence))
        numbered = msgspec.structs.replace(row, id=msgspec.Raw(id_json))
        return SpooledPrompt(key_of(self._run, id_json), prompt.fingerprint, _encode(numbered))

    def _write_frame(self) -> None:
        if self._file is not None and self._frame:
            packed = self._compressor.compress(self._frame)
            self._file.write(_LENGTH.pack(len(packed)))
            self._file.write(packed)
            self._frame.clear()

    def _frames(self) -> Iterator[bytes]:
        decompressor = zstandard.ZstdDecompressor()
        with self._path.open("rb") as file:
            while head := file.read(_LENGTH.size):
                (length,) = _LENGTH.unpack(head)
                yield decompressor.decompress(file.read(length))


def no_room(error: OSError, path: Path) -> BackendError:
    """Say that a file of the temporary folder cannot be written."""
    return BackendError(
        f"the spool in {path.parent} cannot be written ({error.strerror}): prompts wait there "
        "until they are queued; free space or set TMPDIR to a larger directory"
    )
