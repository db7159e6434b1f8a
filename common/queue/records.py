"""What the queue hands out besides `common.models`: ledger entries, replies, a run's state."""

from typing import Any

import msgspec

from common.models import RunRecord, State

STATES: dict[bytes, State] = {
    b"q": "queued",
    b"u": "queued",
    b"d": "completed",
    b"f": "failed",
    b"c": "cancelled",
}
"""The ledger's letters; `u` is queued too, with its request in `inputs/` alone."""


class LedgerEntry(msgspec.Struct, frozen=True):
    """What the ledger holds of one key; `fingerprint` is 8 bytes."""

    fingerprint: bytes
    state: State
    try_: int

    @classmethod
    def read(cls, value: bytes) -> "LedgerEntry":
        """Read a ledger value (layout: `common.names`)."""
        return cls(value[:8], STATES[value[8:9]], int(value[9:] or b"1"))


class AddReply(msgspec.Struct, frozen=True, kw_only=True):
    """What one call of `Ledger.add` found and did; counts of prompts.

    Attributes:
        added: New keys, queued by this call, or waiting in `inputs/` for room.
        queued, completed, failed, cancelled: Known keys by their state, untouched.
        restored: Of the queued ones, those whose job had been removed and is back.
        retried: Failed or cancelled keys that got a new try.
        replaced: Keys that took the new text.
        conflicts: Keys (16 bytes) with another fingerprint, untouched.
    """

    added: int
    queued: int
    completed: int
    failed: int
    cancelled: int
    restored: int
    retried: int
    replaced: int
    conflicts: list[bytes]


class KnownRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run as who serves it needs to know it.

    Attributes:
        pinned: Identity of the model that the first server had, None before any.
        over: Every prompt has ended, and no more will come: its producers' last call said so, or
            it was cancelled.
    """

    record: RunRecord
    pinned: dict[str, Any] | None
    over: bool


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """A run as Redis knows it at one instant.

    Attributes:
        paused: Why, None while it is not.
        sealed: Its producers' last call said that no more will come, and none is open.
        open_producers: Source -> what is known of the producer that has begun and not ended.
        pinned: Identity of the model that the first server had, None before any.
        reconciled: What this Redis called itself (`connect.server_run_id`) when it and the store
            were last brought together.
        window: Most requests of it in Redis, None where nobody said.
        last_active_ms: Redis TIME of the last claim or finish, 0 before any.
    """

    record: RunRecord
    paused: str | None
    cancelled: bool
    sealed: bool
    open_producers: dict[str, str]
    pinned: dict[str, Any] | None
    reconciled: str | None
    priority: int
    window: int | None
    created_ms: int
    last_active_ms: int


class ClaimReply(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of one claim, and why there are not more.

    Attributes:
        why: ok, suspended, drained, no_slot, full, unreconciled, paused or empty.
        suspects: Whether the jobs are suspects of server deaths: nothing else may be open at the
            server while they are.
        alone: Whether it is one such job, tried by itself.
    """

    why: str
    claims: list[Any]
    suspects: bool = False
    alone: bool = False


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """A drain that stands at a server: nobody opens a request there.

    Attributes:
        token: Tells it from every other drain.
        left_ms: How long until what is open is aborted; 0 or less: now.
        owner, reason: Who wants it and why, for people.
    """

    token: str
    left_ms: int
    owner: str
    reason: str


class SlotReply(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request for slots.

    Attributes:
        what: granted, refused, settle, wait or drained.
        slots: Granted slots; of a drained server those that are kept for what is open.
        other: refused: the other worker group; settle: the dead holder's epoch.
        rid_prefix: settle: whose requests to abort first.
        wait_ms: wait: until when to ask again.
        drain: drained: by whom, and how long what is open may last.
    """

    what: str
    slots: int = 0
    other: str = ""
    rid_prefix: str = ""
    wait_ms: int = 0
    drain: Drained | None = None
