"""Read files of prompts row by row and give each row its verdict.

A row is a line, or a row of Parquet, whose number then stands for the line's.

lines read = accepted + blank + rejected; which of the accepted ones are repeats is found out
later, by the spool, since it takes all of them.

Failures:
    a row is wrong              told to `on_reject`; the others are not concerned
    a file is no JSON lines,    FileRefusedError with one message, not one for each line
    or ends too early
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from common.errors import UsageError
from producer.prompts.broken import is_complete, is_cut_open
from producer.prompts.decompress import PARQUET, unpacked
from producer.prompts.lines import LINE_LIMIT_BYTES, Oversize, line_batches
from producer.prompts.rows import Row, RowChecker
from producer.prompts.verdicts import (
    FileRefusedError,
    MissingMaxTokensError,
    Reject,
    RowRejectedError,
    shown,
)

STDIN = "-"
_READ_BYTES = 256 * 1024
"""Few enough that a bar moves while well compressed rows are read."""
_ARRAY_ADVICE = (
    "is a JSON array, expected one object per line: convert it, for example with jq -c '.[]'"
)
_PRETTY_ADVICE = (
    "is JSON over several lines, expected one object per line: convert it, for example with "
    "jq -c ."
)
_TEXT_ADVICE = "is not JSON lines: expected one JSON object per line"

_encode = msgspec.json.Encoder().encode

OnReject = Callable[[Reject, bytes | None], None]
"""Is told of each rejected row, with the line's bytes where they were kept."""


@contextmanager
def open_input(source: str) -> Iterator[BinaryIO]:
    """Open a file, or standard input for `-`, which is left open.

    Raises:
        UsageError: It is missing, a directory, or may not be read.
    """
    if source == STDIN:
        yield sys.stdin.buffer
        return
    try:
        stream = Path(source).open("rb", buffering=0)  # noqa: SIM115 - closed below, errors told apart
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror}") from error
    with stream:
        yield stream


def _ignore(_read_bytes: int) -> None:
    pass


class FileReader:
    """Read one file to its end.

    Args:
        source: The file as it is named, `-` for stdin.
        checker: Turns rows into requests.
        on_reject: See `OnReject`.
        on_read: Is told `read_bytes` when it has grown.

    Attributes:
        read_bytes: How much was read, as stored: for a progress bar. Of Parquet the share of its
            rows, since nobody knows which bytes hold them.
        blank, rejected: Lines so far.
    """

    def __init__(
        self,
        source: str,
        checker: RowChecker,
        *,
        on_reject: OnReject,
        on_read: Callable[[int], None] = _ignore,
    ) -> None:
        self.source = source
        self._on_read = on_read
        self.read_bytes = 0
        self.blank = 0
        self.rejected = 0
        self._checker = checker
        self._on_reject = on_reject
        self._lines = 0
        self._array: tuple[RowRejectedError, bytes] | None = None
        self._like_json = False

    def rows(self) -> Iterator[tuple[int, Row]]:
        """Give the accepted rows with their line numbers, from 1.

        Raises:
            FileRefusedError: It is not JSON lines, or ends too early; nothing of it counts.
            UsageError: It cannot be read, or a row has no limit of tokens and no flag gives one.
        """
        with open_input(self.source) as stream:
            parquet, chunks = unpacked(self._chunks(stream), self.source)
            if parquet:
                yield from self._parquet_rows(stream, chunks)
                return
            for batch in line_batches(chunks):
                if isinstance(batch, Oversize):
                    self._oversize(batch)
                else:
                    yield from self._check(batch)
        self._end()

    def _chunks(self, stream: BinaryIO) -> Iterator[bytes]:
        try:
            while chunk := stream.read(_READ_BYTES):
                self.read_bytes += len(chunk)
                self._on_read(self.read_bytes)
                yield chunk
        except OSError as error:
            raise UsageError(f"{shown(self.source)} cannot be read: {error.strerror}") from error

    def _parquet_rows(
        self, stream: BinaryIO, chunks: Iterator[bytes]
    ) -> Iterator[tuple[int, Row]]:
        # Slow to import, and most files are none.
        from producer.prompts.parquet import ParquetInput, on_disk  # noqa: PLC0415

        with ExitStack() as open_files:
            if not _begins_as_parquet(stream):
                stream = open_files.enter_context(on_disk(chunks))
            file = ParquetInput(stream, self.source)
            size_bytes = stream.seek(0, 2)
            for batch in file.batches():
                yield from self._check_objects(batch)
                share_bytes = size_bytes * self._lines // file.rows
                self.read_bytes = max(self.read_bytes, share_bytes)
                self._on_read(self.read_bytes)

    def _check_objects(
        self, rows: Iterable[dict[str, Any] | RowRejectedError]
    ) -> Iterator[tuple[int, Row]]:
        for found in rows:
            self._lines += 1
            try:
                if isinstance(found, RowRejectedError):
                    raise found
                row = self._checker.check_object(found)
            except RowRejectedError as error:
                line = None if error.row is None else _encode(error.row)
                self._tell(error, line, number=self._lines)
            except MissingMaxTokensError:
                raise self._no_limit(self._lines) from None
            else:
                yield self._lines, row

    def _check(self, lines: list[bytes]) -> Iterator[tuple[int, Row]]:
        check = self._checker.check
        number = self._lines
        for line in lines:
            number += 1
            try:
                row = check(line)
            except RowRejectedError as error:
                self._lines = number
                self._reject(error, line)
            except MissingMaxTokensError:
                raise self._no_limit(number) from None
            else:
                if self._array is not None:
                    self._flush()
                yield number, row
        self._lines = number

    def _no_limit(self, number: int) -> UsageError:
        return UsageError(
            f"{shown(self.source)} line {number}: the row has no max_tokens of its own: pass "
            "--max-tokens N, or --max-tokens context for what the context leaves"
        )

    def _oversize(self, line: Oversize) -> None:
        self._lines += 1
        error = RowRejectedError(
            "too_large",
            f"has {line.size_bytes:,} bytes, the limit is {LINE_LIMIT_BYTES:,}: split the row",
        )
        self._flush()
        self._like_json = True
        self._tell(error, None, number=self._lines)

    def _reject(self, error: RowRejectedError, line: bytes) -> None:
        if error.reason == "blank":
            self.blank += 1
            return
        self._flush()
        if self._lines == self.blank + 1:
            self._judge_start(error, line)
        if self._array is None:
            self._like_json |= error.row is not None or error.reason == "not_object"
            self._like_json |= line.lstrip(b"\xef\xbb\xbf \t\r").startswith(b"{")
            self._tell(error, line, number=self._lines)

    def _judge_start(self, error: RowRejectedError, line: bytes) -> None:
        """Tell from the first line that is not blank whether the file has another form."""
        text = line.strip(b"\xef\xbb\xbf \t\r")
        if text.startswith(b"["):
            if not is_complete(text.decode(errors="replace")):
                raise FileRefusedError(self.source, "json_array", _ARRAY_ADVICE)
            # Either the whole file on one line, or one bad row: the next line will tell.
            self._array = (error, line)
        elif error.reason == "line_ends":
            raise FileRefusedError(self.source, "line_ends", error.message)
        elif error.reason == "bad_json" and is_cut_open(text):
            raise FileRefusedError(self.source, "not_jsonl", _PRETTY_ADVICE)

    def _flush(self) -> None:
        """Report a first line that was an array as a bad row, since other lines follow it."""
        if self._array is not None:
            error, line = self._array
            self._array = None
            self._like_json = True
            self._tell(error, line, number=self._lines - 1)

    def _end(self) -> None:
        if self._array is not None:
            raise FileRefusedError(self.source, "json_array", _ARRAY_ADVICE)
        if self.rejected and self.rejected + self.blank == self._lines and not self._like_json:
            raise FileRefusedError(self.source, "not_jsonl", _TEXT_ADVICE)

    def _tell(self, error: RowRejectedError, line: bytes | None, *, number: int) -> None:
        self.rejected += 1
        reject = Reject(
            line=number,
            id=self._readable_id(error.row),
            reason=error.reason,
            message=error.message,
            source=self.source,
        )
        self._on_reject(reject, line)

    def _readable_id(self, row: Any) -> Any:
        """Give the id of a row that was rejected, if it can be printed."""
        if type(row) is not dict:
            return None
        for name in self._checker.id_names:
            value = row.get(name)
            if type(value) in (str, int, float):
                return value if str(value).isprintable() else None
        return None


def _begins_as_parquet(stream: BinaryIO) -> bool:
    """Tell whether a file is Parquet itself, not packed, and can be read at any place."""
    if stream is sys.stdin.buffer or not stream.seekable():
        return False
    here = stream.tell()
    stream.seek(0)
    if stream.read(len(PARQUET)) == PARQUET:
        return True
    stream.seek(here)
    return False
