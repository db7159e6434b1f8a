"""Write a file of lines that is whole or not there: plain, gzip or zstd by its name, or stdout."""

import fcntl
import gzip
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import IO, Any, cast

import zstandard

from common.errors import BackendError, UsageError

_STDOUT = ("-", "/dev/stdout")
_STEP_BYTES = 1 << 20

Write = Callable[[bytes], Any]


class OutFile:
    """What a file is written through: as much of a binary file as its writers ask for."""

    closed = False

    def __init__(self, write: Write) -> None:
        self._write = write
        self._bytes = 0

    def write(self, data: bytes) -> int:
        """Write all of it."""
        self._write(data)
        self._bytes += len(data)
        return len(data)

    def tell(self) -> int:
        """Give how many bytes were written, before they are compressed."""
        return self._bytes

    def flush(self) -> None:
        """Do nothing: the file is flushed when it is whole."""

    def close(self) -> None:
        """Do nothing: who opened it closes it."""


@contextmanager
def whole_file(name: str) -> Iterator[OutFile]:
    """Give what writes to `name`; the file appears under its name when the block ends well.

    What is no file (a pipe, a device) is written to as it is: no file may take its place.

    Raises:
        UsageError: The folder is not there.
        BackendError: It cannot be written.
    """
    if is_stdout(name):
        yield OutFile(sys.stdout.buffer.write)
        sys.stdout.buffer.flush()
        return
    path = check_target(name)
    special = path.exists() and not path.is_file()
    part = path if special else path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    try:
        if not special:
            _remove_abandoned(path)
        # Never through a link that somebody else has laid there.
        with part.open("wb" if special else "xb") as raw:
            _lock(raw)
            with _packing(name, raw) as file:
                yield OutFile(file.write)
            raw.flush()
            if not special:
                os.fsync(raw.fileno())
        if not special:
            part.replace(path)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise BackendError(f"{name} cannot be written: {error.strerror}") from error
    finally:
        if not special:
            part.unlink(missing_ok=True)


def _remove_abandoned(path: Path) -> None:
    """Remove the parts that killed exports to this file have left: nobody holds their lock."""
    for part in path.parent.glob(f".{escape(path.name)}.*.part"):
        with suppress(OSError), part.open("rb") as file:
            if _lock(file):
                part.unlink()


def _lock(file: IO[bytes]) -> bool:
    """Lock a file for as long as it is open; False where another holds it, or nobody can."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_stdout(name: str) -> bool:
    """Whether a name stands for stdout."""
    return name in _STDOUT


def check_target(name: str) -> Path:
    """Refuse a name that no file can have, before hours of reading; links are followed.

    Raises:
        UsageError: It is a directory, in none, or somewhere else than on this machine.
    """
    if "://" in name:
        raise UsageError(
            f"{name}: --to takes a file; for another place write to stdout, as in "
            f"`… --to - | aws s3 cp - {name}`"
        )
    path = Path(name).resolve()
    if not path.parent.is_dir():
        raise UsageError(f"{name}: there is no directory {Path(name).parent}")
    if path.is_dir():
        raise UsageError(f"{name} is a directory: give the name of a file")
    return path


def _packing(name: str, raw: IO[bytes]) -> IO[bytes]:
    if name.endswith(".gz"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename=""))
    if name.endswith(".zst"):
        return cast(
            "IO[bytes]",
            zstandard.ZstdCompressor(level=3).stream_writer(raw, closefd=False),
        )
    return os.fdopen(os.dup(raw.fileno()), "wb")


def write_lines(write: Write, rows: Iterable[bytes]) -> int:
    """Write rows, each with a newline; returns how many."""
    count, step, size = 0, list[bytes](), 0
    for row in rows:
        step.append(row)
        size += len(row)
        count += 1
        if size >= _STEP_BYTES:
            write(b"\n".join([*step, b""]))
            step, size = [], 0
    if step:
        write(b"\n".join([*step, b""]))
    return count
