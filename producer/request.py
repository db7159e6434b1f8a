"""What a call of `producer enqueue` asks for, and what came of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from common import names
from common.errors import UsageError
from producer.intake import Reading, stem_of
from producer.prompts.reader import STDIN
from producer.prompts.rows import RowRules

Say = Callable[[str], None]
"""Tells people a sentence while the call goes on."""

ROOM_WAIT_S = 900.0
"""How long a full Redis is waited for: the first long answers may take minutes to make room."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What this call says of the run; None and absent members are not said.

    A run keeps what it was created with, so later calls need not repeat it.
    """

    output: str | None = None
    endpoint_url: str | None = None
    partitions: int | None = None
    max_tokens: int | Literal["context"] | None = None
    model: str | None = None
    sampling: dict[str, Any] = {}
    request_timeout_s: float | None = None
    attempts: int | None = None
    format: Literal["jsonl.zst", "parquet"] | None = None
    keep_token_ids: bool | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a call of `producer enqueue` asks for.

    Attributes:
        files: As they were named, `-` for stdin.
        rules: How rows are read; what the run has is filled in from its record.
        redis: Address as given, None for the default.
        priority: In the order of claims, None for what the run has.
        window: Most requests of the run in Redis, None for what the run has.
        room_wait_s: How long a call to a full Redis is repeated.
        limit: Only the first rows, before they become samples.
        samples: Prompts that each row becomes; sample s sends seed + s.
    """

    files: tuple[str, ...]
    run: str
    rules: RowRules
    asked: Asked
    redis: str | None = None
    limit: int | None = None
    samples: int = 1
    skip_invalid: bool = False
    accept_changes: bool = False
    retry_failed: bool = False
    keep_open: bool = False
    priority: int | None = None
    window: int | None = None
    room_wait_s: float = ROOM_WAIT_S
    dry_run: bool = False
    version: str = ""


class Tally(msgspec.Struct):
    """What pass 2 did; counts of prompts, named as in `common.queue.AddReply`.

    Attributes:
        kept: Known with another text, and left as they are.
        lost: Had ended, and the output has lost their results: they are queued again.
    """

    added: int = 0
    queued: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    restored: int = 0
    retried: int = 0
    replaced: int = 0
    kept: int = 0
    lost: int = 0

    @property
    def all_done(self) -> bool:
        """Whether all prompts of the call were completed before it."""
        others = self.added + self.queued + self.failed + self.cancelled + self.restored
        return self.completed > 0 and not others + self.retried + self.replaced + self.lost


class Outcome(msgspec.Struct, kw_only=True):
    """What came of a call.

    Attributes:
        queued: False when nothing was to be queued: a dry run, or rows that cannot be used.
        total: Prompts of the run after this call, all files together.
        unfed: Those of them whose requests wait in the output for room in Redis.
        rejects_file: Where the rejected rows were written.
        redis: Address of the Redis that was used; it may hold a password.
        notes: Sentences for people.
    """

    run: str
    reading: Reading
    queued: bool = False
    tally: Tally = msgspec.field(default_factory=Tally)
    total: int = 0
    unfed: int = 0
    rejects_file: str = ""
    redis: str = ""
    notes: list[str] = []
    exit_code: int = 0


def run_name(files: tuple[str, ...], given: str | None) -> str:
    """Choose the run's name: as given, else the stem of the one file.

    Raises:
        UsageError: There is no name, or it may not stand for a run.
    """
    if given is None:
        if len(files) != 1 or files[0] == STDIN:
            what = "standard input has no name" if STDIN in files else "several files were given"
            raise UsageError(f"{what}: name the run with --run")
        given = stem_of(files[0])
        # A pattern that the shell did not replace, a typing error: no name is at fault.
        if not Path(files[0]).exists():
            raise UsageError(f"{files[0]}: no such file")
    if not names.RUN_NAME.fullmatch(given):
        raise UsageError(
            f"{given!r} cannot name a run: use --run with letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit, at most 100"
        )
    return given
