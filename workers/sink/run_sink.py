"""One run as one sink serves it: its share of the partitions, reconcile, and the run's end.

look      the whole run at one instant, one script
reconcile where Redis restarted since the store was last compared with it
feed      requests that wait in `inputs/`, as Redis has room
cancel    where the run was cancelled: end what is left of it
share     take free partitions up to this sink's share, leave what is above it
store     every partition whose batch is due
marks     what somebody or something marked is kept in the store too
end       nothing left to come: the end test and `_SUCCESS`; gone on: `_SUCCESS` goes
"""

import logging
import math
import time
from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, cast

from common import connect, ending, names
from common.cancelling import Canceller, is_cancelled
from common.crashpoints import reached
from common.emptied import refuse_emptied, unaccepted
from common.errors import HeadraceError, RedisUnusableError, StoreEmptiedError
from common.feeder import Feeder
from common.marks import archive
from common.models import RunRecord
from common.queue import Runs
from common.queue.audit import EVERY_MS
from common.queue.cancels import Cancels
from common.queue.maintenance import ended_signature
from common.queue.sinklease import PartitionLease, PartitionLostError
from common.queue.sinkview import RunView, look
from common.reconcile import reconcile
from common.restore import audit_and_restore
from common.store import ObjectStore
from workers.sink.archive import Archive
from workers.sink.batch import Limits, Waiting, due
from workers.sink.partition import PartitionSink

if TYPE_CHECKING:
    import redis

log = logging.getLogger(__name__)

CANCEL_STEP_S = 1.0
"""How long prompts of a cancelled run are ended before what came of it is stored."""

MARKS_S = 10.0
"""How often it is looked for marks that the store lacks."""

AGAIN_S = 60.0
"""How often an end that was proven, or that could not be, is looked at again."""


class Standing(Enum):
    """How a run stands after a step."""

    GOES_ON = auto()
    COMPLETED = auto()
    FAILED = auto()
    GONE = auto()


class RunSink:
    """One run in the hands of one sink process.

    Args:
        client: From `common.connect`.
        store: The run's output, probed.
        record: The run.
        token: This process's token.
        limits: Of a batch.
        clock: Seconds on a clock that never goes back.

    Attributes:
        leases: The partitions that this process holds, by number; read by the thread that renews
            them, written by `step` alone.
        stored_rows, fed_rows: How many this process has stored, and fed from `inputs/`.
    """

    def __init__(
        self,
        client: "redis.Redis",
        store: ObjectStore,
        record: RunRecord,
        *,
        token: str,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.record = record
        self.store = store
        self.leases: dict[int, PartitionLease] = {}
        self.stored_rows = 0
        self.fed_rows = 0
        self._sinks: dict[int, PartitionSink] = {}
        self._client = client
        self._token = token
        self._limits = limits
        self._clock = clock
        self._audit_again_s = self._clock() + EVERY_MS / 1000
        self._heed_again_s = self._look_again_s = self._marks_again_s = 0.0
        self._canceller = Canceller(client, store, record)
        self._differed = False
        self._pinned = False
        self._over = False
        self._marks_said = ""
        self._feeder = Feeder(client, store, record, clock=clock)
        self._archive = Archive(client, store, record, clock=clock)

    def step(self, *, flush: bool = False) -> Standing:
        """Do once what is to be done now.

        Args:
            flush: This sink is to stop: store whatever there is, take nothing new.

        Raises:
            StoreUnusableError: Call again later; nothing is lost.
            RedisUnusableError: Likewise.
        """
        view = look(self._client, self.record, token=self._token)
        if view is None:
            for partition in list(self.leases):
                self._leave(partition)
            return Standing.GONE
        if not view.reconciled:
            reconcile(self._client, self.store, self.record)
            # Whatever had been found out before holds no longer.
            self._canceller = Canceller(self._client, self.store, self.record)
            self._look_again_s = 0.0
            return Standing.GOES_ON
        if not flush:
            self._share(view)
        self._keep_pinned()
        self._keep_marks(close=flush)
        if view.cancelled_run:
            self._keep_telemetry(view)
            return self._cancel(view, stops=flush)
        if self._heed_cancellation():
            return Standing.GOES_ON
        stopping, flush = flush, flush or view.all_ended
        for partition in list(self.leases):
            # In a small Redis a whole batch might not fit under the mark that stops claims.
            self._drain(partition, view, flush=flush or view.pressed)
        self._keep_telemetry(view)
        if view.unfed and not stopping:
            self.fed_rows += self._feeder.step()
        if not (view.all_ended or flush):
            self._audit()
        return self._end(view)

    def release(self) -> None:
        """Leave every partition to others at once."""
        self._feeder.release()
        for partition in list(self.leases):
            self._leave(partition).release()

    def complain(self, why: str) -> None:
        """Say for `producer status` why nothing is stored."""
        for lease in self.leases.values():
            try:
                lease.complain(why)
            except (PartitionLostError, HeadraceError):
                return

    def _lease(self, partition: int) -> PartitionLease:
        return PartitionLease(self._client, self.record, partition=partition, token=self._token)

    def _share(self, view: RunView) -> None:
        """Hold as many partitions as is this sink's share, the fullest free ones first."""
        share = math.ceil(len(view.partitions) / max(view.sinks, 1))
        free = [
            number
            for number, part in enumerate(view.partitions)
            if number not in self.leases
            and (part.token in {"", self._token} or part.deadline_ms <= view.now_ms)
        ]
        free.sort(key=lambda number: -view.partitions[number].entries)
        for number in free[: max(share - len(self.leases), 0)]:
            lease = self._lease(number)
            try:
                lease.take()
            except PartitionLostError:
                continue
            reached("sink.took")
            self._sinks[number] = PartitionSink(
                self._client, self.store, self.record, lease=lease, limits=self._limits
            )
            self.leases[number] = lease
        for partition in list(self.leases)[share:]:
            self._leave(partition).release()

    def _leave(self, partition: int) -> PartitionLease:
        self._sinks.pop(partition).close()
        lease = self.leases.pop(partition)
        lease.leave()
        return lease

    def _drain(self, partition: int, view: RunView, *, flush: bool) -> None:
        """Store one batch of a partition where one is due."""
        part = view.partitions[partition]
        waiting = Waiting(
            entries=part.entries,
            first=part.first,
            bytes=view.stream_bytes * part.entries // max(view.entries, 1),
            closed=part.seq,
        )
        if not due(waiting, self._limits, now_ms=view.now_ms, flush=flush):
            return
        # Once a batch: what an emptied output gets now would hide that it was emptied.
        refuse_emptied(self.store, self.record)
        try:
            self.stored_rows += self._sinks[partition].store_one()
        except PartitionLostError as lost:
            log.info("run %s partition %d: %s; begins anew", self.record.run, partition, lost.why)
            self._leave(partition)

    def _keep_telemetry(self, view: RunView) -> None:
        if 0 in self.leases:
            self._archive.step(view.now_ms, ended=view.all_ended and not view.entries)
        else:
            self._archive.lose()

    def _audit(self) -> None:
        """Put back what RQ's tools took from the run: a sink can reach `inputs/`."""
        if self._clock() < self._audit_again_s:
            return
        self._audit_again_s = self._clock() + EVERY_MS / 1000
        audit_and_restore(self._client, self.store, self.record, every_ms=EVERY_MS)

    def _keep_pinned(self) -> None:
        """Keep the identity of the model in the store too: what was kept first stands."""
        if self._pinned or 0 not in self.leases:
            return
        with connect.mapping_errors(self._client):
            pinned = self._client.hget(names.run(self.record.run), "pinned")
        if not pinned:
            return
        if not self.store.put_if_absent(names.PINNED, cast("bytes", pinned)):
            stored = self.store.get(names.PINNED)
            if stored:
                Runs(self._client).pin_again(self.record.run, stored)
        reached("sink.pinned")
        self._pinned = True

    def _keep_marks(self, *, close: bool = False) -> None:
        """Keep marks in the store too; one that cannot be kept stands in nobody's way."""
        if self._clock() < self._marks_again_s and not close:
            return
        self._marks_again_s = self._clock() + MARKS_S
        try:
            archive.archive(self._client, self.store, self.record, close=close)
        except RedisUnusableError:
            raise
        except HeadraceError as error:
            if self._marks_said != str(error):
                self._marks_said = str(error)
                log.warning("run %s: its marks are in Redis alone: %s", self.record.run, error)

    def _heed_cancellation(self) -> bool:
        """Tell Redis where only the store knows that the run was cancelled."""
        if self._clock() < self._heed_again_s:
            return False
        self._heed_again_s = self._clock() + EVERY_MS / 1000
        if not is_cancelled(self.store):
            return False
        log.warning("run %s was cancelled, and Redis did not know", self.record.run)
        Cancels(self._client, self.record).mark()
        return True

    def _cancel(self, view: RunView, *, stops: bool) -> Standing:
        """End what is left of a cancelled run, as far as there is room, and store it."""
        was_done = self._canceller.done
        if self._clock() >= self._look_again_s and not stops:
            word = self._canceller.step(limit_s=CANCEL_STEP_S)
            if word == "done" or (word == "held" and not self._canceller.held):
                # Now and then: a producer may have written to `inputs/` at the last moment.
                self._look_again_s = self._clock() + AGAIN_S
        for partition in list(self.leases):
            self._drain(partition, view, flush=True)
        if view.ended:
            ending.revoke(self._client, self.store, self.record)
        ended = view.completed + view.failed + view.cancelled == view.total and not view.entries
        return Standing.FAILED if ended and was_done else Standing.GOES_ON

    def _end(self, view: RunView) -> Standing:
        if not view.all_ended or view.entries:
            self._over = False
            self._look_again_s = 0.0
            if view.ended:
                # What this sink stored since it looked may have taken minutes.
                ending.revoke(self._client, self.store, self.record, unless_over=True)
            return Standing.GOES_ON
        seqs = sum(part.seq for part in view.partitions)
        counts = (view.total, view.completed, view.failed, view.cancelled)
        proven = view.ended == ended_signature(*counts, seqs)
        if self._clock() >= self._look_again_s:
            self._look_again_s = self._clock() + AGAIN_S
            if not (proven and ending.stands(self.store)):
                proven = self._test()
        if not proven:
            return Standing.GOES_ON
        if not self._over:
            # Nobody may look at it any more.
            self._keep_marks(close=True)
            self._over = True
        return Standing.COMPLETED if view.completed == view.total else Standing.FAILED

    def _test(self) -> bool:
        report = ending.try_to_end(self._client, self.store, self.record)
        if report is None:
            self._look_again_s = 0.0
            return False
        done = None
        if report.differs:
            done = reconcile(self._client, self.store, self.record, deep=True)
        if not report.ended and not self._differed:
            # At once, unless it is the same difference again: that needs somebody's hand.
            self._look_again_s = 0.0
        self._differed = report.differs
        if done is not None and done.unaccepted:
            self._look_again_s = self._clock() + AGAIN_S
            raise StoreEmptiedError(unaccepted(self.store, self.record, done.unaccepted))
        return report.ended
