"""What a format is, and what every format reads of a row."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from typing_extensions import override

from common.errors import StoreDamagedError, UsageError
from common.models import Endpoint, Usage
from producer.outfile import OutFile, write_lines


class ExportedRow(msgspec.Struct, kw_only=True):
    """What formats read of a completion; what they copy stays as it was written."""

    id: msgspec.Raw
    key: str
    sample: int = 0
    try_: int = msgspec.field(name="try", default=1)
    endpoint: Endpoint = "chat"
    messages: list[dict[str, Any]] | None = None
    choices: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    usage: Usage | None = None
    model: str = ""
    completed_at: str = ""
    tools: msgspec.Raw = msgspec.Raw(b"null")


class Tally(msgspec.Struct):
    """What a format wrote.

    Attributes:
        completions: Rows of which something was written.
        lines: Lines or rows of the file.
        skipped: Completions that the format cannot hold, by the reason.
        notes: Sentences that a user of the file should know.
    """

    completions: int = 0
    lines: int = 0
    skipped: Counter[str] = msgspec.field(default_factory=Counter)
    notes: list[str] = []


class UnfitError(ValueError):
    """The format cannot hold this completion; the text says why, the same words for all such."""


_rows = msgspec.json.Decoder(ExportedRow)


def read_row(row: bytes) -> ExportedRow:
    """Read a completion.

    Raises:
        StoreDamagedError: It is none.
    """
    try:
        return _rows.decode(row)
    except msgspec.MsgspecError as error:
        raise StoreDamagedError(f"a row of a shard is no completion: {error}") from error


def id_text(raw: msgspec.Raw) -> str:
    """Give an id as text: a string as it is, a number as it was written."""
    text = bytes(raw)
    return msgspec.json.decode(text, type=str) if text.startswith(b'"') else text.decode()


class Format(ABC):
    """How completions become one file, and failures another; one object an export."""

    suffixes: tuple[str, ...] = ()
    """What the file's name may end in; any, when empty."""

    token_ids = True
    """Write token ids where the format has a place for them and every completion has them."""

    def __init__(self) -> None:
        self.tally = Tally()

    def look(self, row: bytes) -> None:
        """See a completion before the first is written; they come in any order."""
        del row

    @abstractmethod
    def write(self, to: OutFile, rows: Iterable[bytes]) -> None:
        """Write the file, of completions in its order."""

    def failure(self, row: bytes) -> bytes:
        """Give the line of a failure or cancellation."""
        return row

    def check_name(self, name: str) -> None:
        """Refuse a file name that promises another format.

        Raises:
            UsageError: It does.
        """
        if self.suffixes and not name.endswith(self.suffixes):
            raise UsageError(f"{name}: {self.refusal}")

    refusal = ""


class LineFormat(Format):
    """A format of lines: each completion gives some, or none and a reason."""

    @abstractmethod
    def lines(self, row: bytes) -> Sequence[bytes]:
        """Give the lines of a completion.

        Raises:
            UnfitError: It cannot stand in such a file.
        """

    @override
    def write(self, to: OutFile, rows: Iterable[bytes]) -> None:
        """Write the file, of completions in its order."""
        self.tally.lines = write_lines(to.write, self._all(rows))

    def _all(self, rows: Iterable[bytes]) -> Iterator[bytes]:
        for row in rows:
            try:
                lines = self.lines(row)
            except UnfitError as unfit:
                self.tally.skipped[str(unfit)] += 1
                continue
            self.tally.completions += 1
            yield from lines
