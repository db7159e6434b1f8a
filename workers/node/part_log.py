"""The log of one part of a node: a file that its process appends to, kept to a bounded size.

The process has the file itself, not a pipe to us: it goes on writing when we are killed. So a file
that has grown is copied and then emptied in place; what is written just between is lost.
"""

import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TextIO

from common.harmless import harmless

MOST_BYTES = 8 * 2**20
"""Of one file; one older part of it is kept beside."""

_TAIL_BYTES = 4096
_HEAD = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \w+ |^workers: ")


class PartLog:
    """One file.

    Args:
        path: Where; the folder is made.
        most_bytes: After which it is cut.
    """

    def __init__(self, path: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._began = 0

    def opened(self) -> BinaryIO:
        """Open it for a process to append to, whose own lines begin here.

        Raises:
            OSError: It cannot be.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("ab")
        self._began = file.tell()
        return file

    def opened_as_text(self) -> TextIO:
        """Likewise, for lines of our own."""
        self.opened().close()
        return self.path.open("a", encoding="utf-8", buffering=1)

    def bound(self) -> None:
        """Cut it if it has grown; a disk that refuses is for another time."""
        with suppress(OSError):
            if self.path.stat().st_size > self._most_bytes:
                shutil.copyfile(self.path, self.path.with_name(f"{self.path.name}.1"))
                with self.path.open("r+b") as file:
                    file.truncate(0)

    def last_line(self) -> str:
        """Give the last line for people, without time and level; empty where there is none.

        What an earlier process has written is over.
        """
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                # Cut meanwhile, it begins with this process's lines.
                began = self._began if self._began <= size else 0
                file.seek(max(size - _TAIL_BYTES, began))
                lines = file.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        text = next((line for line in reversed(lines) if line.strip()), "")
        return harmless(_HEAD.sub("", text)).strip()
