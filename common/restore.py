"""Give prompts whose job lost its request (`rq empty`, `Job.delete`) their job again."""

from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec

from common import catalog, connect
from common.crashpoints import reached
from common.models import RunRecord
from common.queue.audit import AuditReport, audit_run
from common.queue.ledger import CALL_ROWS, Ledger
from common.store import ObjectStore

if TYPE_CHECKING:
    import redis


def restore_bodies(store: ObjectStore, ledger: Ledger, missing: Collection[bytes]) -> int:
    """Go through `inputs/` until every missing prompt is found, and queue them again.

    Memory is that of the missing keys and one object. A row that was accepted with another text
    since is passed over by the ledger's script: only the text whose fingerprint stands in the
    ledger is restored.

    Args:
        store: The run's output.
        ledger: Of the run.
        missing: Keys (16 bytes), as `AuditReport.missing` names them.

    Returns:
        How many are queued again; fewer than asked where others restored them meanwhile.
    """
    wanted = {key.hex().encode() for key in missing}
    restored = 0
    for name in catalog.list_inputs(store).rows:
        if not wanted:
            break
        rows = [row for row in catalog.input_rows(store, name) if row[0] in wanted]
        for first in range(0, len(rows), CALL_ROWS):
            step = catalog.raw_rows(rows[first : first + CALL_ROWS])
            reply = ledger.add(step)
            restored += reply.restored
            reached("audit.restored")
            other_text = {key.hex().encode() for key in reply.conflicts}
            wanted -= {key.hex().encode() for key, _, _ in step} - other_text
    return restored


def audit_and_restore(
    client: "redis.Redis", store: ObjectStore, record: RunRecord, *, every_ms: int = 0
) -> AuditReport:
    """Audit a run and restore every lost body; for whoever can reach the store.

    Args:
        client: From `common.connect`.
        store: The run's output.
        record: The run.
        every_ms: Do nothing when any process audited the run so recently; 0 audits in any case.

    Returns:
        What was put back; `missing` holds what `inputs/` does not have either.

    Raises:
        StateLostError: Redis does not know the run.
        RedisUnusableError, StoreUnusableError: Call again later.
    """
    report = audit_run(client, record, every_ms=every_ms)
    ledger = Ledger(client, record, where=connect.address_of(client))
    relisted, cancelled, restored = report.relisted, report.cancelled, 0
    while report.missing:
        again = restore_bodies(store, ledger, report.missing)
        restored += again
        if not again:
            break
        report = audit_run(client, record)
        relisted += report.relisted
        cancelled += report.cancelled
    return msgspec.structs.replace(
        report, relisted=relisted, cancelled=cancelled, restored=restored
    )
