"""What a sink sees of a run at one instant, and what others see of its sinks."""

from typing import TYPE_CHECKING, Any, cast

import msgspec

from common import connect, names
from common.models import RunRecord
from common.queue.scripts import call
from common.queue.sinklease import LEASE_MS

if TYPE_CHECKING:
    import redis


ERROR_LASTS_MS = 120_000
"""A sink that still fails says so at least twice in this time; an older complaint is over."""


class PartitionView(msgspec.Struct, frozen=True, kw_only=True):
    """One partition at one instant; `first` is the id of the oldest entry, empty without one."""

    entries: int
    first: str
    token: str
    deadline_ms: int
    seq: int


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """What a sink sees of a run at one instant.

    Attributes:
        now_ms: Redis TIME.
        reconciled: Whether Redis and the store were brought together since Redis started.
        sealed: No more prompts will come.
        stream_bytes: What waits in all its streams together.
        unfed: Prompts whose requests wait in `inputs/`.
        sinks: How many sinks serve the run.
        pressed: The streams hold half of what stops claims: store what there is.
        ended: Signature of the state for which `_SUCCESS` was written, empty when never.
    """

    now_ms: int
    reconciled: bool
    sealed: bool
    cancelled_run: bool
    total: int
    completed: int
    failed: int
    cancelled: int
    stream_bytes: int
    unfed: int
    sinks: int
    pressed: bool
    ended: str
    partitions: list[PartitionView]

    @property
    def all_ended(self) -> bool:
        """Whether no prompt is left that could still bring an entry, and none will come."""
        ended = self.completed + self.failed + self.cancelled == self.total
        return ended and (self.sealed or self.cancelled_run)

    @property
    def entries(self) -> int:
        """What waits in all streams together."""
        return sum(partition.entries for partition in self.partitions)


def look(
    client: "redis.Redis",
    record: RunRecord,
    *,
    token: str,
    present_ms: int = LEASE_MS,
) -> RunView | None:
    """See the run as it is at this instant, and be counted among its sinks.

    Returns:
        None when Redis does not know the run, or knows another of its name.
    """
    with connect.mapping_errors(client):
        reply = cast(
            "list[Any]", call(client, "sink_look", record.run, record.uid, token, present_ms)
        )
    if reply[0] == b"unknown":
        return None
    return RunView(
        now_ms=int(reply[1]),
        reconciled=bool(reply[2]),
        sealed=bool(reply[3]),
        cancelled_run=bool(reply[4]),
        total=int(reply[5]),
        completed=int(reply[6]),
        failed=int(reply[7]),
        cancelled=int(reply[8]),
        stream_bytes=int(reply[9]),
        unfed=int(reply[10]),
        sinks=int(reply[11]),
        pressed=reply[12] == b"1",
        ended=reply[13].decode(),
        partitions=[
            PartitionView(
                entries=int(part[0]),
                first=part[1].decode(),
                token=part[2].decode(),
                deadline_ms=int(part[3]),
                seq=int(part[4]),
            )
            for part in zip(*[iter(reply[14:])] * 5, strict=True)
        ],
    )


class SinkState(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run's sinks.

    Attributes:
        sinks: How many serve the run at this instant.
        error: Why nothing is stored at present, None when nobody complains.
        error_at_ms: When that was said last, Redis TIME; 0 without an error.
        next_due_ms: When the oldest waiting result has waited for `batch_s`, Redis TIME: a healthy
            sink stores it by then. None when nothing waits.
    """

    sinks: int = 0
    error: str | None = None
    error_at_ms: int = 0
    next_due_ms: int | None = None


def sink_state(
    client: "redis.Redis",
    record: RunRecord,
    *,
    batch_s: float = 600.0,
    first_batch_s: float = 60.0,
) -> SinkState:
    """Read what is known of a run's sinks, in one round trip.

    Args:
        client: From `common.connect`.
        record: The run.
        batch_s: How long a result may wait, as the sinks were told.
        first_batch_s: The same for a partition's first batch.

    Raises:
        RedisUnusableError: Redis cannot be reached.
    """
    name, partitions = record.run, range(record.partitions)
    with connect.mapping_errors(client), client.pipeline(transaction=True) as pipe:
        pipe.time()
        pipe.zrange(names.sinks(name), 0, -1, withscores=True)
        pipe.hmget(names.run(name), ["sink_error", "sink_error_ms"])
        for partition in partitions:
            pipe.hmget(names.sink(name, partition), ["error", "seq"])
        for partition in partitions:
            pipe.xrange(names.results(name, partition), "-", "+", count=1)
        (seconds, micros), sinks, (error, error_ms), *rest = pipe.execute()
    now_ms = seconds * 1000 + micros // 1000
    lanes, firsts = rest[: len(partitions)], rest[len(partitions) :]
    told, told_ms = (error or b"").decode(errors="replace"), int(error_ms or 0)
    if now_ms - told_ms > ERROR_LASTS_MS:
        # What a partition's sink said stands until its next batch is stored.
        told, told_ms = (
            next((lane[0].decode(errors="replace") for lane in lanes if lane[0]), ""),
            0,
        )
    due = [
        int(first[0][0].partition(b"-")[0])
        + round(1000 * (batch_s if int(lane[1] or 0) else min(batch_s, first_batch_s)))
        for lane, first in zip(lanes, firsts, strict=True)
        if first
    ]
    return SinkState(
        sinks=sum(score > now_ms for _, score in sinks),
        error=told or None,
        error_at_ms=told_ms if told else 0,
        next_due_ms=min(due, default=None),
    )


def complain(client: "redis.Redis", record: RunRecord, why: str) -> None:
    """Say for `producer status` why nothing is stored of a run; empty takes it back."""
    with connect.mapping_errors(client):
        call(client, "sink_complain", record.run, record.uid, why)
