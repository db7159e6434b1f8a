"""Do what a run needs when nobody claims from it: while this worker group has nothing to do.

    nothing to claim   feed what waits in `inputs/`; audit its runs: RQ's tools may have removed
                       what the ledger counts on
    Redis restarted    claims wait until somebody has compared it with the store: if no sink does

Both by whichever idle process comes first; the scripts see to it that it is one. A run whose
output this machine cannot reach is audited without bringing lost bodies back.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from common import connect, names
from common.errors import HeadraceError, RedisUnusableError
from common.models import RunRecord
from common.queue.audit import EVERY_MS, AuditReport, audit_run
from workers.engine.desk import RedisDesk
from workers.engine.eligible import Eligible
from workers.timing import Timing

if TYPE_CHECKING:
    import redis

    from common.feeder import Feeder
    from common.store import ObjectStore

log = logging.getLogger(__name__)

LOOK_S = 1.0
FEED_S = 2.0
"""How long nothing is to be claimed before this worker group feeds: sinks do, where any runs."""

EMPTY = "empty"
UNRECONCILED = "unreconciled"


class _Uid(msgspec.Struct, frozen=True):
    uid: str


_uid = msgspec.json.Decoder(_Uid)


class Caretaker:
    """Looks after the runs of one worker group.

    Args:
        client: From `common.connect`.
        eligible: Which runs there are.
        timing: When it is time.
    """

    def __init__(self, client: "redis.Redis", eligible: Eligible, timing: Timing) -> None:
        self._client = client
        self._eligible = eligible
        self._timing = timing
        self._desk = RedisDesk("care")
        self._why = ""
        self._since_s = self._cared_s = time.monotonic()
        # A run's uid -> its output; None where this machine cannot reach it.
        self._stores: dict[str, ObjectStore | None] = {}
        self._feeders: dict[str, Feeder] = {}

    def note(self, why: str) -> None:
        """Take note of why a claim brought nothing, or that it brought something (`ok`)."""
        if why != self._why:
            self._why, self._since_s = why, time.monotonic()

    async def run(self) -> None:
        """Look after the runs for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._why not in {EMPTY, UNRECONCILED}:
                continue
            now_s = time.monotonic()
            try:
                if self._why == EMPTY and now_s - self._since_s >= FEED_S:
                    await self._desk.ask(partial(self._each, self._feed))
                if now_s - max(self._since_s, self._cared_s) >= self._timing.audit_every_s:
                    await self._desk.ask(partial(self._each, partial(self._look_after, self._why)))
                    self._cared_s = time.monotonic()
            except RedisUnusableError:
                await asyncio.sleep(self._desk.wait_s())
                self._cared_s = time.monotonic()

    def close(self) -> None:
        """End the thread; nobody waits for what it still does."""
        self._desk.close()

    def _each(self, care: Callable[[RunRecord], None]) -> None:
        for name in self._eligible.all_names:
            record = self._eligible.record(name)
            if record is None:
                continue
            try:
                care(record)
            except RedisUnusableError:
                raise
            except HeadraceError as error:
                log.info("run %s: %s", name, error)
            except Exception:
                # Help for a run in trouble; the requests that are open here must not pay for it.
                log.exception("looking after run %s failed", name)

    def _look_after(self, why: str, record: RunRecord) -> None:
        store = self._store(record)
        if why == UNRECONCILED:
            # What few worker groups ever need is imported by those.
            from common.reconcile import reconcile  # noqa: PLC0415

            if store is not None and reconcile(self._client, store, record) is not None:
                log.info("run %s: Redis is compared with %s", record.run, store.url)
            return
        report = self._audit(record, store)
        if report.relisted or report.restored or report.cancelled:
            log.warning(
                "run %s: listed %d jobs again, restored %d lost bodies, ended %d cancelled jobs",
                record.run,
                report.relisted,
                report.restored,
                report.cancelled,
            )
        if report.missing:
            log.warning(
                "run %s: %d prompts lost their jobs: `producer resume %s` brings them back",
                record.run,
                len(report.missing),
                record.run,
            )

    def _feed(self, record: RunRecord) -> None:
        """Feed what waits in `inputs/`: sinks do, but there may be none at the moment."""
        with connect.mapping_errors(self._client):
            unfed = int(self._client.hget(names.counts(record.run), "unfed") or 0)
        store = self._store(record) if unfed > 0 else None
        if store is None:
            return
        from common.feeder import Feeder  # noqa: PLC0415

        if record.uid not in self._feeders:
            self._feeders[record.uid] = Feeder(self._client, store, record)
        self._feeders[record.uid].step()

    def _audit(self, record: RunRecord, store: "ObjectStore | None") -> AuditReport:
        # A little less than the period, so that a lone process is not early by its own clock.
        every_ms = min(EVERY_MS, round(self._timing.audit_every_s * 1000)) - 1
        if store is None:
            return audit_run(self._client, record, every_ms=every_ms)
        from common.restore import audit_and_restore  # noqa: PLC0415

        return audit_and_restore(self._client, store, record, every_ms=every_ms)

    def _store(self, record: RunRecord) -> "ObjectStore | None":
        """Open the run's output, if what is there is this very run."""
        from common.store import open_store  # noqa: PLC0415

        if record.uid not in self._stores:
            try:
                store = open_store(record.output, record.endpoint_url, create=False)
                known = store.get(names.RUN_JSON)
                mine = known is not None and _uid.decode(known).uid == record.uid
                if mine:
                    store.probe()
            except (HeadraceError, msgspec.DecodeError) as error:
                # Another machine's directory, perhaps; or not now. Asked again next time.
                log.debug("run %s: its output is not reached from here: %s", record.run, error)
                return None
            self._stores[record.uid] = store if mine else None
        return self._stores[record.uid]
