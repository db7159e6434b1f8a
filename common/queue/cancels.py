"""The cancellation of one run in Redis: the mark, what is still to end, the close."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from common import connect, names
from common.errors import StateLostError
from common.models import Claim, Result, RunRecord
from common.queue.jobs import Jobs, read_claim
from common.queue.ledger import slice_buckets
from common.queue.scripts import call

if TYPE_CHECKING:
    import redis

_EPOCH = "cancel"
END_STEP = 256
"""Prompts that one call ends: some milliseconds, so that other clients need not wait."""


class CancelLook(msgspec.Struct, frozen=True, kw_only=True):
    """What one look found of a cancelled run.

    Attributes:
        why: ok; full: the result streams hold as much as may be; unreconciled: Redis restarted;
            going_on: the run is not marked as cancelled. Nothing was looked at but with ok.
        held: Keys (16 bytes) that worker groups lease.
        bare: Keys whose request stands in `inputs/` alone; of a slice, those that have lost it.
        to_end: What is to end as cancelled.
    """

    why: str
    held: list[bytes] = []
    bare: list[bytes] = []
    to_end: list[Claim] = []


class Cancels:
    """One run that is being cancelled. All calls raise StateLostError where Redis lacks it."""

    def __init__(self, client: "redis.Redis", record: RunRecord) -> None:
        self._client = client
        self._record = record
        self._jobs = Jobs(client, epoch=_EPOCH, group=_EPOCH, server="")

    def mark(self) -> None:
        """Mark it: nothing is claimed or added from here on, and renewals end."""
        self._call("mark")

    def slices(self) -> tuple[int, int]:
        """Give the number of ledger buckets, and how many make about a thousand keys."""
        with connect.mapping_errors(self._client):
            total = int(self._client.hget(names.counts(self._record.run), "total") or 0)
        return 1 << self._record.bits, slice_buckets(self._record.bits, total)

    def look(self, *, first: int = 0, buckets: int = 0, keys: Sequence[bytes] = ()) -> CancelLook:
        """Look at a slice of the ledger, and at some keys (16 bytes) besides."""
        reply = self._call("look", first, buckets, *keys)
        why = reply[0].decode()
        if why != "ok":
            return CancelLook(why=why)
        held, bare, to_end = reply[1:4]
        return CancelLook(
            why=why, held=held, bare=bare, to_end=[read_claim(item) for item in to_end]
        )

    def end(self, results: Sequence[Result]) -> int:
        """End prompts; returns how many, fewer than given where their own end came first."""
        steps = (results[at : at + END_STEP] for at in range(0, len(results), END_STEP))
        return sum(self._jobs.finish(step).count("ok") for step in steps)

    def close(self, inputs: int) -> bool:
        """Say that all has ended, for so many objects of `inputs/`; False while it is not so."""
        return bool(self._call("close", inputs)[0] == b"ok")

    def closed_for(self) -> int | None:
        """Read for how many objects of `inputs/` all has ended; None while it has not."""
        with connect.mapping_errors(self._client):
            raw = self._client.hget(names.run(self._record.run), "cancel_done")
        return int(raw) if raw else None

    def _call(self, operation: str, *args: Any) -> list[Any]:
        with connect.mapping_errors(self._client):
            reply = cast(
                "list[Any]",
                call(self._client, "cancel", operation, self._record.run, self._record.uid, *args),
            )
        if reply[0] == b"unknown":
            raise StateLostError(
                f"Redis at {connect.address_of(self._client)} does not know run "
                f"{self._record.run!r}: call the same again"
            )
        return reply
