"""Follow the log of a server: what was added since the last look, and its last start.

    first look       the end of the file, and backwards from there, a piece each look, until a
                     start is found: a log of days has gigabytes, a look costs milliseconds
    rotation         what the old file got last, then the new one from its beginning
    truncation       from the beginning
    no file, or not  nothing; looked for again each time
    a regular one
    much at once     the end of it: figures of the past are of no use

Blocking: call it in a thread. Memory is bounded by `MOST_READ_BYTES`, whatever stands in the file.
"""

import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from workers.readings.log_lines import (
    MOST_ARGUMENTS_BYTES,
    Batch,
    Event,
    LogLine,
    Retracted,
    Started,
    parse_line,
    stamp_of,
)

FIRST_READ_BYTES = 256 << 10
MOST_READ_BYTES = 1 << 20
SEARCH_BYTES = 4 << 20
"""How much of the past one look searches for a start."""

START_BEFORE_BYTES = 512 << 10
START_AFTER_BYTES = 64 << 10
"""Where around the line that sums a start up its other lines stand."""

_SUMMARY = b"max_total_num_tokens="


class Noted(NamedTuple):
    """A line, and when it was written, on the monotonic clock; None: of an earlier start."""

    line: LogLine
    at_s: float | None


class LogTail:
    """Follows one log, wherever it is at the moment.

    Args:
        find: Gives the path; asked at each look. None where nobody knows one yet.
    """

    def __init__(self, find: Callable[[], Path | None]) -> None:
        self._find = find
        self._file: _File | None = None
        self._search: _Search | None = None
        self._ever_opened = False
        self._left: _Left | None = None

    def read(self) -> list[Noted]:
        """Give what was added since the last look, in order; never raises for a file's sake."""
        with suppress(OSError, ValueError):
            path = self._find()
            return self._read(path) if path is not None else []
        self.close()
        return []

    def close(self) -> None:
        """Let go of the file; the next look goes on where this one ended, if it is still there."""
        if self._file is not None:
            self._left = self._file.close()
        self._file = self._search = None

    def _read(self, path: Path) -> list[Noted]:
        noted: list[Noted] = []
        if self._file is not None and not self._file.is_at(path):
            noted = self._dated(self._file)
            self.close()
        if self._file is None:
            self._open(path)
        if self._file is None:
            return noted
        noted += self._earlier(self._file)
        return noted + self._dated(self._file)

    def _open(self, path: Path) -> None:
        self._file = _File.opened(path)
        if self._file is None:
            return
        if self._left is not None:
            self._file.go_on(self._left)
        if not self._ever_opened:
            self._search = _Search(end=self._file.skip_to_end(FIRST_READ_BYTES))
        self._ever_opened = True

    def _earlier(self, file: "_File") -> list[Noted]:
        if self._search is None:
            return []
        found = self._search.step(file)
        if found or self._search.ended:
            self._search = None
        return [Noted(line, None) for line in found]

    def _dated(self, file: "_File") -> list[Noted]:
        """Read what is new, and say of each line when it was written.

        The stamps' zone is the server's, and its clock may be another machine's: they tell only
        how long before the last line another was written, and the file's own time the rest.
        """
        texts = list(file.lines())
        last_s = time.monotonic() - file.age_s()
        newest: float | None = None
        noted: list[Noted] = []
        before_s = 0.0
        for text in reversed(texts):
            line = parse_line(text)
            if line is None and newest is not None:
                continue
            at_s = (line.stamp if line is not None else stamp_of(text)).at_s
            # Also of a line that says nothing: what was written after it may be hours of those.
            newest = at_s if newest is None else newest
            if newest is not None and at_s is not None:
                before_s = max(before_s, newest - at_s)
            if line is not None:
                noted.append(Noted(line, last_s - before_s))
        return noted[::-1]


class _Left(NamedTuple):
    """Where the reading of a file was left."""

    file: tuple[int, int]
    at: int
    skips: bool


class _File:
    """An open log: how far it is read, and the line of which the end has not come yet."""

    def __init__(self, fd: int, about: os.stat_result) -> None:
        self.fd = fd
        self._is = (about.st_dev, about.st_ino)
        self._at = 0
        self._rest = b""
        # The rest of a line that is too long, or of which the beginning was skipped.
        self._skips = False

    @classmethod
    def opened(cls, path: Path) -> "_File | None":
        """Open a log; None where there is none, or something that is no file of its own."""
        # Without blocking: whoever put a pipe there must not hold us up.
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        except OSError:
            return None
        about = os.fstat(fd)
        if stat.S_ISREG(about.st_mode):
            return cls(fd, about)
        os.close(fd)
        return None

    def close(self) -> "_Left":
        """Close it; gives how far it was read."""
        os.close(self.fd)
        return _Left(self._is, self._at - len(self._rest), self._skips)

    def go_on(self, left: "_Left") -> None:
        """Go on after what was read of this very file."""
        if left.file == self._is:
            self._at, self._skips = left.at, left.skips

    def is_at(self, path: Path) -> bool:
        """Whether the path still leads to this file."""
        try:
            about = path.stat()
        except OSError:
            return False
        return (about.st_dev, about.st_ino) == self._is

    def age_s(self) -> float:
        """How long ago it was last written to."""
        return max(0.0, time.time() - os.fstat(self.fd).st_mtime)

    def skip_to_end(self, but_bytes: int) -> int:
        """Leave out all but its end; gives where that begins."""
        self._at = max(os.fstat(self.fd).st_size - but_bytes, 0)
        self._skips, self._rest = self._at > 0, b""
        return self._at

    def lines(self) -> Iterator[bytes]:
        """Give the whole lines that were added."""
        size = os.fstat(self.fd).st_size
        if size < self._at:
            self._at, self._rest, self._skips = 0, b"", False
        if size - self._at > MOST_READ_BYTES:
            self.skip_to_end(MOST_READ_BYTES)
        data = os.pread(self.fd, MOST_READ_BYTES, self._at)
        self._at += len(data)
        *whole, rest = (self._rest + data).split(b"\n")
        for line in whole:
            if not self._skips:
                yield line
            self._skips = False
        self._rest = rest
        if len(rest) > MOST_ARGUMENTS_BYTES:
            # What its beginning says is all that anybody wants of it.
            if not self._skips:
                yield rest[:MOST_ARGUMENTS_BYTES]
            self._rest, self._skips = b"", True


class _Search:
    """Goes back through a log until it meets the last start."""

    def __init__(self, *, end: int) -> None:
        self._end = end

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to search."""
        return self._end <= 0

    def step(self, file: _File) -> list[LogLine]:
        """Search one piece more; gives the lines of the start once it is found."""
        begin = max(self._end - SEARCH_BYTES, 0)
        piece = os.pread(file.fd, self._end - begin + len(_SUMMARY) - 1, begin)
        at = piece.rfind(_SUMMARY)
        if at < 0:
            self._end = begin
            return []
        first = max(begin + at - START_BEFORE_BYTES, 0)
        length = begin + at - first + START_AFTER_BYTES
        lines = os.pread(file.fd, length, first).split(b"\n")
        found = [line for text in lines if (line := parse_line(text)) is not None]
        if not any(isinstance(line, Started) for line in found):
            self._end = begin + at  # somebody's text
            return []
        self._end = 0
        return [line for line in found if _of_start(line)]


def _of_start(line: LogLine) -> bool:
    if isinstance(line, Event):
        return line.what == "launching"
    return not isinstance(line, Batch | Retracted)
