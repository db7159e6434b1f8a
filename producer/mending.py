"""Notice that an output has lost what Redis knows it had, and make it anew from the very files.

    notice    no `run.json`, fewer manifests than were written, or fewer accepted prompts than
              Redis counts
    remake    `run.json`, then all prompts of the call into `inputs/`, then a deep reconcile: what
              had ended and has no record any more is queued again

While it goes on this producer is registered as open: no sink tests the end of a run that is half
put right. Killed anywhere, the same call again goes on.
"""

import time
from typing import TYPE_CHECKING

import msgspec

from common import catalog, manifests, names
from common.models import RunRecord
from common.queue import Runs
from common.store import ObjectStore

if TYPE_CHECKING:
    import redis

    from common.reconcile_steps import Report

AGAIN_S = 1.0


def lost_output(runs: Runs, store: ObjectStore, record: RunRecord, *, has_record: bool) -> str:
    """Say what the output has lost, for people; empty when nothing is known to be.

    Redis is read first: what it knows was in the store before.

    Args:
        runs: Of the Redis that knows the run.
        store: Its output.
        record: The run.
        has_record: Its run.json is there.
    """
    if not has_record:
        return f"its {names.RUN_JSON}"
    total = runs.counts(record.run).total
    inputs_seq, seqs = runs.sequences(record)
    listed = manifests.listed(store)
    batches = sum(
        max(seq - sum(1 for part, _ in listed if part == partition), 0)
        for partition, seq in enumerate(seqs)
    )
    if batches:
        return f"{batches:,} batches of results"
    listing = catalog.list_inputs(store)
    # A producer that died between its number and its object leaves a gap too, and lost nothing.
    if len(listing.names) < inputs_seq and (missing := total - _accepted(store, listing)) > 0:
        return f"{missing:,} accepted prompts"
    return ""


def remake(store: ObjectStore, record: RunRecord) -> None:
    """Write what makes an output the run's."""
    store.put_if_absent(names.RUN_JSON, msgspec.json.encode(record))


def queue_lost(client: "redis.Redis", store: ObjectStore, record: RunRecord) -> "Report":
    """Queue again what had ended and has no record any more; `inputs/` has been written."""
    # Slow to import, and of no use to most calls.
    from common.reconcile import reconcile  # noqa: PLC0415

    while (report := reconcile(client, store, record, deep=True)) is None:
        time.sleep(AGAIN_S)  # another process is at it
    return report


def _accepted(store: ObjectStore, listing: catalog.InputsListing) -> int:
    """Count the distinct keys of `inputs/`; reads all of it."""
    with catalog.Bins() as keys:
        for _, rows in catalog.all_inputs(store, listing.rows):
            keys.add(row[0] + b"\n" for row in rows)
        return sum(len(set(lines)) for lines in keys)
