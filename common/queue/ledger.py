"""The ledger of one run, from the producer's side: what is known of a key, and adding prompts."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

from common import connect, names
from common.errors import ConflictError, RedisFullError, StateLostError
from common.models import Params, RawRow, RunRecord
from common.queue.records import AddReply, LedgerEntry
from common.queue.scripts import call

if TYPE_CHECKING:
    import redis

CALL_ROWS = 1_000
"""Prompts a call: a millisecond-scale script, so other clients never wait long."""

SLICE_KEYS = 1_000
MOST_SLICE_BUCKETS = 512

MOST_MISSING = 100_000
"""Keys that one audit reports: its caller's memory does not depend on the run's length."""


class Ledger:
    """Every key of one run with its fingerprint and state: the one authority on what is done."""

    def __init__(self, client: "redis.Redis", record: RunRecord, *, where: str = "") -> None:
        self._client = client
        self._record = record
        self._where = where or "the given address"
        self._timeout_s = job_timeout_s(record.params)

    def lookup(self, keys: Sequence[bytes]) -> list[LedgerEntry | None]:
        """Read what the ledger holds of each key (16 bytes), None where it holds nothing."""
        with self._errors():
            reply = cast("list[bytes]", call(self._client, "lookup", self._record.run, *keys))
        return [LedgerEntry.read(value) if value else None for value in reply]

    def add(
        self,
        batch: Sequence[RawRow],
        *,
        inputs_seq: int = 0,
        retry: bool = False,
        replace: bool = False,
        cancelled: bool = False,
    ) -> AddReply:
        """Add and queue what is absent, in one atomic step; the same call again changes nothing.

        Args:
            batch: At most about 1,000.
            inputs_seq: Sequence of the object of `inputs/` that holds them, 0 when not known:
                where those are fed from whose requests find no room now.
            retry: Failed and cancelled keys get a new try.
            replace: Queued and failed keys with another fingerprint take the new text.
            cancelled: Into a cancelled run, whose prompts are to end there: listed nowhere.

        Raises:
            ConflictError: The run was cancelled.
            RedisFullError: Nothing of the batch was added.
            StateLostError: The run is not there any more, or is another of the same name.
        """
        modes = (("retry", retry), ("replace", replace), ("cancelled", cancelled))
        mode = ",".join(word for word, on in modes if on)
        flat = [part for item in batch for part in item]
        with self._errors():
            reply = cast(
                "list[Any]",
                call(
                    self._client,
                    "enqueue",
                    self._record.run,
                    self._record.uid,
                    self._timeout_s,
                    mode,
                    inputs_seq,
                    *flat,
                ),
            )
        self._refuse(reply[0])
        numbers = [int(number) for number in reply[1:9]]
        return AddReply(
            added=numbers[0],
            queued=numbers[1],
            completed=numbers[2],
            failed=numbers[3],
            cancelled=numbers[4],
            restored=numbers[5],
            retried=numbers[6],
            replaced=numbers[7],
            conflicts=list(reply[9:]),
        )

    def audit(self, *, relist: bool) -> tuple[int, list[bytes]]:
        """Look through the whole ledger for queued keys that nothing holds.

        Args:
            relist: RQ's queue was seen empty: list again what has its body.

        Returns:
            How many were listed again, and keys (16 bytes) whose body must be restored, at most
            `MOST_MISSING`: restore them and call again.
        """
        relisted = 0
        missing: list[bytes] = []
        with self._errors():
            total = int(self._client.hget(names.counts(self._record.run), "total") or 0)
        step = slice_buckets(self._record.bits, total)
        for first in range(0, 1 << self._record.bits, step):
            with self._errors():
                reply = call(
                    self._client, "audit", self._record.run, first, step, "1" if relist else ""
                )
            relisted += int(reply[0])
            missing.extend(reply[1 : 1 + MOST_MISSING - len(missing)])
        return relisted, missing

    def _refuse(self, word: bytes) -> None:
        """Raise what a reply says that added nothing."""
        if word == b"unknown":
            raise StateLostError(
                f"run {self._record.run!r} has gone from Redis at {self._where}, or was made "
                "anew: call this again"
            )
        if word == b"cancelled":
            raise ConflictError(
                f"run {self._record.run!r} was cancelled and takes no prompts: give another --run"
            )
        if word == b"no_room":
            raise RedisFullError(
                f"Redis at {self._where} holds as many prompts as its maxmemory allows beside "
                "their results: the rest waits until some have ended"
            )

    def _errors(self) -> AbstractContextManager[None]:
        return connect.mapping_errors(self._client, self._where)


def slice_buckets(bits: int, total: int) -> int:
    """Give how many buckets of a ledger one call may look through: those of about 1,000 keys.

    Args:
        bits: The ledger has 2 to the power of it buckets.
        total: Keys in it, about.
    """
    return min(max(SLICE_KEYS * (1 << bits) // max(total, 1), 1), MOST_SLICE_BUCKETS)


def request_timeout_s(params: Params) -> float:
    """Give the limit of one attempt: as asked, else by max_tokens at 5 tokens/s, at least 600."""
    if params.request_timeout_s is not None:
        return params.request_timeout_s
    tokens = params.max_tokens if isinstance(params.max_tokens, int) else 32_768
    return max(600.0, tokens / 5)


def job_timeout_s(params: Params) -> int:
    """Give RQ's own limit for the job: above all attempts together, so that it never decides."""
    return int(request_timeout_s(params) * (params.attempts + 1)) + 3600
