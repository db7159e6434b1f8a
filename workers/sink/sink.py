"""The sink process: from result streams to the store, for all runs that it serves.

One thread stores, one renews the leases meanwhile (a PUT may take longer than a lease lasts), one
writes progress. What waits stays in Redis until it is due, so nothing is lost with the process.

Failures:
    store away or full   the run waits with jitter and says so at most once a minute, also where
                         it was away from the start; others go on; the streams grow until claims
                         pause by their bytes
    Redis away           all waits likewise, never exits
    SIGTERM, SIGINT      whatever waits is stored within the grace, then partitions are released;
                         a second signal, or the grace's end, leaves the rest in the streams, also
                         while a call to the store or to Redis hangs
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from common import connect
from common.errors import (
    ConflictError,
    HeadraceError,
    RedisUnusableError,
    StateLostError,
    StoreEmptiedError,
    StoreUnusableError,
    UsageError,
)
from common.mishaps import surviving
from common.models import RunRecord
from common.notify import LEAVE_S, Notifier
from common.queue import Runs
from common.queue.runs import unknown_run
from common.queue.sinklease import LEASE_MS, PartitionLease, PartitionLostError, new_token
from common.queue.sinkview import complain
from common.reconcile import refuse_other_run
from common.store import ObjectStore, open_store, outer_retry
from common.store.parquet import SUFFIX, check_pyarrow
from common.store.retry import full_jitter_s
from workers.sink.batch import Limits
from workers.sink.partition import BatchRefusedError
from workers.sink.progress import ProgressWriter
from workers.sink.run_sink import RunSink, Standing

if TYPE_CHECKING:
    import redis

log = logging.getLogger(__name__)

RENEW_S = LEASE_MS / 3000
SAY_S = 60.0
PROBE_LIMIT_S = 20.0
OPEN_AGAIN_S = 30.0
STOPPED_NOTIFY_S = 1.0
GUARD_S = 3.0
"""What a stop may take beyond the grace, before what hangs is left."""


class SinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a sink process is told.

    Attributes:
        runs: Serve only these; empty serves all that Redis knows.
        limits: Of a batch.
        grace_s: How long a stop may take.
        state_dir: Where progress.json of each run is written, below its name.
        poll_s: How often it looks.
        until_done: Return when all of `runs` have ended.
        notify: Command or address that is told what is new of its runs; None tells nobody.
    """

    runs: tuple[str, ...] = ()
    limits: Limits = Limits()
    grace_s: float = 25.0
    state_dir: Path = Path(".headrace")
    poll_s: float = 1.0
    until_done: bool = False
    notify: str | None = None


class _Served:
    """A run, and when it may be tried again after its store failed."""

    def __init__(self, sink: RunSink) -> None:
        self.sink = sink
        self.failures = 0
        self.stored_rows = 0
        self.again_s = 0.0
        self.said_s = float("-inf")
        self.complained = False
        self.standing = Standing.GOES_ON


class Sink:
    """One sink process.

    Args:
        client: From `common.connect`.
        options: What it is told.
        open_output: Opens a run's output.
    """

    def __init__(
        self,
        client: "redis.Redis",
        options: SinkOptions,
        *,
        open_output: Callable[[RunRecord], ObjectStore] | None = None,
    ) -> None:
        self._client = client
        self._options = options
        self._open = open_output or (lambda record: open_store(record.output, record.endpoint_url))
        self._runs = Runs(client, where=connect.address_of(client))
        self._token = new_token()
        self._notifier = (
            Notifier(client, options.notify, old_too=options.until_done)
            if options.notify
            else None
        )
        self._progress = ProgressWriter(
            client, options.state_dir, self._sinks, notifier=self._notifier
        )
        self._served: dict[str, _Served] = {}
        self._said_redis_s = float("-inf")
        # Runs whose output was refused, and when it is tried again.
        self._open_again_s: dict[str, float] = {}
        # What was said of a run that is not served, and when.
        self._said: dict[str, tuple[str, float]] = {}
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._left = threading.Event()

    def stop(self) -> None:
        """Ask for a clean stop; safe in a signal handler."""
        self._stop.set()

    def run(self) -> int:
        """Serve until stopped, or until all named runs have ended.

        Returns:
            0, or 1 when a named run has ended with failures.

        Raises:
            StoreUnusableError: At start: an output refuses what would be refused later.
            RedisUnusableError: At start.
        """
        self._find(at_start=True)
        threads = [threading.Thread(target=self._renew, name="renew", daemon=True)]
        threads.append(
            threading.Thread(target=self._progress.run, args=[self._ended], daemon=True)
        )
        threads.append(threading.Thread(target=self._guard, name="guard", daemon=True))
        for thread in threads:
            thread.start()
        try:
            while not self._stop.is_set() and not self._all_done():
                if not self._pass():
                    self._stop.wait(self._options.poll_s)
            if self._stop.is_set():
                self._flush()
        finally:
            self._ended.set()
            self._release()
        self._progress.write_all()
        if self._notifier is not None:
            self._notifier.close(STOPPED_NOTIFY_S if self._stop.is_set() else LEAVE_S)
        self._left.set()
        failed = any(served.standing is Standing.FAILED for served in self._served.values())
        return 1 if failed else 0

    def _pass(self, *, flush: bool = False) -> bool:
        """Go once over all runs; True when something moved, so that more may be due."""
        try:
            self._find()
        except RedisUnusableError as error:
            self._say_redis(error)
            self._stop.wait(connect.jittered(2.0))
            return False
        before = self._moved()
        for name, served in list(self._served.items()):
            if time.monotonic() >= served.again_s:
                self._serve(name, served, flush=flush)
        return self._moved() > before

    def _moved(self) -> int:
        sinks = self._sinks()
        return sum(sink.stored_rows + sink.fed_rows for sink in sinks)

    def _serve(self, name: str, served: _Served, *, flush: bool) -> None:
        before = served.sink.stored_rows
        try:
            served.standing = served.sink.step(flush=flush)
        except RedisUnusableError as error:
            self._say_redis(error)
            served.again_s = time.monotonic() + connect.jittered(2.0)
        except (HeadraceError, BatchRefusedError) as error:
            self._wait(name, served, error)
        else:
            served.failures = 0
            ended = served.standing in {Standing.COMPLETED, Standing.FAILED}
            if served.complained and (ended or served.sink.stored_rows > before):
                served.complained = False
                self._complain(served.sink.record, "")
            if served.standing is Standing.GONE:
                del self._served[name]

    def _wait(self, name: str, served: _Served, error: Exception) -> None:
        """Let a run wait for its store, longer each time, and say so now and then."""
        if served.sink.stored_rows > served.stored_rows:
            # Some partition got on: the store is troubled, and not away.
            served.failures, served.stored_rows = 0, served.sink.stored_rows
        delay_s = full_jitter_s(served.failures)
        served.failures += 1
        served.again_s = time.monotonic() + delay_s
        emptied = isinstance(error, StoreEmptiedError)
        if time.monotonic() - served.said_s >= SAY_S:
            served.said_s = time.monotonic()
            if emptied:
                log.error("run %s waits: %s", name, error)
            else:
                log.warning("run %s waits, nothing is lost: %s", name, error)
        if not emptied:
            # Stands until the next batch is stored; an output that is back may have none to come.
            served.sink.complain(str(error))
        served.complained = True
        self._complain(served.sink.record, str(error))

    def _complain(self, record: RunRecord, why: str) -> None:
        with suppress(RedisUnusableError):
            complain(self._client, record, why)

    def _say(self, level: int, name: str, text: str) -> None:
        """Say something of a run that is not served: when it is new, then once a minute."""
        said, said_s = self._said.get(name, ("", float("-inf")))
        if said != text or time.monotonic() - said_s >= SAY_S:
            self._said[name] = text, time.monotonic()
            log.log(level, "%s", text)

    def _say_redis(self, error: Exception) -> None:
        if time.monotonic() - self._said_redis_s >= SAY_S:
            self._said_redis_s = time.monotonic()
            log.warning("waiting for Redis, nothing is lost: %s", error)

    def _find(self, *, at_start: bool = False) -> None:
        """Open the output of runs that are new here."""
        wanted: Sequence[str] = self._options.runs or self._runs.names()
        for name in wanted:
            known = self._served.get(name)
            try:
                record = self._runs.get(name)
            except StateLostError as error:
                self._say(logging.ERROR, name, str(error))
                continue
            if record is None and known is None:
                self._say(logging.WARNING, name, unknown_run(name))
            if record is None or (known and known.sink.record.uid == record.uid):
                continue
            if time.monotonic() < self._open_again_s.get(name, 0.0):
                continue
            try:
                self._open_run(record, deadline_s=PROBE_LIMIT_S if at_start else 0.0)
            except (StoreUnusableError, UsageError, ConflictError) as error:
                away = isinstance(error, StoreUnusableError) and error.retryable
                if at_start and len(wanted) == 1 and not away:
                    raise
                self._open_again_s[name] = time.monotonic() + OPEN_AGAIN_S
                self._tell_closed(record, error, away=away)

    def _tell_closed(self, record: RunRecord, error: HeadraceError, *, away: bool) -> None:
        """Say, here and where status reads it, why a run's output is not open."""
        said = "waits, nothing is lost" if away else "has an output that cannot be used"
        level = logging.WARNING if away else logging.ERROR
        self._say(level, record.run, f"run {record.run} {said}: {error}")
        self._complain(record, str(error))
        self._progress.look(record.run)

    def _open_run(self, record: RunRecord, *, deadline_s: float) -> None:
        """Check with real calls what a sink needs, before anything depends on it."""
        if record.params.format == SUFFIX:
            check_pyarrow()
        store = self._open(record)
        outer_retry(store.probe, deadline_s=deadline_s)
        refuse_other_run(store, record)
        if not store.conditional:
            log.warning(
                "%s does not honour conditional writes: one rare case remains in which a prompt "
                "could be stored twice (protocol.md §7); verify finds it",
                store.url,
            )
        sink = RunSink(self._client, store, record, token=self._token, limits=self._options.limits)
        self._served[record.run] = _Served(sink)
        log.info("serving run %s: %s", record.run, store.url)

    def _all_done(self) -> bool:
        done = {Standing.COMPLETED, Standing.FAILED}
        return self._options.until_done and all(
            name in self._served and self._served[name].standing in done
            for name in self._options.runs
        )

    def _flush(self) -> None:
        """Store what waits, within the grace."""
        log.info("stopping: storing what waits, for at most %.0f s", self._options.grace_s)
        deadline_s = time.monotonic() + self._options.grace_s
        for served in self._served.values():
            served.again_s = 0.0
        while self._pass(flush=True) and time.monotonic() < deadline_s:
            pass

    def _guard(self) -> None:
        """End the process when a stop takes too long: any of its calls may hang for minutes."""
        self._stop.wait()
        if not self._left.wait(self._options.grace_s + GUARD_S):
            # What was to be stored is still in its stream.
            log.error("the grace is over: leaving the rest in the streams")
            os._exit(143)

    def _release(self) -> None:
        for sink in self._sinks():
            try:
                sink.release()
            except (HeadraceError, PartitionLostError):
                return  # the leases end by themselves

    def _sinks(self) -> list[RunSink]:
        return [served.sink for served in list(self._served.values())]

    def _renew(self) -> None:
        """Keep the leases while the other thread waits for a PUT."""
        while not self._ended.wait(RENEW_S):
            for sink in self._sinks():
                for lease in list(sink.leases.values()):
                    with surviving("the renewal of a lease"):
                        self._renew_one(lease)

    @staticmethod
    def _renew_one(lease: PartitionLease) -> None:
        # The storing thread finds out by its own calls.
        with suppress(HeadraceError, PartitionLostError):
            lease.renew()
