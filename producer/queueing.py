"""Steps 1 and 3 to 6 of `producer.enqueue`: all that needs Redis and the store."""

import os
import socket
import time
from pathlib import Path

import msgspec

from common import names
from common.address import resolve_redis
from common.advice import count_of
from common.connect import connect, persistence_warning, public_address
from common.crashpoints import reached
from common.emptied import unaccepted
from common.errors import ConflictError, StateLostError
from common.models import RunRecord
from common.queue import Ledger, Runs
from common.queue.maintenance import recount
from common.queue.rights import refuse_missing_rights
from common.store import ObjectStore
from producer.accepted import Inputs
from producer.adding import Adder, Compared
from producer.intake import Intake, place_rejects
from producer.joining import Joined, find_run, make_run, new_record
from producer.mending import queue_lost, remake
from producer.meter import MeterFor
from producer.prompts.reader import STDIN
from producer.prompts.rows import RowRules
from producer.prompts.turns import unfit
from producer.reading import read
from producer.request import Asked, Outcome, Request, Say, Tally


class Call:
    """One call that queues."""

    def __init__(self, request: Request, folder: Path, *, say: Say, meter: MeterFor) -> None:
        self._request = request
        self._folder = folder
        self._say = say
        self._meter = meter
        url = resolve_redis(request.redis)
        self._where = public_address(url)
        self._url = url
        self._given_back = False
        self._client = connect(url)
        refuse_missing_rights(self._client, self._where)
        self._runs = Runs(self._client, where=self._where)

    def carry_out(self) -> Outcome:
        """Carry out all steps; see `producer.enqueue`."""
        request = self._request
        joined = find_run(self._runs, request.run, request.asked)
        self._refuse_cancelled()
        rules = _rules(request.rules, request.asked, joined)
        outcome, intake = read(request, rules, self._folder, meter=self._meter)
        if outcome.exit_code:
            return outcome
        self._remake(joined)
        self._together(joined)
        record = joined.record or new_record(
            request.run,
            # Servers answer for any name: rows that name a model want that one.
            msgspec.structs.replace(request.asked, model=outcome.reading.model),
            output=joined.store.url,
            rows=outcome.reading.prompts,
            version=request.version,
        )
        adder = self._adder(record, intake)
        compared = Compared(absent=intake.spool.prompts)
        if joined.record is not None:
            compared = self._compared(adder, rows=intake.spool.prompts)
        made = make_run(self._runs, joined.store, record, priority=request.priority or 0)
        reached("enqueue.created")
        if request.priority is not None:
            self._runs.set_priority(request.run, request.priority)
        if request.window is not None:
            self._runs.set_window(request.run, request.window)
        if made.uid != record.uid:
            # Another producer made the same run since we looked; all its prompts are the run's.
            adder = self._adder(made, intake)
        self._add(
            self._inputs(joined.store),
            adder,
            compared=compared,
            outcome=outcome,
            lost=bool(joined.lost),
        )
        if self._given_back:
            # What the store gave back to this Redis counts as queued by this call.
            outcome.tally.added += compared.queued
            outcome.tally.queued -= compared.queued
        if outcome.reading.rejected:
            path = place_rejects(intake.rejected_path, request.files, run=request.run)
            outcome.rejects_file = str(path)
        outcome.queued, outcome.redis = True, self._url
        counts = self._runs.counts(request.run)
        outcome.total, outcome.unfed = counts.total, counts.unfed
        self._judge(outcome, compared)
        return outcome

    def _inputs(self, store: ObjectStore) -> Inputs:
        request = self._request
        return Inputs(
            self._runs, store, request.run, say=self._say, room_wait_s=request.room_wait_s
        )

    def _refuse_cancelled(self) -> None:
        state = self._runs.state(self._request.run)
        if state is not None and state.cancelled:
            raise ConflictError(
                f"run {self._request.run!r} was cancelled and takes no prompts: give another --run"
            )

    def _remake(self, joined: Joined) -> None:
        """Begin to put an output right that has lost something; see `producer.mending`."""
        if not joined.lost or joined.record is None:
            return
        self._say(
            f"{joined.store.url} has lost {joined.lost}: making it anew from "
            f"{', '.join(self._request.files)}"
        )
        files = self._request.files
        self._runs.open_producer(joined.record.run, _source(files), _about(files))
        remake(joined.store, joined.record)
        reached("enqueue.remade")

    def _together(self, joined: Joined) -> None:
        """Bring Redis to what the store holds, before anything is compared or queued."""
        record, store = joined.record, joined.store
        if record is None:
            return
        # Slow to import, and of no use to a new run.
        from common.reconcile import adopt_run, reconcile  # noqa: PLC0415

        if not joined.in_redis:
            self._say(
                f"Redis at {self._where} does not know run {record.run!r}: reading the store"
            )
            accepted = any(True for _ in store.list(names.INPUTS))
            # Another call may have made the run since we looked: then nothing was lost.
            unknown = self._runs.state(record.run) is None
            adopt_run(self._client, store, record, window=self._request.window)
            state = self._runs.state(record.run)
            # Without accepted prompts, or with another producer at work, the run is being made at
            # this moment and nothing was lost.
            self._given_back = (
                unknown and accepted and state is not None and not state.open_producers
            )
        else:
            # None: another process is at it.
            deep = recount(self._client, record)
            while reconcile(self._client, store, record, deep=deep) is None:
                time.sleep(1.0)
        # The store knows of a cancellation that a new Redis had to be told.
        self._refuse_cancelled()

    def _compared(self, adder: Adder, *, rows: int) -> Compared:
        with self._meter("comparing", rows) as bar:
            compared = adder.compare(bar)
        if compared.conflicts and not self._request.accept_changes:
            more = compared.conflicts - len(compared.differing)
            raise ConflictError(
                f"{compared.conflicts:,} prompts of run {self._request.run!r} have another text "
                f"than before, so nothing was queued: {'; '.join(compared.differing)}"
                + (f"; and {more:,} more" if more else "")
                + " - give another --run, or --accept-changes to replace what is not done yet"
            )
        return compared

    def _adder(self, record: RunRecord, intake: Intake) -> Adder:
        ledger = Ledger(self._client, record, where=self._where)
        return Adder(intake.spool, ledger)

    def _add(
        self,
        inputs: Inputs,
        adder: Adder,
        *,
        compared: Compared,
        outcome: Outcome,
        lost: bool,
    ) -> None:
        """Steps 4 to 6, as far as there is anything to do."""
        request, run = self._request, self._request.run
        state = self._runs.state(run)
        sealed = state is not None and state.sealed
        again = compared.failed + compared.cancelled if request.retry_failed else 0
        revived = bool(lost or compared.absent or again or compared.replaceable)
        outcome.tally = adder.tally
        if not (revived or compared.queued or request.keep_open) and sealed:
            # A seal that says nothing new would only make a valid `_SUCCESS` void.
            _count_only(adder.tally, compared)
            return
        source = _source(request.files)
        inputs.until_room(lambda: self._runs.open_producer(run, source, _about(request.files)))
        reached("enqueue.opened")
        if revived or request.keep_open:
            inputs.store.delete(names.SUCCESS)
            reached("enqueue.revoked")
        if revived or compared.queued:
            self._pass_two(adder, inputs, rows=outcome.reading.prompts, rewrite=lost)
        else:
            _count_only(adder.tally, compared)
        if lost:
            self._queue_lost(adder, inputs.store, outcome)
        if revived or request.keep_open or not sealed:
            inputs.seal(
                outcome.reading.source, sealed=not request.keep_open, rows=adder.tally.added
            )
            reached("enqueue.sealed")
        inputs.until_room(
            lambda: self._runs.close_producer(run, source, sealed=not request.keep_open)
        )
        reached("enqueue.closed")

    def _queue_lost(self, adder: Adder, store: ObjectStore, outcome: Outcome) -> None:
        """Queue again what had ended and lost its results, and count by what stands then."""
        record = self._runs.get(outcome.run)
        if record is None:
            raise StateLostError(f"Redis has lost run {outcome.run!r} meanwhile: call this again")
        report = queue_lost(self._client, store, record)
        tally, stands = outcome.tally, adder.again(outcome.reading.prompts, meter=self._meter)
        ended = tally.completed + tally.failed + tally.cancelled
        tally.completed, tally.failed = stands.completed, stands.failed
        tally.cancelled = stands.cancelled
        tally.lost = max(ended - tally.completed - tally.failed - tally.cancelled, 0)
        tally.added += tally.lost
        if tally.lost:
            outcome.notes.append(
                f"{store.url} had lost the results of {tally.lost:,} prompts that had ended: they "
                "are queued again"
            )
        if report.unaccepted:
            outcome.notes.append(unaccepted(store, record, report.unaccepted))

    def _pass_two(self, adder: Adder, inputs: Inputs, *, rows: int, rewrite: bool = False) -> None:
        request = self._request
        try:
            with self._meter("queueing", rows) as bar:
                adder.add(
                    inputs,
                    meter=bar,
                    retry=request.retry_failed,
                    replace=request.accept_changes,
                    rewrite=rewrite,
                )
        except StateLostError as error:
            if not self._runs.tombstoned(request.run):
                raise
            raise ConflictError(
                f"run {request.run!r} was forgotten while this call was adding to it"
            ) from error
        except BaseException:
            self._say(
                f"ended before the end: {adder.tally.added:,} of {rows:,} prompts were added; "
                "the same call again goes on"
            )
            raise

    def _judge(self, outcome: Outcome, compared: Compared) -> None:
        """Say what people must know, and end with 1 where nothing is left but failures."""
        tally, notes = outcome.tally, outcome.notes
        warning = persistence_warning(self._client)
        if warning:
            notes.append(warning)
        state = self._runs.state(outcome.run)
        if state is not None and state.paused is not None:
            notes.append(
                f"the run is paused ({state.paused}): `producer resume {outcome.run}` lifts it"
            )
        if outcome.unfed:
            wait = "waits" if outcome.unfed == 1 else "wait"
            notes.append(
                f"{count_of(outcome.unfed, 'prompt')} {wait} in the output until others have "
                "ended (--window, or Redis' memory): sinks feed them, nothing need be done"
            )
        if self._request.keep_open:
            notes.append("more prompts are awaited: the run ends after a call without --keep-open")
        if tally.kept:
            more = ", …" if tally.kept > len(compared.kept) else ""
            notes.append(
                f"{tally.kept:,} changed prompts are ended and stay as they are, their new text "
                f"needs a new run: {', '.join(compared.kept)}{more}"
            )
        ended = tally.failed + tally.cancelled
        if ended and not self._request.retry_failed:
            notes.append(f"{ended:,} failed or were cancelled: --retry-failed tries them again")
            if not tally.added + tally.queued + tally.retried + tally.replaced:
                outcome.exit_code = 1


def _count_only(tally: Tally, compared: Compared) -> None:
    tally.completed, tally.failed = compared.completed, compared.failed
    tally.cancelled, tally.queued = compared.cancelled, compared.queued
    tally.kept = compared.conflicts - compared.replaceable


def _rules(rules: RowRules, asked: Asked, joined: Joined) -> RowRules:
    """Complete the rules by what the run was created with.

    Raises:
        ConflictError: It asks for something that they do not go with.
    """
    params = joined.record.params if joined.record else None
    limit = asked.max_tokens or (params.max_tokens if params else None)
    model = asked.model or (params.model if params else None)
    problem = unfit(params.sampling) if params and rules.turns == "all" else ""
    if problem:
        raise ConflictError(
            f"the run keeps what it was created with: {problem}; give another --run"
        )
    return msgspec.structs.replace(rules, model=model, max_tokens_given=limit is not None)


def _source(files: tuple[str, ...]) -> str:
    """Name this producer by what it reads, so that the same call again takes its own place."""
    return "\n".join(name if name == STDIN else os.path.realpath(name) for name in files)


def _about(files: tuple[str, ...]) -> str:
    about = {"files": list(files), "host": socket.gethostname(), "pid": os.getpid()}
    return msgspec.json.encode(about).decode()
