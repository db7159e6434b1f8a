"""One partition of a run as its sink holds it: the lease, the intent, the acknowledgement.

There is no consumer group. A sink reads its stream from the start; the stream itself is the list
of what is pending, and an entry leaves it only by the XDEL of `close`. So there is no pending
list, no group and no consumer name that could be lost, and nothing that two readers could be dealt
apart.

The lease carries a random token that every script compares for equality: a counter would repeat
after a rewind of Redis, and the sink of the past would pass for the one of today.
"""

import secrets
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from common import connect
from common.leases import LEASES
from common.models import RunRecord
from common.queue.scripts import call

if TYPE_CHECKING:
    import redis

LEASE_MS = LEASES.sink_ms
"""How long a sink may be silent before another takes its partitions."""


class Intent(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch will hold, written down before anything of it is stored.

    Attributes:
        seq: The batch's sequence within its partition, from 1.
        first, last: Ids of its first and last stream entry.
        rows: How many entries.
    """

    seq: int
    first: str
    last: str
    rows: int


class Limit(msgspec.Struct, frozen=True):
    """Most rows of a batch that begins at or before the entry `until`.

    A batch of so many kept failing: smaller ones find the entry that is to blame.
    """

    rows: int
    until: str

    def holds_for(self, entry_id: str) -> bool:
        """Tell whether a batch that begins with this entry falls under it."""
        return _order(entry_id) <= _order(self.until)


def _order(entry_id: str) -> tuple[int, int]:
    ms, _, number = entry_id.partition("-")
    return int(ms), int(number)


NO_LIMIT = Limit(0, "")
"""Lifts a limit."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a partition stands, as the sink that has just taken it reads it.

    Attributes:
        seq: The last closed sequence.
        intent: Of the sequence after it, None when none is begun.
        tries: How often that intent was attempted without coming to its end.
        limit: See `Limit`; None without one.
    """

    seq: int
    intent: Intent | None
    tries: int
    limit: Limit | None


class PartitionLostError(Exception):
    """This sink may not go on with the partition; `why` is the script's word.

    unknown: the run has gone; unreconciled: all waits for a reconcile; held, lost: another sink
    has it; changed: Redis holds another intent than this sink knows. Nothing was written.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def new_token() -> str:
    """Draw a sink's token: 32 hex digits that no other sink ever had."""
    return secrets.token_hex(16)


class PartitionLease:
    """One partition in the hands of one sink.

    Calls raise `PartitionLostError` when the sink must start over with the partition, and
    `RedisUnusableError` when Redis cannot be reached. `renew` is for another thread than the rest.
    """

    def __init__(
        self,
        client: "redis.Redis",
        record: RunRecord,
        *,
        partition: int,
        token: str,
    ) -> None:
        self._client = client
        self._record = record
        self.partition = partition
        self.token = token
        self._left = False
        # A renewal that Redis got after the release would keep everybody out for a whole lease.
        self._keeping = threading.Lock()

    def take(self, *, lease_ms: int = LEASE_MS) -> Standing:
        """Take the partition, or renew it."""
        reply = self._call("take", lease_ms)
        text = cast("bytes", reply[2])
        return Standing(
            seq=int(reply[1]),
            intent=msgspec.json.decode(text, type=Intent) if text else None,
            tries=int(reply[3]),
            limit=Limit(int(reply[4]), reply[5].decode()) if reply[4] else None,
        )

    def renew(self) -> None:
        """Renew it, unless the partition has been left."""
        with self._keeping:
            if not self._left:
                self.take()

    def leave(self) -> None:
        """Renew it no more; it ends by itself."""
        with self._keeping:
            self._left = True

    def intend(self, intent: Intent) -> None:
        """Write down what the next sequence will hold."""
        self._call("intend", intent.seq, msgspec.json.encode(intent))

    def attempt(self, intent: Intent) -> int:
        """Count an attempt at the intent before it is made; returns how many there were."""
        return int(self._call("attempt", msgspec.json.encode(intent), 1)[1])

    def excuse(self, intent: Intent) -> None:
        """Take the attempt back: the store was to blame, not the batch."""
        self._call("attempt", msgspec.json.encode(intent), -1)

    def close(
        self,
        intent: Intent,
        *,
        entries: Sequence[tuple[str, int]] = (),
        stored_rows: int = 0,
        stored_bytes: int = 0,
        limit: Limit | None = None,
    ) -> None:
        """Acknowledge a sequence whose manifest stands.

        Args:
            intent: As it was written down; the script compares it.
            entries: (entry id, length of its row in bytes) of what the manifest commits; none for
                a void.
            stored_rows: Records that it commits.
            stored_bytes: Bytes of its objects.
            limit: Of the next batches; None leaves it as it is.
        """
        flat = [part for entry in entries for part in entry]
        self._call(
            "close",
            msgspec.json.encode(intent),
            intent.seq,
            stored_rows,
            stored_bytes,
            *((limit.rows, limit.until) if limit else ("", "")),
            *flat,
        )

    def distrust(self, intent: Intent) -> None:
        """Have the whole run reconciled: the store holds what this Redis has forgotten."""
        self._call("distrust", msgspec.json.encode(intent))

    def complain(self, why: str) -> None:
        """Say for `producer status` why nothing is stored; the next batch takes it back."""
        self._call("complain", why)

    def release(self) -> None:
        """Give the partition up, so that another sink need not wait for the lease's end."""
        self.leave()
        self._call("release")

    def set_aside(self, entry_id: str, replacement: "Replacement | None") -> None:
        """Take an entry that cannot be stored out of the stream.

        Args:
            entry_id: Its stream id.
            replacement: The failure that takes its place; None when it names no key: then it is
                kept in a hash for people to look at.
        """
        new = replacement or Replacement()
        fixed = (self._record.run, self._record.uid, self.partition, self.token, entry_id)
        ends = (new.key, new.try_, new.outcome, new.row, new.prompt, new.job_timeout_s)
        with connect.mapping_errors(self._client):
            reply = call(self._client, "sink_set_aside", *fixed, *ends)
        if reply[0] not in {b"ok", b"gone"}:
            raise PartitionLostError(reply[0].decode())

    def _call(self, operation: str, *args: Any) -> list[Any]:
        fixed = (self._record.run, self._record.uid, self.partition, self.token)
        with connect.mapping_errors(self._client):
            reply = cast(
                "list[Any]", call(self._client, "sink_partition", operation, *fixed, *args)
            )
        if reply[0] != b"ok":
            raise PartitionLostError(reply[0].decode())
        return reply


class Replacement(msgspec.Struct, frozen=True, kw_only=True):
    """The failure that takes the place of an entry that cannot be stored.

    Attributes:
        key: 16 bytes, empty for an entry that names none.
        outcome: Letter of the outcome that the entry had: c, f or x.
        row: `FailureRow` as JSON.
        prompt: JSON of the `Prompt`, so that the failed job can be queued again.
    """

    key: bytes = b""
    try_: int = 1
    outcome: str = "c"
    row: bytes = b""
    prompt: bytes = b""
    job_timeout_s: int = 0
