"""Put the samples of worker groups into the store of the run that they served: `telemetry/`.

What is archived is told by the store alone: an object's name says up to when it goes, and the
next begins there. So a new sink, a Redis that was rewound or wiped, and a second sink in the first
one's place all go on at the same instant. Whoever holds the run's first partition archives.

    window    from the end of the last object to the next whole `WINDOW_MS` of Redis' clock, once
              that is over; when the run has ended, at once, to the second before this one
    nothing   no object for a time in which no worker group held a prompt of the run
    trouble   with Redis or the store: tried again in a minute; nothing else waits for it, and a
              sample is lost only when Redis has let go of it
"""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from common import names
from common.crashpoints import reached
from common.emptied import refuse_emptied
from common.errors import HeadraceError
from common.models import RunRecord
from common.queue.samples import Samples
from common.store import ObjectStore
from common.store.frames import compress, digest_name
from common.telemetry import KEPT_MS, TelemetryRow, end_of, object_name, row_of

if TYPE_CHECKING:
    import redis

log = logging.getLogger(__name__)

WINDOW_MS = 300_000
LOOK_S = 15.0
AGAIN_S = 60.0
MOST_WINDOWS = 4
"""How many are stored in one step: results come first."""

SETTLED_MS = 1_000
"""A second of Redis' clock that has been over for so long gets no sample any more."""


class Archive:
    """The telemetry of one run in the hands of one sink.

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
        self._samples = Samples(client)
        self._store = store
        self._record = record
        self._clock = clock
        self._again_s = float("-inf")
        self._ended = False
        # Up to when all is archived, None before it was looked up in the store.
        self._done_ms: int | None = None

    def step(self, now_ms: int, *, ended: bool) -> None:
        """Archive what is due; never raises for trouble of Redis or the store.

        Args:
            now_ms: Redis TIME.
            ended: Every prompt of the run has ended.
        """
        now_s = self._clock()
        if now_s < self._again_s and ended <= self._ended:
            return
        self._ended = ended
        self._again_s = now_s + (AGAIN_S if ended else LOOK_S)
        try:
            self._archive(now_ms, ended=ended)
        except HeadraceError as error:
            self._again_s = now_s + AGAIN_S
            log.info("run %s: its telemetry waits: %s", self._record.run, error)

    def lose(self) -> None:
        """Forget how far it was: another sink has archived meanwhile."""
        self._done_ms = None

    def _archive(self, now_ms: int, *, ended: bool) -> None:
        if self._done_ms is None:
            self._done_ms = self._looked_up()
        # Longer than that Redis keeps nothing, and before the run there was nothing of it.
        done_ms = max(self._done_ms, now_ms - KEPT_MS)
        groups = self._samples.groups(done_ms)
        settled_ms = (now_ms - SETTLED_MS) // 1000 * 1000
        for _ in range(MOST_WINDOWS):
            first_ms = self._samples.first_ms(groups, done_ms)
            if first_ms is None:
                return
            begin_ms = max(done_ms, first_ms // WINDOW_MS * WINDOW_MS)
            end_ms = (begin_ms // WINDOW_MS + 1) * WINDOW_MS
            if end_ms > settled_ms:
                if not ended or settled_ms <= first_ms:
                    return
                end_ms = settled_ms
            self._store_window(groups, begin_ms, end_ms)
            self._done_ms = done_ms = end_ms

    def _store_window(self, groups: list[str], begin_ms: int, end_ms: int) -> None:
        uid = self._record.uid
        found: list[TelemetryRow] = []
        for at_ms, group, sample in self._samples.between(groups, begin_ms, end_ms):
            row = row_of(sample, at_ms=at_ms, group=group, uid=uid)
            if row is not None:
                found.append(row)
        if not found:
            return
        rows = b"".join(msgspec.json.encode(row) + b"\n" for row in found)
        sha256, digest = digest_name(rows)
        # As before a batch: what an emptied output gets now would hide that it was emptied.
        refuse_emptied(self._store, self._record)
        self._store.put_if_absent(
            object_name(begin_ms, end_ms, digest), compress(rows), rows_sha256=sha256
        )
        reached("archive.stored")

    def _looked_up(self) -> int:
        ends = (end_of(found.name) for found in self._store.list(names.TELEMETRY))
        return max((end for end in ends if end is not None), default=0)
