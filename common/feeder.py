"""Feed a run: requests that were accepted beyond its window come from `inputs/` into RQ's queue.

`inputs/` is gone through in its order, object by object. Where to go on stands in Redis, so that
whoever feeds next goes on there; an object that was left half-way is read again from its start,
which changes nothing: only prompts that wait are fed. Memory is that of one object.

Failures:
    killed anywhere       the lease runs out in 10 s; the next feeder goes on
    the store is away     nothing is fed; what is in Redis goes on
    Redis restarted       feeding waits for the reconcile
    nothing found         all objects were gone through and prompts still wait: from the start
"""

import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from common import catalog
from common.crashpoints import reached
from common.errors import HeadraceError
from common.models import RawRow, RunRecord
from common.queue.feed import FeedLostError, FeedTurn, Room
from common.queue.ledger import CALL_ROWS
from common.store import ObjectStore

if TYPE_CHECKING:
    import redis

log = logging.getLogger(__name__)

STEP_ROWS = 20_000
"""Rows that one step goes through at most: its caller has other things to do."""

CALL_BYTES = 8 * 1024 * 1024
FROM_START_AGAIN_S = 30.0


class Feeder:
    """Feeds one run, a bounded step at a time.

    Args:
        client: From `common.connect`.
        store: The run's output.
        record: The run.
        clock: Seconds on a clock that never goes back.
    """

    def __init__(
        self,
        client: "redis.Redis",
        store: ObjectStore,
        record: RunRecord,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._store = store
        self._record = record
        self._clock = clock
        self._turn = FeedTurn(client, record, token=secrets.token_hex(16))
        self._listing: list[str] = []
        # The objects in hand, one as a rule: where they were looked for from, their sequence,
        # their rows, and how many of those are settled.
        self._start = self._seq = -1
        self._rows: list[RawRow] = []
        self._settled = 0
        self._through_s: float | None = None

    def step(self) -> int:
        """Feed what there is room for, of at most `STEP_ROWS` rows.

        Returns:
            How many prompts were fed.

        Raises:
            RedisUnusableError, StoreUnusableError, StoreDamagedError: Call again later.
        """
        room = self._turn.begin()
        if room is None:
            self._drop()
            return 0
        reached("feed.begun")
        try:
            return self._feed(room)
        except FeedLostError:
            self._drop()
            return 0

    def release(self) -> None:
        """Leave feeding to others at once."""
        self._drop()
        with contextlib.suppress(FeedLostError, HeadraceError):
            self._turn.finish()

    def _feed(self, room: Room) -> int:
        fed = looked = 0
        if room.again is not None:
            self._listing = []
            if room.again <= self._seq:
                self._drop()
        start = room.start
        while looked < STEP_ROWS and fed < room.requests:
            if not self._open(start):
                self._begin_again(start)
                break
            batch = self._next_batch()
            if batch:
                settled, done = self._turn.feed(batch, most=room.requests - fed)
                looked, fed = looked + settled, fed + done
                self._settled += settled
                reached("feed.fed")
                if settled < len(batch):
                    break
            if self._settled >= len(self._rows):
                self._turn.advance(start, self._seq + 1)
                reached("feed.advanced")
                start = self._seq + 1
                self._drop()
        if fed:
            log.debug("run %s: fed %d prompts from inputs/", self._record.run, fed)
        return fed

    def _open(self, start: int) -> bool:
        """Have the first object at or behind `start` in hand; False when there is none."""
        if self._rows and self._start == start:
            return True
        name = self._find(start)
        if name is None:
            self._listing = catalog.list_inputs(self._store).rows
            name = self._find(start)
        if name is None:
            return False
        self._through_s = None
        self._start, self._seq = start, catalog.inputs_seq(name)
        self._settled = 0
        # Two producers may have had one number: one before Redis was taken back, the other after.
        alike = [other for other in self._listing if catalog.inputs_seq(other) == self._seq]
        self._rows = catalog.raw_rows(
            row for each in alike for row in catalog.input_rows(self._store, each)
        )
        return True

    def _find(self, start: int) -> str | None:
        """Find the first listed object at or behind `start`."""
        following = (name for name in self._listing if catalog.inputs_seq(name) >= start)
        return next(following, None)

    def _begin_again(self, start: int) -> None:
        """All was gone through, and yet prompts wait: look from the first object, by and by."""
        now_s = self._clock()
        if self._through_s is None:
            self._through_s = now_s
        elif start and now_s - self._through_s >= FROM_START_AGAIN_S:
            log.warning("run %s: prompts wait behind what was fed", self._record.run)
            self._turn.advance(start, 0)
            self._through_s = None

    def _next_batch(self) -> list[RawRow]:
        batch: list[RawRow] = []
        size_bytes = 0
        for row in self._rows[self._settled : self._settled + CALL_ROWS]:
            if batch and size_bytes + len(row[2]) > CALL_BYTES:
                break
            batch.append(row)
            size_bytes += len(row[2])
        return batch

    def _drop(self) -> None:
        self._start = self._seq = -1
        self._rows, self._settled = [], 0
