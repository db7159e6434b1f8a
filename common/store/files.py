"""Read and enter what others may have put into a directory: pipes, devices, endless files, links.

A folder of the output may be a link that its user made ("shards are on the large disk"). One that
anybody else made is refused: it would have us write wherever he likes. A linked folder within a
folder, or one that leads back into the output, is no part of it, or a listing would never end.
"""

import errno
import os
import stat
from pathlib import Path

from common.errors import StoreDamagedError, StoreDeniedError
from common.store import frames

_ROOT_UID = 0


def read_file(path: Path) -> bytes | None:
    """Read a file whole; None when there is none, or a folder.

    Raises:
        StoreDamagedError: It is no regular file, or longer than any object of ours.
    """
    try:
        # A pipe without a writer would hold up whoever opens it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in {errno.ENXIO, errno.ELOOP}:  # a socket, a link to itself
            raise _no_object(path, "no regular file") from error
        raise
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        about = os.fstat(file.fileno())
        if stat.S_ISDIR(about.st_mode):
            return None
        if not stat.S_ISREG(about.st_mode):
            raise _no_object(path, "no regular file")
        # None of ours is longer compressed than plain.
        if about.st_size > frames.MOST_UNPACKED_BYTES:
            raise _no_object(path, f"{about.st_size:,} bytes long")
        return file.read()


def refuse_foreign_links(root: Path, folder: Path) -> None:
    """Refuse to go into a folder below the root through a link that another user made.

    Raises:
        StoreDeniedError: Naming the link.
    """
    while folder != root:
        if folder.is_symlink() and folder.lstat().st_uid not in {_ROOT_UID, os.geteuid()}:
            raise StoreDeniedError(
                f"{folder} is a link that another user made: remove it, or mount there what it "
                "leads to"
            )
        folder = folder.parent


def refuse_any_link(folder: Path) -> None:
    """Refuse a link in the place of a folder whose files are removed.

    Raises:
        StoreDeniedError: Naming the link.
    """
    if folder.is_symlink():
        raise StoreDeniedError(
            f"{folder} is a link, and what lies there is removed at times: remove the link"
        )


def is_folder(entry: "os.DirEntry[str]") -> bool:
    """Tell whether it is a folder, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def belongs(root: Path, entry: "os.DirEntry[str]") -> bool:
    """Tell whether a folder is part of the directory.

    Raises:
        StoreDeniedError: It is a link that another user made.
    """
    if not entry.is_symlink():
        return True
    path = Path(entry.path)
    refuse_foreign_links(root, path)
    target, home = path.resolve(), root.resolve()
    inside = target.is_relative_to(home) or home.is_relative_to(target)
    return path.parent == root and not inside


def size_of(entry: "os.DirEntry[str]") -> int | None:
    """Give a regular file's size in bytes; None for what is none, or gone since."""
    try:
        about = entry.stat()
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ELOOP}:
            return None
        raise
    return about.st_size if stat.S_ISREG(about.st_mode) else None


def _no_object(path: Path, what: str) -> StoreDamagedError:
    return StoreDamagedError(
        f"{path} is {what}: Headrace did not write it; remove it, or restore it from a copy"
    )
