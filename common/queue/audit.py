"""Put back what RQ's tools took from a run: every queued key is listed, leased or parked again.

    cancelled   `Job.cancel`: ends as cancelled, with an entry of its own, once it is not in flight
    lost lists  a stock worker took it, RQ failed it, its list entry is gone: listed again
    lost body   `rq empty`, `Job.delete`: named in the report; `common.restore` brings it back

The look is one cheap script; only when it finds fewer jobs than unfinished prompts is the ledger
gone through, slice by slice. Everything may be repeated, and done by several processes at once.
"""

from typing import TYPE_CHECKING, Any, cast

import msgspec

from common import connect
from common.cancelled_row import cancelled_result
from common.crashpoints import reached
from common.errors import StateLostError
from common.models import Claim, RunRecord
from common.queue.jobs import Jobs, read_claim
from common.queue.ledger import Ledger
from common.queue.scripts import call
from common.utc import utc_now

if TYPE_CHECKING:
    import redis

EVERY_MS = 30_000
"""How often the idle processes of a run, all together, audit it."""

CANCELLED_STEP = 100
_EPOCH = "audit"


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit found and did.

    Attributes:
        relisted: Jobs that were in no list and are in RQ's queue again.
        cancelled: Prompts that ended because somebody cancelled their job.
        missing: Keys (16 bytes) whose job lost its request, at most `Ledger.MOST_MISSING`;
            `common.restore.restore_bodies` queues them again.
        restored: Lost bodies that are back; only `common.restore.audit_and_restore` does that.
        recent: Another process audited the run within the asked time: nothing was looked at.
    """

    relisted: int = 0
    cancelled: int = 0
    missing: tuple[bytes, ...] = ()
    restored: int = 0
    recent: bool = False


class _Look(msgspec.Struct, frozen=True):
    """What the first script saw, in counts of keys or jobs, but those that wait in `inputs/`."""

    unfinished: int
    listed: int
    leased: int
    parked: int
    looked_at: int
    left: int
    to_end: list[Claim]

    @classmethod
    def read(cls, reply: list[Any]) -> "_Look":
        unfinished, listed, leased, parked, looked_at, left = (int(n) for n in reply[1:7])
        to_end = [read_claim(item) for item in reply[7:]]
        return cls(unfinished, listed, leased, parked, looked_at, left, to_end)


def audit_run(client: "redis.Redis", record: RunRecord, *, every_ms: int = 0) -> AuditReport:
    """Look for prompts that the ledger counts on and nothing holds, and put them back.

    Args:
        client: From `common.connect`.
        record: The run.
        every_ms: Do nothing when any process audited the run so recently; 0 audits in any case.

    Raises:
        StateLostError: Redis does not know the run.
        RedisUnusableError: Redis cannot be reached, or is full: call again later.
    """
    with connect.mapping_errors(client):
        look = _look(client, record, every_ms=every_ms)
        if look is None:
            return AuditReport(recent=True)
        cancelled, passed_over = 0, 0
        while look.looked_at:
            cancelled += _cancel(client, look.to_end)
            passed_over += look.left
            look = _look(client, record, skip=passed_over) or look
    unheld = look.unfinished - look.listed - look.leased - look.parked
    if unheld <= 0:
        return AuditReport(cancelled=cancelled)
    ledger = Ledger(client, record, where=connect.address_of(client))
    # Whatever is in RQ's list cannot be told from what is in none without reading all of it.
    relisted, missing = ledger.audit(relist=look.listed == 0)
    if relisted:
        reached("audit.listed")
    return AuditReport(relisted=relisted, cancelled=cancelled, missing=tuple(missing))


def _cancel(client: "redis.Redis", claims: list[Claim]) -> int:
    if not claims:
        return 0
    at = utc_now()
    results = [
        cancelled_result(claim, message="its job was cancelled in RQ", at=at) for claim in claims
    ]
    words = Jobs(client, epoch=_EPOCH, group=_EPOCH, server="").finish(results)
    reached("audit.cancelled")
    return words.count("ok")


def _look(
    client: "redis.Redis", record: RunRecord, *, every_ms: int = 0, skip: int = 0
) -> _Look | None:
    reply = cast(
        "list[Any]",
        call(client, "audit_look", record.run, record.uid, every_ms, CANCELLED_STEP, skip),
    )
    if reply[0] == b"unknown":
        raise StateLostError(
            f"Redis at {connect.address_of(client)} does not know run {record.run!r}: "
            f"`producer resume {record.run}` brings it back"
        )
    if reply[0] == b"recent":
        return None
    return _Look.read(reply)
