"""Make the failure that stands for a result which cannot be stored: reason `unstorable`."""

import msgspec

from common.catalog import find_prompt
from common.models import FailureRow, Prompt, RunRecord
from common.queue.ledger import job_timeout_s
from common.queue.sinklease import Replacement
from common.store import ObjectStore
from common.streams import LETTERS, BrokenEntry

REASON = "unstorable"


def unstorable(
    store: ObjectStore, record: RunRecord, broken: BrokenEntry, *, failed_at: str
) -> Replacement | None:
    """Make the failure that takes an entry's place; the request comes from `inputs/`.

    Searching `inputs/` takes its time, but this is rare: our own worker groups write no such rows.

    Returns:
        None when the entry names no key, or one that was never accepted.
    """
    entry = broken.entry
    data = find_prompt(store, entry.key) if entry else None
    if entry is None or data is None:
        return None
    prompt = msgspec.json.decode(data, type=Prompt)
    row = FailureRow(
        id=prompt.id,
        sample=prompt.sample,
        key=entry.key.hex(),
        fingerprint=entry.fingerprint.hex(),
        line=prompt.line,
        source=prompt.source,
        outcome="failed",
        reason=REASON,
        status=None,
        message=broken.why,
        server="",
        try_=entry.try_,
        attempts=0,
        failed_at=failed_at,
        request=msgspec.Raw(data),
    )
    return Replacement(
        key=entry.key,
        try_=entry.try_,
        outcome=LETTERS[entry.outcome],
        row=msgspec.json.encode(row),
        prompt=data,
        job_timeout_s=job_timeout_s(record.params),
    )
