"""What a sink sees of a run at one instant: read by one script, so that it adds up."""

from typing import TYPE_CHECKING, Any, cast

import msgspec

from common import connect
from common.models import RunRecord
from common.queue.scripts import call
from common.queue.sinklease import LEASE_MS

if TYPE_CHECKING:
    import redis


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
        sinks: How many sinks serve the run.
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
    sinks: int
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
        sinks=int(reply[10]),
        ended=reply[11].decode(),
        partitions=[
            PartitionView(
                entries=int(part[0]),
                first=part[1].decode(),
                token=part[2].decode(),
                deadline_ms=int(part[3]),
                seq=int(part[4]),
            )
            for part in zip(*[iter(reply[12:])] * 5, strict=True)
        ],
    )
