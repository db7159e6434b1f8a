"""The turn of the one process that reconciles or ends a run: a run-wide lease, and what it may do.

Redis' own run_id is read before anything else, and every script compares it: a process that began
before a restart of Redis can change nothing after it, and the closing mark names the run_id for
which the reconcile holds. The lease has a random token, compared likewise; a thread renews it,
since reading millions of records from a slow store takes longer than it lasts.
"""

import contextlib
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import msgspec

from common import connect, names
from common.errors import HeadraceError, StateLostError
from common.leases import LEASES
from common.mishaps import surviving
from common.models import Record, RunRecord
from common.queue.ledger import job_timeout_s, slice_buckets
from common.queue.packing import CALL_RECORDS, pack, packed
from common.queue.scripts import call

if TYPE_CHECKING:
    from types import TracebackType

    import redis

LEDGER_BUCKETS = 32
"""Most that one call reads."""

INDEX_STEP = 500
RENEW_S = LEASES.turn_ms / 4000


def recount(client: "redis.Redis", record: RunRecord) -> bool:
    """Count a run anew by its ledger where the two differ, and list it where it is not.

    Returns:
        Whether something was wrong: then keys of the run were lost, and only a deep reconcile says
        which.

    Raises:
        StateLostError: Redis does not know the run.
        RedisUnusableError: Redis cannot be reached.
    """
    with connect.mapping_errors(client):
        reply = cast("list[Any]", call(client, "recount", record.run, record.uid))
    if reply[0] == b"unknown":
        raise _unknown(client, record)
    return bool(reply[1])


def _unknown(client: "redis.Redis", record: RunRecord) -> StateLostError:
    return StateLostError(
        f"Redis at {connect.address_of(client)} does not know run {record.run!r}: `producer "
        f"resume {record.run}` brings it back"
    )


class TurnLostError(Exception):
    """This process may not go on: another has the turn, or Redis restarted; begin again later."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the end of a run hangs on, at one instant; equal facts, nothing happened between.

    Attributes:
        entries: What waits in all result streams.
        seqs: Sum of the last closed sequences: grows with every batch.
    """

    reconciled: bool
    sealed: bool
    cancelled_run: bool
    total: int
    completed: int
    failed: int
    cancelled: int
    entries: int
    seqs: int

    @property
    def signature(self) -> str:
        """Name the state of the run that `_SUCCESS` was written for."""
        return ended_signature(self.total, self.completed, self.failed, self.cancelled, self.seqs)


def ended_signature(total: int, completed: int, failed: int, cancelled: int, seqs: int) -> str:
    """Name a state: any new try changes a count, and its end a sequence."""
    return f"{total}/{completed}/{failed}/{cancelled}/{seqs}"


class StreamItem(msgspec.Struct, frozen=True):
    """A stream entry without its row: what a reconcile needs of it."""

    entry_id: str
    partition: int
    key: bytes
    outcome: str
    try_: int


class Maintenance:
    """A process's turn at a run, as a context manager.

    Attributes:
        reconciled: Whether Redis and the store had been brought together when the turn began.
        deep: A deep reconcile was begun and has not ended: its process has died.
        seqs: Last closed sequence of each partition, as Redis knows it.
        intents: Sequence of the standing intent of each partition, 0 without one.

    Raises:
        TurnLostError: At entering: another process has the turn. At any call: see there.
        StateLostError: Redis does not know the run.
    """

    def __init__(self, client: "redis.Redis", record: RunRecord) -> None:
        self._client = client
        self._record = record
        self._token = secrets.token_hex(16)
        self._run_id = ""
        self._ended = threading.Event()
        self.reconciled = self.deep = False
        self.seqs: list[int] = []
        self.intents: list[int] = []

    def __enter__(self) -> Self:
        """Read Redis' run_id, then take the turn."""
        with connect.mapping_errors(self._client):
            self._run_id = connect.server_run_id(self._client)
        self._begin()
        threading.Thread(target=self._renew, name="maintenance", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: "TracebackType | None",
    ) -> None:
        """Give the turn up. Where that fails too it ends by itself within a minute."""
        self._ended.set()
        if error is None:
            self._turn("finish")
            return
        with contextlib.suppress(TurnLostError, HeadraceError):
            self._turn("finish")

    def distrust(self) -> None:
        """Have claims and sinks wait for this turn's reconcile."""
        self._turn("distrust")
        self._begin()

    def mark_cancelled(self) -> None:
        """Take over that the store calls the run cancelled."""
        self._turn("cancelled")

    def facts(self) -> Facts:
        """Read what the end of the run hangs on."""
        reply = self._turn("facts")
        counts = [int(number) for number in reply[4:10]]
        return Facts(
            reconciled=bool(reply[1]),
            sealed=bool(reply[2]),
            cancelled_run=bool(reply[3]),
            total=counts[0],
            completed=counts[1],
            failed=counts[2],
            cancelled=counts[3],
            entries=counts[4],
            seqs=counts[5],
        )

    def note_ended(self, signature: str) -> None:
        """Note for which state `_SUCCESS` was written; empty when there is none."""
        self._turn("ended", signature)

    def pin(self, identity: bytes) -> None:
        """Set what the run's first server was, JSON, to what the store says."""
        self._turn("pin", identity)

    def close(
        self,
        seqs: Sequence[int],
        *,
        inputs_seq: int,
        sealed: bool | None,
        stored: tuple[int, int],
        tokens: tuple[int, int] | None = None,
    ) -> None:
        """Set the closing mark of a reconcile: claims and sinks go on.

        Args:
            seqs: Last closed sequence of each partition; Redis' own stays where it is higher.
            inputs_seq: Highest sequence in `inputs/`.
            sealed: What the last producer said; None leaves it.
            stored: Records and bytes in the store.
            tokens: Of all completions in the store, prompt and completion; they are the run's
                where nothing waits in its streams. None leaves the run's.
        """
        seal = "" if sealed is None else str(int(sealed))
        self._turn("close", inputs_seq, seal, *stored, *(tokens or ("", "")), *seqs)

    # --- The ledger ------------------------------------------------------------------------------

    def teach(self, records: Iterable[Record]) -> int:
        """Take records of the store into the ledger by the reader function.

        Returns:
            How many keys changed.
        """
        changed = 0
        timeout_s = job_timeout_s(self._record.params)
        for blob in packed(records):
            changed += int(self._ledger("teach", blob, timeout_s)[1])
        return changed

    def compare(self, pairs: Sequence[tuple[bytes, bytes]]) -> tuple[list[int], list[int]]:
        """Compare (key in hex, fingerprint in hex) pairs with the ledger.

        Returns:
            Positions of those whose key it lacks, and of those that it has with another
            fingerprint.
        """
        blob = bytes.fromhex(b"".join(part for pair in pairs for part in pair).decode())
        positions = [int(position) for position in self._ledger("compare", blob)[1:]]
        absent = [position - 1 for position in positions if position > 0]
        return absent, [-position - 1 for position in positions if position < 0]

    def give_bodies(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        """Give failed jobs their requests: (key, JSON of `Prompt`) pairs."""
        for first in range(0, len(pairs), CALL_RECORDS):
            step = pairs[first : first + CALL_RECORDS]
            self._ledger("bodies", *(part for pair in step for part in pair))

    def ended_keys(self) -> Iterator[tuple[bytes, bytes]]:
        """Read the whole ledger: (key, value) of every key that has ended, in order of keys."""
        with connect.mapping_errors(self._client):
            total = int(self._client.hget(names.counts(self._record.run), "total") or 0)
        # A run that was begun with few prompts may have many in each bucket by now.
        step = min(slice_buckets(self._record.bits, total), LEDGER_BUCKETS)
        for first in range(0, 1 << self._record.bits, step):
            reply = self._ledger("ended", first, step)
            yield from zip(reply[1::2], reply[2::2], strict=True)

    def forget(self, pairs: Sequence[tuple[bytes, bytes]]) -> int:
        """Take out keys whose ledger value is still the given one; returns how many."""
        forgotten = 0
        for first in range(0, len(pairs), CALL_RECORDS):
            step = pairs[first : first + CALL_RECORDS]
            forgotten += int(self._ledger("forget", *(p for pair in step for p in pair))[1])
        return forgotten

    # --- The streams -----------------------------------------------------------------------------

    def stream_items(self) -> Iterator[StreamItem]:
        """Read what waits in all result streams, without the rows.

        A key of it that the ledger has lost, or holds as unfinished, is taught on the way.
        """
        timeout_s = job_timeout_s(self._record.params)
        for partition in range(self._record.partitions):
            first = "-"
            while True:
                reply = self._stream("index", partition, timeout_s, first, INDEX_STEP)
                for part in zip(*[iter(reply[2:])] * 4, strict=True):
                    yield StreamItem(
                        part[0].decode(), partition, part[1], part[2].decode(), int(part[3])
                    )
                if not reply[1]:
                    break
                first = f"({reply[1].decode()}"

    def drop(self, items: Sequence[tuple[StreamItem, Record]]) -> int:
        """Delete entries that the store has; each comes with the record that stays for its key."""
        dropped = 0
        timeout_s = job_timeout_s(self._record.params)
        for partition in range(self._record.partitions):
            mine = [pair for pair in items if pair[0].partition == partition]
            for first in range(0, len(mine), CALL_RECORDS):
                flat: list[Any] = []
                for item, record in mine[first : first + CALL_RECORDS]:
                    flat += [item.entry_id, pack(record)]
                dropped += int(self._stream("drop", partition, timeout_s, *flat)[1])
        return dropped

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_S):
            # Whoever uses the turn finds out by its own calls that it is lost.
            with (
                surviving("the renewal of a turn"),
                contextlib.suppress(TurnLostError, HeadraceError),
            ):
                self._turn("renew")

    def _begin(self) -> None:
        reply = self._turn("begin")
        self.reconciled, self.deep = bool(reply[1]), bool(reply[2])
        self.seqs = [int(seq) for seq in reply[3::2]]
        self.intents = [int(seq) for seq in reply[4::2]]

    def _turn(self, operation: str, *args: Any) -> list[Any]:
        return self._call("reconcile_turn", operation, *args)

    def _ledger(self, operation: str, *args: Any) -> list[Any]:
        return self._call("reconcile_ledger", operation, *args)

    def _stream(self, operation: str, *args: Any) -> list[Any]:
        return self._call("reconcile_stream", operation, *args)

    def _call(self, name: str, operation: str, *args: Any) -> list[Any]:
        fixed = (operation, self._record.run, self._record.uid, self._run_id, self._token)
        with connect.mapping_errors(self._client):
            reply = cast("list[Any]", call(self._client, name, *fixed, *args))
        why = reply[0].decode()
        if why == "unknown":
            raise _unknown(self._client, self._record)
        if why != "ok":
            raise TurnLostError(why)
        return reply
