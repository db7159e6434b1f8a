"""Say what is wrong with a row or a file: the words, the records and the errors."""

from typing import Any, Literal

import msgspec

from common.errors import InputError

Reason = Literal[
    "ambiguous",
    "archive",
    "bad_json",
    "bad_type",
    "bad_utf8",
    "blank",
    "control_char",
    "corrupt",
    "dup_id_conflict",
    "empty_prompt",
    "encoding",
    "endpoint",
    "first_turn",
    "json_array",
    "line_ends",
    "lone_surrogate",
    "max_tokens",
    "model",
    "no_prompt",
    "no_user",
    "not_jsonl",
    "not_object",
    "parquet",
    "role",
    "stream",
    "too_large",
    "truncated",
    "turns",
    "unsupported_compression",
    "url",
    "url_scheme",
]
"""Why a row or a file is not accepted. `blank` is for lines that are counted, not rejected."""


class Reject(msgspec.Struct, frozen=True, kw_only=True):
    """A row that was not accepted, or a file refused whole.

    Attributes:
        line: From 1; None when the file is refused whole.
        id: The row's id where it could be read.
        message: What is wrong and what to do; holds no text of a prompt.
        source: The file as it was named, `-` for stdin.
    """

    line: int | None
    id: Any
    reason: Reason
    message: str
    source: str


class RowRejectedError(Exception):
    """One row cannot be used; the others are not concerned.

    Attributes:
        reason: One word.
        message: A sentence without file and line, which the reader knows.
        row: The decoded row where there is one.
    """

    def __init__(self, reason: Reason, message: str, *, row: Any = None) -> None:
        super().__init__(message)
        self.reason: Reason = reason
        self.message = message
        self.row = row


class MissingMaxTokensError(Exception):
    """A row has no limit of its own and no flag gives one: the flags are wrong, not the row."""


class FileRefusedError(InputError):
    """A file that cannot be used at all: one message, nothing of it counts.

    Attributes:
        reason: One word.
        source: The file as it was named.
    """

    def __init__(self, source: str, reason: Reason, message: str) -> None:
        super().__init__(f"{shown(source)}: {message}")
        self.source = source
        self.reason: Reason = reason
        self.message = message


def shown(source: str) -> str:
    """Name a source for people."""
    return "standard input" if source == "-" else source
