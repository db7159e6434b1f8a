"""Prove that a run has ended, and say so in the store: the end test and `_SUCCESS`.

    1  inputs/ is listed, before anything of Redis is read
    2  Redis: reconciled, sealed, every key ended, nothing in the streams; the last word in inputs/
       is a seal, too
    3  distinct keys of inputs/ = total; completed, failed and cancelled by keys/ = by the ledger
    4  `_SUCCESS` is written; it names the inputs/ that it covers
    5  1 and 2 again, and the manifests: has anything moved, the object is deleted

Failures:
    3 differs          something is lost that Redis counts on: a deep reconcile puts it right
    death after 4      Redis holds `pending`: the next test repeats 5, or takes `_SUCCESS` away
    an `rq requeue`,   the counts leave what `_SUCCESS` was written for: it is taken away, and
    a retry            written anew when the new tries have ended
"""

import logging
from collections import Counter
from typing import TYPE_CHECKING, Literal

import msgspec

from common import catalog, connect, manifests, names, object_names
from common.cancelling import is_cancelled
from common.crashpoints import reached
from common.emptied import refuse_emptied
from common.models import Manifest, RunRecord, Seal
from common.queue import Runs
from common.queue.maintenance import Facts, Maintenance, TurnLostError
from common.reader import current_records
from common.store import ObjectStore
from common.store.frames import digest_name
from common.utc import utc_now

if TYPE_CHECKING:
    import redis

log = logging.getLogger(__name__)

PENDING = "pending"


class Success(msgspec.Struct, frozen=True, kw_only=True):
    """The object `_SUCCESS`: every prompt of the named `inputs/` has ended, and how.

    Attributes:
        status: completed, or completed_with_failures when any failed or was cancelled.
        inputs: Names of all objects of `inputs/` that it covers; void where there are others.
        manifests: How many manifests commit something; `manifest/` lists them. A `void` is none of
            them: it says only that a sequence stays empty, and any later reconcile adds one.
    """

    run: str
    uid: str
    status: Literal["completed", "completed_with_failures"]
    total: int
    completed: int
    failed: int
    cancelled: int
    input_tokens: int
    output_tokens: int
    manifests: int
    inputs: list[str]
    written_at: str
    schema: int = 1


class EndReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the end test found.

    Attributes:
        ended: `_SUCCESS` stands.
        missing: What is not yet so, a phrase each.
        differs: Redis and the store disagree though nothing is under way: reconcile deeply.
    """

    ended: bool = False
    missing: tuple[str, ...] = ()
    differs: bool = False


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """A run by its store alone: current records by outcome, and distinct accepted keys."""

    accepted: int
    completed: int
    failed: int
    cancelled: int
    input_tokens: int
    output_tokens: int


def try_to_end(client: "redis.Redis", store: ObjectStore, record: RunRecord) -> EndReport | None:
    """Make the end test, and write `_SUCCESS` where it holds.

    Args:
        client: From `common.connect`.
        store: The run's output, probed.
        record: The run.

    Returns:
        None when another process reconciles or ends the run: call again later.

    Raises:
        StateLostError: Redis does not know the run.
        StoreUnusableError: Call again when the store works.
        StoreEmptiedError: The output is not the run's any more: what it lacks proves nothing.
    """
    try:
        with Maintenance(client, record) as turn:
            refuse_emptied(store, record)
            runs = Runs(client, where=connect.address_of(client))
            return _test(turn, runs, store, record)
    except TurnLostError:
        return None


def revoke(
    client: "redis.Redis", store: ObjectStore, record: RunRecord, *, unless_over: bool = False
) -> bool:
    """Take `_SUCCESS` away, because the run goes on.

    Args:
        client: From `common.connect`.
        store: The run's output, probed.
        record: The run.
        unless_over: Leave it where all has ended by now: whoever saw the run go on may have looked
            before another process ended it anew.

    Returns:
        False when another process is at it, and where it was left.
    """
    try:
        with Maintenance(client, record) as turn:
            if unless_over and not missing_in_redis(turn.facts()):
                return False
            store.delete(names.SUCCESS)
            reached("end.revoked")
            turn.note_ended("")
    except TurnLostError:
        return False
    log.info("run %s goes on: removed %s", record.run, names.SUCCESS)
    return True


def stands(store: ObjectStore) -> bool:
    """Tell whether `_SUCCESS` is there and covers all that `inputs/` holds; else it is void."""
    data = store.get(names.SUCCESS)
    if data is None:
        return False
    try:
        success = msgspec.json.decode(data, type=Success)
    except msgspec.MsgspecError:
        # Another tool's: many leave an empty one.
        return False
    return success.inputs == catalog.list_inputs(store).names


def _test(turn: Maintenance, runs: Runs, store: ObjectStore, record: RunRecord) -> EndReport:
    if is_cancelled(store):
        # Perhaps Redis was not told, or has forgotten it.
        turn.mark_cancelled()
    listing = catalog.list_inputs(store)
    facts = turn.facts()
    missing = missing_in_redis(facts)
    if missing:
        return EndReport(missing=missing)
    if not catalog.sealed(store, listing):
        _seal(turn, runs, store, record)
        return EndReport(missing=("its seal was written anew",))
    every = catalog.manifests_of(store, record.uid)
    tally = count(store, every, listing)
    differences = differing(tally, facts)
    if differences:
        log.error("run %s cannot end: %s", record.run, "; ".join(differences))
        return EndReport(missing=differences, differs=True)
    turn.note_ended(PENDING)
    reached("end.pending")
    success = _success(record, tally, listing, every)
    store.put(names.SUCCESS, msgspec.json.encode(success))
    reached("end.written")
    if (
        catalog.list_inputs(store).names != listing.names
        or turn.facts() != facts
        or len(manifests.listed(store)) != len({(m.partition, m.seq) for m in every})
    ):
        store.delete(names.SUCCESS)
        reached("end.untrue")
        turn.note_ended("")
        return EndReport(missing=("something came while the end was tested",))
    turn.note_ended(facts.signature)
    log.info("run %s has ended: %s", record.run, success.status)
    return EndReport(ended=True)


def _seal(turn: Maintenance, runs: Runs, store: ObjectStore, record: RunRecord) -> None:
    """Say in the store what Redis knows: that no more prompts will come.

    Producers that end at the same time may number their seals in another order than they close
    in: then the last object of `inputs/` is not the last word. The number is taken before Redis is
    asked again, so whoever begins after that has a higher one.
    """
    seq = runs.next_inputs_seq(record.run)
    if not turn.facts().sealed:
        return
    word = msgspec.json.encode(Seal(sealed=True, source="end test", rows=0, ended_at=utc_now()))
    _, digest = digest_name(word)
    store.put_if_absent(object_names.seal_object(seq, digest), word)
    reached("end.sealed")


def missing_in_redis(facts: Facts) -> tuple[str, ...]:
    """Say what keeps a run from having ended, by Redis. Pure."""
    ended = facts.completed + facts.failed + facts.cancelled
    tests = {
        "Redis and the store are not reconciled": facts.reconciled,
        "it is cancelled": not facts.cancelled_run,
        "more prompts may come (not sealed)": facts.sealed,
        f"{facts.total - ended} prompts have not ended": ended == facts.total,
        f"{facts.entries} results are not yet in the store": facts.entries == 0,
    }
    return tuple(phrase for phrase, holds in tests.items() if not holds)


def differing(tally: Tally, facts: Facts) -> tuple[str, ...]:
    """Say where the store and Redis disagree about a run that seems to have ended. Pure."""
    pairs = {
        "accepted prompts": (tally.accepted, facts.total),
        "completed": (tally.completed, facts.completed),
        "failed": (tally.failed, facts.failed),
        "cancelled": (tally.cancelled, facts.cancelled),
    }
    return tuple(
        f"{what}: {stored} in the store, {known} in Redis"
        for what, (stored, known) in pairs.items()
        if stored != known
    )


def count(store: ObjectStore, every: list[Manifest], listing: catalog.InputsListing) -> Tally:
    """Count a run by its store alone: one pass over `keys/` and `inputs/`, in bounded memory.

    Args:
        store: The run's output.
        every: All its manifests.
        listing: Its `inputs/`.
    """
    outcomes: Counter[str] = Counter()
    accepted = input_tokens = output_tokens = 0
    with catalog.Bins() as inputs, catalog.Bins() as keys:
        for _, rows in catalog.all_inputs(store, listing.rows):
            inputs.add(row[0] + b"\n" for row in rows)
        for _, lines in catalog.all_key_lines(store, every):
            keys.add(lines)
        for accepted_keys, lines in catalog.matched(inputs, keys):
            accepted += len(set(accepted_keys))
            current = current_records(catalog.parsed(lines))
            for record in current.values():
                outcomes[record.outcome] += 1
                if record.outcome == "completed":
                    input_tokens += record.input_tokens
                    output_tokens += record.output_tokens
    return Tally(
        accepted=accepted,
        completed=outcomes["completed"],
        failed=outcomes["failed"],
        cancelled=outcomes["cancelled"],
        input_tokens=input_tokens,
        output_tokens=output_tokens,
    )


def _success(
    record: RunRecord, tally: Tally, listing: catalog.InputsListing, every: list[Manifest]
) -> Success:
    clean = tally.completed == tally.accepted
    return Success(
        run=record.run,
        uid=record.uid,
        status="completed" if clean else "completed_with_failures",
        total=tally.accepted,
        completed=tally.completed,
        failed=tally.failed,
        cancelled=tally.cancelled,
        input_tokens=tally.input_tokens,
        output_tokens=tally.output_tokens,
        manifests=sum(not manifest.void for manifest in every),
        inputs=listing.names,
        written_at=utc_now(),
    )
