"""Collect what a proof has found wrong: counted by kind, the first kept, all on disk if wanted."""

import tempfile
from collections import Counter
from collections.abc import Iterator
from types import TracebackType
from typing import IO, Self

import msgspec

from common.harmless import one_line

SHOWN = 20
"""Findings of a kind that are shown to people."""

KINDS = {
    "manifest": "manifests that are missing or cannot be read",
    "object": "objects that are missing or damaged",
    "missing": "accepted prompts without a result",
    "no_row": "results whose row is gone",
    "no_record": "rows that no list of keys/ names",
    "doubled": "results or rows that stand twice",
    "unproven": "rows in objects that are not as they were written, any of which may be altered",
    "swapped": "rows that hold another prompt's answer",
    "altered": "rows that differ from what was accepted or recorded",
    "unknown": "results of prompts that were never accepted",
    "success": "what _SUCCESS says against what is there",
    "file": "prompts of the file, as read with the given --turns, --raw-prompt, "
    "--id-field, --private-addresses and --samples, that the run does not have",
}
"""Every kind of finding and its heading, in the order in which they are told."""


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that is wrong.

    Attributes:
        kind: Of `KINDS`.
        key: 32 hex digits, empty for an object.
        id: The prompt's id as its author gave it; None where nobody knows.
        object: Name of the object in the store.
        detail: What is wrong, without anything of a prompt or an answer.
    """

    kind: str
    key: str = ""
    id: msgspec.Raw | None = None
    object: str = ""
    detail: str = ""

    @property
    def text(self) -> str:
        """Tell it in a line."""
        where = [f"id {one_line(bytes(self.id).decode())}"] if self.id is not None else []
        where += [f"key {self.key}"] if self.key else []
        where += [one_line(self.object)] if self.object else []
        return ", ".join(where) + (f": {self.detail}" if self.detail else "")


class Findings:
    """All findings of a proof, in bounded memory.

    Args:
        keep_all: Keep every one on disk, for `all`; else only the first of each kind.

    Attributes:
        counts: How many of each kind.
        first: The first `SHOWN` of each kind.
    """

    def __init__(self, *, keep_all: bool = False) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, list[Finding]] = {}
        self._file: IO[bytes] | None = None
        if keep_all:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__

    def add(self, finding: Finding) -> None:
        """Take one."""
        self.counts[finding.kind] += 1
        first = self.first.setdefault(finding.kind, [])
        if len(first) < SHOWN:
            first.append(finding)
        if self._file is not None:
            self._file.write(msgspec.json.encode(finding) + b"\n")

    def all(self) -> Iterator[bytes]:
        """Give every one as JSON, in the order of finding."""
        if self._file is not None:
            self._file.seek(0)
            for line in self._file:
                yield line[:-1]

    def __enter__(self) -> Self:
        """Nothing to prepare."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove what was kept on disk."""
        if self._file is not None:
            self._file.close()
