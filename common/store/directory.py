"""Keep objects as files of a directory: a newcomer's run, a shared file system.

A new object is written to a temporary file, made durable, and given its name by `link`, which
never replaces: of any number of writers one wins, and a reader never sees half an object.
Temporary files lie in `.headrace-tmp`; each is locked by its writer, and an unlocked one is
removed at the next start. File systems without hard links work too, but are not `conditional`.
"""

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from common.errors import (
    StoreDamagedError,
    StoreDeniedError,
    StoreFullError,
    StoreUnusableError,
)
from common.store import files
from common.store.base import StoredObject
from common.store.identity import checked_name, holds_same, identity_of
from common.store.temporary import TemporaryFile, remove_abandoned

TEMPORARY = ".headrace-tmp"

_FULL = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_PERMANENT = _DENIED | {
    *(errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP),
    errno.EEXIST,  # of a folder that is to be made: a file stands in its way
}

_CREATE_TRIES = 3


class DirectoryStore:
    """A directory as store. Threads and processes may share it.

    Args:
        path: The root. A relative path is taken from the current directory, once.
        create: Make the root if it is missing.
        link: How a file gets its name without replacing another.

    Raises:
        StoreUnusableError: The root is missing, no directory, or may not be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool = True,
        link: Callable[[Path, Path], None] = os.link,
    ) -> None:
        self.root = Path(path).expanduser().absolute()
        self.url = str(self.root)
        self.conditional = True
        self._link = link
        self._temporary = self.root / TEMPORARY
        with _Mapped("open", self.root):
            if create and not self.root.exists():
                _make_folder(self.root)
            if not self.root.is_dir():
                raise StoreUnusableError(f"{self.root} is no directory: check the output's path")
            files.refuse_any_link(self._temporary)
            remove_abandoned(self._temporary)

    def probe(self) -> None:
        """Write, read, list and remove a file; find out whether there are hard links."""
        # No folder of its own: whoever removes that takes it from another process that probes.
        name = f"_probe-{secrets.token_hex(8)}"
        first, second = b"first", b"second"
        if not self.put_if_absent(name, first) or self.put_if_absent(name, second):
            raise StoreUnusableError(
                f"{self.root}: two writers of one file would both succeed: use a local disk, NFS "
                "or S3"
            )
        listed = [found.name for found in self.list(name)]
        if self.get(name) != first or listed != [name]:
            raise StoreUnusableError(
                f"{self.root}: a file that was just written is not there: use a local disk, NFS "
                "or S3"
            )
        self.delete(name)

    def put_if_absent(self, name: str, data: bytes, *, rows_sha256: str = "") -> bool:
        """Write a file unless the name exists; see `ObjectStore`."""
        path = self.root / checked_name(name)
        with _Mapped("write", path):
            for _ in range(_CREATE_TRIES):
                try:
                    stored = files.read_file(path)
                except StoreDamagedError:
                    return False  # a name that holds something else
                if stored is not None:
                    # Its writer may have died before it made the name durable.
                    _sync_folder(path.parent)
                    return holds_same(name, stored, data, identity_of(data, rows_sha256))
                # Lost to another writer, whose object the next round judges.
                with suppress(FileExistsError):
                    self._create(path, data)
                    return True
        raise StoreUnusableError(
            f"{path} comes and goes while it is written: does something else delete there?",
            retryable=True,
        )

    def put(self, name: str, data: bytes) -> None:
        """Write a file, replacing what is there at one instant."""
        path = self.root / checked_name(name)
        with _Mapped("write", path):
            self._make_parents(path)
            with TemporaryFile(self._temporary, data) as temporary:
                temporary.replace(path)
            _sync_folder(path.parent)

    def get(self, name: str) -> bytes | None:
        """Read a file whole; None when there is none."""
        path = self.root / checked_name(name)
        with _Mapped("read", path):
            return files.read_file(path)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """List files by the bytes of their names; a folder is read when the list reaches it."""
        with _Mapped("list", self.root):
            self._check_root()
            yield from self._walk("", os.fsencode(prefix))

    def delete(self, name: str) -> None:
        """Remove a file; nothing happens when there is none."""
        path = self.root / checked_name(name)
        with _Mapped("delete", path), suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
            _sync_folder(path.parent)

    def _create(self, path: Path, data: bytes) -> None:
        self._make_parents(path)
        with TemporaryFile(self._temporary, data) as temporary:
            try:
                self._link(temporary, path)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                self._create_without_link(temporary, path)
        _sync_folder(path.parent)

    def _create_without_link(self, temporary: Path, path: Path) -> None:
        # Between the look and the rename another may write: hence not conditional, and the sink
        # names its objects by their content.
        self.conditional = False
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        temporary.replace(path)

    def _make_parents(self, path: Path) -> None:
        # Never the root: where a file system was unmounted, the run must not go on beside it.
        self._check_root()
        files.refuse_foreign_links(self.root, path.parent)
        files.refuse_any_link(self._temporary)
        _make_folder(path.parent)
        _make_folder(self._temporary)

    def _check_root(self) -> None:
        if not self.root.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the directory itself is gone")

    def _walk(self, folder: str, prefix: bytes) -> Iterator[StoredObject]:
        try:
            with os.scandir(self.root / folder) as found:
                entries = [
                    (f"{folder}{e.name}{'/' if files.is_folder(e) else ''}", e) for e in found
                ]
        except FileNotFoundError:
            return
        # A folder sorts as the names in it do: with its slash.
        for name, entry in sorted(entries, key=lambda pair: os.fsencode(pair[0])):
            raw = os.fsencode(name)
            if not name.endswith("/"):
                if raw.startswith(prefix):
                    yield from _stored(name, entry)
            elif (
                name != f"{TEMPORARY}/"
                and (raw.startswith(prefix) or prefix.startswith(raw))
                and files.belongs(self.root, entry)
            ):
                yield from self._walk(name, prefix)


class _Mapped:
    """Turn what the operating system raises into ours, naming what was done to which path."""

    def __init__(self, verb: str, path: Path) -> None:
        self._verb = verb
        self._path = path

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Raise ours in place of an OSError."""
        if not isinstance(error, OSError):
            return
        why = error.strerror or type(error).__name__
        if error.errno in _FULL:
            raise StoreFullError(
                f"no space left to {self._verb} {self._path} ({why}): free some; nothing is lost",
                retryable=True,
            ) from error
        if error.errno in _DENIED:
            raise StoreDeniedError(
                f"cannot {self._verb} {self._path}: {why}: check who owns it and its mode"
            ) from error
        raise StoreUnusableError(
            f"cannot {self._verb} {self._path}: {why}",
            retryable=error.errno not in _PERMANENT,
        ) from error


def _stored(name: str, entry: os.DirEntry[str]) -> Iterator[StoredObject]:
    size_bytes = files.size_of(entry)
    if size_bytes is not None:
        yield StoredObject(name=name, size_bytes=size_bytes)


def _make_folder(path: Path) -> None:
    """Make a folder and its parents so that a power loss does not take their names."""
    if path.is_dir():
        return
    _make_folder(path.parent)
    path.mkdir(exist_ok=True)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
