"""Cancel a run: mark it for good, then end what is left of it, in bounded steps.

    mark     `cancelled.json` in the store, THEN Redis: a wipe of Redis does not revive the run
    ledger   every unfinished key that nobody leases ends as cancelled, with an entry of its own
    inputs   those whose request is there alone (not fed yet, lost bodies, a wiped Redis) likewise
    leased   those in flight: a renewal tells their worker group to stop, or their lease runs out
    close    all has ended; the next process reads that instead of `inputs/`

Any process that reaches store and Redis may do it, several at once, and begin anew after a death:
`producer cancel` and every sink do. A completion that comes first stays. Where the result streams
hold as much as may be, it waits for a sink.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from common import catalog, connect, names
from common.cancelled_row import cancelled_result
from common.crashpoints import reached
from common.errors import RedisFullError
from common.models import Claim, RawRow, RunRecord
from common.queue.cancels import Cancels
from common.queue.ledger import CALL_ROWS, Ledger
from common.store import ObjectStore
from common.utc import utc_now

if TYPE_CHECKING:
    import redis

Word = Literal["on", "full", "held", "unreconciled", "done"]

MESSAGE = "the run was cancelled"


class Cancellation(msgspec.Struct, frozen=True, kw_only=True):
    """The object `cancelled.json`: the run does not go on, whatever Redis says."""

    run: str
    uid: str
    cancelled_at: str
    schema: int = 1


def is_cancelled(store: ObjectStore) -> bool:
    """Tell whether the run was cancelled, by its store."""
    return store.get(names.CANCELLED) is not None


def mark_store(store: ObjectStore, record: RunRecord) -> bool:
    """Write the mark, and take `_SUCCESS` away; False where the mark was there before."""
    mark = Cancellation(run=record.run, uid=record.uid, cancelled_at=utc_now())
    fresh = not is_cancelled(store)
    if fresh:
        store.put_if_absent(names.CANCELLED, msgspec.json.encode(mark))
    reached("cancel.marked")
    store.delete(names.SUCCESS)
    reached("cancel.revoked")
    return fresh


class Canceller:
    """Ends what is left of one run that is marked in Redis.

    Args:
        client: From `common.connect`.
        store: The run's output.
        record: The run.

    Attributes:
        done: All had ended when it was last looked at.
        ended: Prompts that this object has ended.
        held: Keys that worker groups lease, as last seen.
        bare: How many unfinished prompts had lost their request, as last seen; `inputs/` has it.
    """

    def __init__(self, client: "redis.Redis", store: ObjectStore, record: RunRecord) -> None:
        self._store = store
        self._record = record
        self._cancels = Cancels(client, record)
        self._ledger = Ledger(client, record, where=connect.address_of(client))
        self._covered: set[str] = set()
        self._going: Iterator[Word] | None = None
        self.ended = 0
        self.done = False
        self.held: set[bytes] = set()
        self.bare = 0

    def step(self, *, limit_s: float) -> Word:
        """Go on for at most about so long.

        Returns:
            on: there is more to do now; full: a sink must make room first; held: only prompts in
            flight are left; unreconciled: Redis restarted, reconcile first; done.

        Raises:
            StoreUnusableError, RedisUnusableError: Call again later; nothing is lost.
        """
        until_s = time.monotonic() + limit_s
        try:
            while True:
                self._going = self._going or self._go()
                word: Word = next(self._going, "done")
                self.done = word == "done"
                if word == "done":
                    self._going = None
                if word != "on" or time.monotonic() >= until_s:
                    return word
        except BaseException:
            # A generator that has raised is over: begin anew, what has ended is passed over.
            self._going = None
            raise

    def _go(self) -> Iterator[Word]:
        if self._cancels.closed_for() == len(catalog.list_inputs(self._store).names):
            return
        while True:
            yield from self._ledger_pass()
            yield from self._inputs_pass()
            was_held = bool(self.held)
            while self.held:
                yield "held"
                yield from self._end_keys(sorted(self.held))
            if self._cancels.close(len(self._covered)):
                reached("cancel.closed")
                return
            if was_held and self.bare:
                # One that was in flight has lost its request meanwhile: `inputs/` has it.
                self._covered.clear()
                continue
            # A key that came into the ledger after its slice was read, or one that cannot end.
            yield "held"

    def _ledger_pass(self) -> Iterator[Word]:
        self.bare = 0
        buckets, step = self._cancels.slices()
        for first in range(0, buckets, step):
            yield from self._end(first=first, buckets=step)
            yield "on"

    def _inputs_pass(self) -> Iterator[Word]:
        """End those whose request only `inputs/` has; the ledger may lack them, too.

        The last object first: where a prompt was accepted twice, its last text counts.
        """
        while fresh := self._uncovered():
            for name in sorted(fresh, reverse=True):
                if name.endswith(".zst"):
                    yield from self._end_rows(name)
                self._covered.add(name)
                yield "on"

    def _uncovered(self) -> set[str]:
        return set(catalog.list_inputs(self._store).names) - self._covered

    def _end_rows(self, name: str) -> Iterator[Word]:
        rows = catalog.raw_rows(catalog.input_rows(self._store, name))
        for first in range(0, len(rows), CALL_ROWS):
            step = rows[first : first + CALL_ROWS]
            known = self._ledger.lookup([row[0] for row in step])
            absent = [row for row, entry in zip(step, known, strict=True) if entry is None]
            yield from self._add(absent, inputs_seq=catalog.inputs_seq(name))
            left = {
                row[0]: self._claim(row, try_=entry.try_ if entry else 1)
                for row, entry in zip(step, known, strict=True)
                if entry is None or (entry.state == "queued" and entry.fingerprint == row[1])
            }
            yield from self._end(keys=[key for key in left if key not in self.held], rows=left)
            yield "on"

    def _add(self, absent: Sequence[RawRow], *, inputs_seq: int) -> Iterator[Word]:
        while absent:
            try:
                self._ledger.add(absent, inputs_seq=inputs_seq, cancelled=True)
            except RedisFullError:
                yield "full"
            else:
                return

    def _claim(self, row: RawRow, *, try_: int) -> Claim:
        return Claim(
            run=self._record.run,
            uid=self._record.uid,
            key=row[0],
            fingerprint=row[1],
            try_=try_,
            attempts=0,
            deaths=0,
            lost=0,
            prompt=row[2],
        )

    def _end_keys(self, keys: Sequence[bytes]) -> Iterator[Word]:
        for first in range(0, len(keys), CALL_ROWS):
            step = keys[first : first + CALL_ROWS]
            self.held.difference_update(step)
            yield from self._end(keys=step)

    def _end(
        self,
        *,
        first: int = 0,
        buckets: int = 0,
        keys: Sequence[bytes] = (),
        rows: Mapping[bytes, Claim] | None = None,
    ) -> Iterator[Word]:
        """Look, and end what was found; waits where there is no room.

        Args:
            first: Of a slice of the ledger its first bucket.
            buckets: How many it has.
            keys: What to look at besides.
            rows: What `inputs/` has of these, for those whose request is there alone.
        """
        while True:
            look = self._cancels.look(first=first, buckets=buckets, keys=keys)
            if look.why == "going_on":
                # A Redis that was taken back to before the mark.
                self._cancels.mark()
                continue
            if look.why != "ok":
                yield "full" if look.why == "full" else "unreconciled"
                continue
            at, found = utc_now(), rows or {}
            bare = [found[key] for key in look.bare if key in found]
            results = [
                # As a repetition: where the prompt's own end came first, that is no duplicate.
                msgspec.structs.replace(
                    cancelled_result(claim, message=MESSAGE, at=at), repeat=True
                )
                for claim in (*look.to_end, *bare)
            ]
            try:
                self.ended += self._cancels.end(results) if results else 0
            except RedisFullError:
                yield "full"
                continue
            if results:
                reached("cancel.ended")
            self.held.update(look.held)
            self.bare += len(look.bare) - len(bare)
            return
