"""Compare spooled prompts with the ledger, and bring those that it lacks into store and queue.

    compare    read-only: every fingerprint, before anything is written
    add        for each ~20,000 prompts: the absent ones become one object of `inputs/`, THEN all
               that is not completed is given to the ledger's script, 1,000 a call

Failures:
    killed anywhere     the same call again: what is in the ledger is counted, what is only in
                        `inputs/` is written there once more under another name, which readers of
                        `inputs/` take for one prompt, and is queued
    Redis is full       waits and says so, as long as `--room-wait` allows
    the store is away   waits and says so; a denied write ends the call
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import IntEnum
from typing import Self

import msgspec

from common.crashpoints import reached
from common.errors import ConflictError, RedisFullError
from common.harmless import one_line
from common.models import Prompt
from common.queue import AddReply, Ledger, LedgerEntry
from common.queue.ledger import CALL_ROWS
from producer.accepted import Inputs
from producer.meter import Meter, MeterFor
from producer.prompts.verdicts import shown
from producer.request import Tally
from producer.spool import Spool, SpooledPrompt

OBJECT_ROWS = 20_000
OBJECT_BYTES = 64 * 1024 * 1024
CALL_BYTES = 8 * 1024 * 1024
SHOWN_CONFLICTS = 20

_decode_prompt = msgspec.json.Decoder(Prompt).decode


class Compared(msgspec.Struct):
    """What the ledger holds of the spooled prompts; counts.

    Attributes:
        conflicts: Known with another text.
        replaceable: Those of them that are queued or failed.
        differing: Ids and lines of the first conflicts, for people.
        kept: Likewise, of those that are completed or cancelled.
    """

    absent: int = 0
    queued: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    conflicts: int = 0
    replaceable: int = 0
    differing: list[str] = []
    kept: list[str] = []


class _Known(IntEnum):
    """What to do with a prompt, as one byte; found by the comparison."""

    ABSENT = 0
    SEND = 1
    REPLACE = 2
    DONE = 3
    KEEP = 4


class Adder:
    """Both passes over a spool that has ended, for one run.

    Args:
        spool: Distinct prompts.
        ledger: Of the run.

    Attributes:
        tally: What pass 2 has done so far.
    """

    def __init__(self, spool: Spool, ledger: Ledger) -> None:
        self._spool = spool
        self._ledger = ledger
        # A byte a prompt, in the spool's order; a run that was just made is not compared.
        self._known = bytearray()
        self.tally = Tally()

    def compare(self, meter: Meter) -> Compared:
        """Look every prompt up, and change nothing."""
        compared = Compared(differing=[], kept=[])
        for batch in self._spool.batches():
            entries = self._ledger.lookup([prompt.key for prompt in batch])
            for prompt, entry in zip(batch, entries, strict=True):
                self._known.append(_note_entry(prompt, entry, compared))
            meter.show(len(self._known))
        return compared

    def again(self, rows: int, *, meter: MeterFor) -> Compared:
        """Look every prompt up once more, for its counts alone."""
        with meter("comparing", rows) as bar:
            return Adder(self._spool, self._ledger).compare(bar)

    def add(
        self,
        inputs: Inputs,
        *,
        meter: Meter,
        retry: bool = False,
        replace: bool = False,
        rewrite: bool = False,
    ) -> None:
        """Write absent prompts to `inputs/`, then queue them.

        What another producer added since the comparison is written to `inputs/` once more, which
        its readers take for the same prompt.

        Args:
            inputs: Of the run.
            meter: Shows the rows that are through.
            retry: Failed and cancelled prompts get a new try.
            replace: Queued and failed prompts take another text.
            rewrite: `inputs/` has lost objects: known prompts are written there too.

        Raises:
            ConflictError: Another producer queued another text for an id after the comparison.
        """
        seen = 0
        written = {_Known.ABSENT, _Known.REPLACE}
        if rewrite:
            written |= {_Known.SEND, _Known.DONE}
        with _OneAhead(self._ledger, inputs, self.tally, retry=retry, replace=replace) as calls:
            for group in self._groups():
                known = self._known[seen : seen + len(group)] or bytes(len(group))
                fresh = [
                    prompt for prompt, what in zip(group, known, strict=True) if what in written
                ]
                seq = 0
                if fresh:
                    seq = inputs.write(fresh)
                    reached("enqueue.inputs")
                # All that is not completed may have lost its job, so it is sent again.
                self.tally.completed += known.count(_Known.DONE)
                self.tally.kept += known.count(_Known.KEEP)
                for batch in _sliced(group, known):
                    calls.send(batch, seq)
                    meter.show(seen + len(batch))
                seen += len(group)

    def _groups(self) -> Iterator[list[SpooledPrompt]]:
        group: list[SpooledPrompt] = []
        size = 0
        for batch in self._spool.batches():
            group += batch
            size += sum(len(prompt.prompt) for prompt in batch)
            if len(group) >= OBJECT_ROWS or size >= OBJECT_BYTES:
                yield group
                group, size = [], 0
        if group:
            yield group


class _OneAhead:
    """Give batches to the ledger one at a time, while the next one is made ready.

    Args:
        ledger: Its calls run in a thread.
        inputs: Waits, in the caller's thread, where Redis is full.
        tally: Takes the counts.
    """

    def __init__(
        self, ledger: Ledger, inputs: Inputs, tally: Tally, *, retry: bool, replace: bool
    ) -> None:
        self._ledger = ledger
        self._inputs = inputs
        self._tally = tally
        self._retry = retry
        self._replace = replace
        self._pool = ThreadPoolExecutor(1, "enqueue")
        self._batch: list[SpooledPrompt] = []
        self._seq = 0
        self._reply: Future[AddReply] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._settle()
        finally:
            self._pool.shutdown()

    def send(self, batch: list[SpooledPrompt], seq: int) -> None:
        """Wait for the call before, then begin this one.

        Args:
            batch: Prompts, those that are new in the object of `inputs/` with this sequence.
            seq: 0 when none was written.
        """
        self._settle()
        self._batch, self._seq = batch, seq
        self._reply = self._pool.submit(self._add)

    def _settle(self) -> None:
        if self._reply is None:
            return
        try:
            reply = self._reply.result()
        except RedisFullError:
            reply = self._inputs.until_room(self._add)
        self._reply = None
        _note(reply, self._tally)
        reached("enqueue.queued")
        if reply.conflicts and not self._replace:
            raise _overtaken(self._batch, reply)

    def _add(self) -> AddReply:
        return self._ledger.add(
            self._batch, inputs_seq=self._seq, retry=self._retry, replace=self._replace
        )


def _note_entry(prompt: SpooledPrompt, entry: LedgerEntry | None, compared: Compared) -> _Known:
    """Count what the ledger holds of a prompt, and tell what pass 2 is to do with it."""
    if entry is None:
        compared.absent += 1
        return _Known.ABSENT
    if entry.fingerprint != prompt.fingerprint:
        return _note_conflict(prompt, entry, compared)
    if entry.state == "completed":
        compared.completed += 1
        return _Known.DONE
    setattr(compared, entry.state, getattr(compared, entry.state) + 1)
    return _Known.SEND


def _note_conflict(prompt: SpooledPrompt, entry: LedgerEntry, compared: Compared) -> _Known:
    compared.conflicts += 1
    replaceable = entry.state in {"queued", "failed"}
    compared.replaceable += replaceable
    for examples, wanted in ((compared.differing, True), (compared.kept, not replaceable)):
        if wanted and len(examples) < SHOWN_CONFLICTS:
            examples.append(f"{_named(prompt)} ({entry.state})")
    return _Known.REPLACE if replaceable else _Known.KEEP


def _note(reply: AddReply, tally: Tally) -> None:
    tally.added += reply.added
    tally.queued += reply.queued
    tally.completed += reply.completed
    tally.failed += reply.failed
    tally.cancelled += reply.cancelled
    tally.restored += reply.restored
    tally.retried += reply.retried
    tally.replaced += reply.replaced
    tally.kept += len(reply.conflicts)


def _overtaken(batch: list[SpooledPrompt], reply: AddReply) -> ConflictError:
    keys = set(reply.conflicts)
    prompt = next(prompt for prompt in batch if prompt.key in keys)
    return ConflictError(
        f"another producer queued another text meanwhile: {_named(prompt)}; that id keeps the "
        "text that came first"
    )


def _sliced(group: list[SpooledPrompt], known: Sequence[int]) -> Iterator[list[SpooledPrompt]]:
    """Cut what is to be sent into calls of at most 1,000 rows and some megabytes."""
    batch: list[SpooledPrompt] = []
    size = 0
    for prompt, what in zip(group, known, strict=True):
        if what >= _Known.DONE:
            continue
        batch.append(prompt)
        size += len(prompt.prompt)
        if len(batch) >= CALL_ROWS or size >= CALL_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _named(prompt: SpooledPrompt) -> str:
    row = _decode_prompt(prompt.prompt)
    source = shown(row.source or "-")
    sample = f" sample {row.sample}" if row.sample else ""
    return f"id {one_line(bytes(row.id).decode())}{sample}, {source} line {row.line}"
