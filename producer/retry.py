"""`producer retry`: prompts that failed get a new try, all or by why they failed.

    find      the run, in Redis, or made from its store
    go        through the failures that are current (`producer.failures`), and pick
    revoke    `_SUCCESS`, before the first is queued
    queue     each with the request that its row holds, ~1,000 a call

Killed anywhere, the same call again goes on: what has a new try is no failure any more.
"""

import re
import time
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from common import connect, ending, names
from common.advice import count_of
from common.crashpoints import reached
from common.errors import ConflictError, StateLostError, UsageError
from common.marks.noting import note_of_run
from common.models import RunRecord
from common.queue import Ledger, Runs
from common.queue.ledger import CALL_ROWS
from common.reconcile import reconcile
from common.store import ObjectStore
from producer.accepted import Inputs
from producer.failures import Failure, current_failures, with_requests
from producer.locate import Where
from producer.meter import Meter, MeterFor
from producer.request import Say
from producer.resume import find_or_adopt

if TYPE_CHECKING:
    import redis

AGAIN_S = 1.0


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which failures to try again; what is empty asks for nothing.

    Attributes:
        reasons: Reason words, HTTP statuses ("413") and classes of them ("5xx"); any will do.
        ids: Prompt ids as text.
        cancelled: Also prompts that were cancelled.
    """

    reasons: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    cancelled: bool = False

    def takes(self, failure: Failure) -> bool:
        """Tell whether this one is asked for."""
        if failure.outcome == "cancelled" and not self.cancelled:
            return False
        if self.ids and _id_text(failure) not in self.ids:
            return False
        words = {failure.reason, *_status_words(failure.status)}
        return not self.reasons or not words.isdisjoint(self.reasons)


class Retried(msgspec.Struct, kw_only=True):
    """What a call found and did; counts of prompts.

    Attributes:
        failed, cancelled: What there was.
        by_reason: The same by reason.
        by_status: Those that a server answered, by HTTP status.
        matched: Were asked for, by reason.
        retried: Have a new try; in a dry run none.
        bare: Were asked for, but their request is nowhere.
        paused: Why the run is paused, None while it is not.
    """

    run: str
    output: str
    dry_run: bool = False
    failed: int = 0
    cancelled: int = 0
    by_reason: dict[str, int] = {}
    by_status: dict[str, int] = {}
    matched: dict[str, int] = {}
    retried: int = 0
    bare: int = 0
    paused: str | None = None


def wanted(reasons: tuple[str, ...], ids: tuple[str, ...], *, cancelled: bool) -> Wanted:
    """Check what is asked for.

    Raises:
        UsageError: A reason is none.
    """
    for reason in reasons:
        if not re.fullmatch(r"[a-z_]+|[1-5]\d\d|[1-5]xx", reason):
            raise UsageError(
                f"--reason {reason!r}: give a word as `--dry-run` shows them (timeout), an HTTP "
                "status (413) or a class of them (5xx)"
            )
    return Wanted(reasons=reasons, ids=ids, cancelled=cancelled or "cancelled" in reasons)


def retry(
    client: "redis.Redis",
    where: Where,
    asked: Wanted,
    *,
    dry_run: bool,
    say: Say,
    meter: MeterFor = Meter,
) -> Retried:
    """Carry out one call; see the module.

    Raises:
        StateLostError: Nobody knows the run; or, in a dry run, Redis does not.
        ConflictError: The run was cancelled.
    """
    runs = Runs(client, where=connect.address_of(client))
    if dry_run and runs.get(where.run) is None:
        raise StateLostError(
            f"Redis does not know run {where.run!r}, and a dry run changes nothing: `producer "
            f"resume {where.run}` brings it back first"
        )
    record, store, adopted = find_or_adopt(client, runs, where, say=say)
    state = runs.state(record.run)
    if state is not None and state.cancelled:
        raise ConflictError(
            f"run {record.run!r} was cancelled and does not go on: enqueue its files with another "
            "--run"
        )
    if not (adopted or dry_run):
        while reconcile(client, store, record) is None:
            time.sleep(AGAIN_S)  # another process is at it
    told = Retried(run=record.run, output=store.url, dry_run=dry_run)
    told.paused = state.paused if state is not None else None
    call = _Call(client, store, record, told, say=say)
    counts = runs.counts(record.run)
    with meter("retrying", counts.failed + counts.cancelled) as bar:
        call.go(asked, bar)
    if told.retried:
        note_of_run(client, record.run, "retried", count_of(told.retried, "prompt"))
    return told


class _Call:
    """One pass over the failures."""

    def __init__(
        self,
        client: "redis.Redis",
        store: ObjectStore,
        record: RunRecord,
        told: Retried,
        *,
        say: Say,
    ) -> None:
        self._client = client
        self._store = store
        self._record = record
        self._told = told
        self._ledger = Ledger(client, record, where=connect.address_of(client))
        runs = Runs(client, where=connect.address_of(client))
        self._inputs = Inputs(runs, store, record.run, say=say)
        self._revoked = False

    def go(self, asked: Wanted, bar: Meter) -> None:
        found, matched, bare = Counter[str](), Counter[str](), list[Failure]()
        statuses = Counter[str]()
        for step in current_failures(self._client, self._store, self._record, ledger=self._ledger):
            found.update(failure.reason for failure in step)
            statuses.update(str(f.status) for f in step if f.status is not None)
            self._told.cancelled += sum(failure.outcome == "cancelled" for failure in step)
            picked = [failure for failure in step if asked.takes(failure)]
            matched.update(failure.reason for failure in picked)
            bare += [failure for failure in picked if not failure.readable]
            self._queue([failure for failure in picked if failure.readable])
            bar.show(found.total())
        self._told.failed = found.total() - self._told.cancelled
        self._told.by_reason, self._told.by_status = dict(found), dict(statuses)
        self._told.matched = dict(matched)
        restored = with_requests(self._store, bare)
        self._told.bare = len(bare) - len(restored)
        for first in range(0, len(restored), CALL_ROWS):
            self._queue(restored[first : first + CALL_ROWS])
        if self._revoked and self._store.get(names.SUCCESS) is not None:
            # Written between the two, for the run as it was before.
            self._revoke()

    def _queue(self, failures: list[Failure]) -> None:
        if not failures or self._told.dry_run:
            return
        if not self._revoked:
            self._revoke()
        batch = [failure.item for failure in failures]
        reply = self._inputs.until_room(lambda: self._ledger.add(batch, retry=True))
        self._told.retried += reply.retried
        reached("retry.queued")

    def _revoke(self) -> None:
        while not ending.revoke(self._client, self._store, self._record):
            time.sleep(AGAIN_S)  # another process reconciles or ends the run
        self._revoked = True
        reached("retry.revoked")


def _id_text(failure: Failure) -> str:
    """Give an id as a person types it."""
    value = msgspec.json.decode(failure.id)
    return value if isinstance(value, str) else bytes(failure.id).decode()


def _status_words(status: int | None) -> set[str]:
    return set() if status is None else {str(status), f"{status // 100}xx"}
