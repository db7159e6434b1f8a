"""Files that are written before they get their name, and the removal of those nobody finishes."""

import fcntl
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

ABANDONED_S = 86_400.0
"""Where files cannot be locked, one of this age has no writer any more."""


class TemporaryFile:
    """A durable file of the data with a name of its own, locked as long as it is in use.

    Args:
        folder: Where it lies; exists.
        data: All of its bytes.
    """

    def __init__(self, folder: Path, data: bytes) -> None:
        self._folder = folder
        self._data = data
        self._path = folder
        self._descriptor = -1

    def __enter__(self) -> Path:
        """Write and sync it; what was written is removed when that fails."""
        self._open_locked()
        try:
            rest = memoryview(self._data)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)
        except BaseException:
            self._remove()
            raise
        return self._path

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove this name of it."""
        self._remove()

    def _open_locked(self) -> None:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        while True:
            self._path = self._folder / secrets.token_hex(12)
            self._descriptor = os.open(self._path, flags, 0o666)
            with suppress(OSError):  # not every file system can lock
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            # A clean-up may have had the lock first; it has then removed the file.
            if self._path.exists():
                return
            os.close(self._descriptor)

    def _remove(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def remove_abandoned(folder: Path) -> int:
    """Remove temporary files whose writers are dead; count them."""
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208 - an absent folder raises here, not later
    except (FileNotFoundError, PermissionError):
        return 0
    return sum(_remove_if_abandoned(folder / name) for name in names)


def _remove_if_abandoned(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not _unused(descriptor):
            return False
        path.unlink(missing_ok=True)  # under the lock, so that no writer takes it up meanwhile
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _unused(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - os.fstat(descriptor).st_mtime > ABANDONED_S
    return True
