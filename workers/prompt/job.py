"""One leased job of a worker group: ready for a slot, then holding one."""

from typing import TYPE_CHECKING, NamedTuple

from common.models import Claim, Result

if TYPE_CHECKING:
    import asyncio

JobKey = tuple[str, bytes]
"""(run, key): what leases are renewed and given back by."""


def same_try(one: Claim | Result, other: Claim) -> bool:
    """Whether both are of one try of one run, where their keys are the same."""
    return (one.uid, one.try_) == (other.uid, other.try_)


class Ready(NamedTuple):
    """One job that is leased and has no slot yet.

    Attributes:
        suspect: The server died with it: nothing but other suspects may be open beside it.
        alone: It is tried by itself: deaths with it are its own, if they come again.
    """

    claim: Claim
    suspect: bool = False
    alone: bool = False

    @property
    def key(self) -> JobKey:
        """Which job it is."""
        return self.claim.run, self.claim.key


class Open:
    """One job with a slot: its claim, and the request that is open for it now.

    Attributes:
        suspect, alone: See `Ready`.
        slot: Number of its slot, which its request ids bear.
        turn: Number of the turn that it is at, None for a prompt with one.
        rid: Id of the open request, empty between attempts.
        resting: The server asked to be left alone; no request is open for it.
        leaving: What becomes of the job is decided; its request is being aborted.
        since_s: Monotonic instant at which the job took its slot.
        task: Serves it.
    """

    def __init__(self, ready: Ready, *, slot: int, since_s: float) -> None:
        self.claim = ready.claim
        self.slot = slot
        self.suspect = ready.suspect
        self.alone = ready.alone
        self.turn: int | None = None
        self.rid = ""
        self.resting = False
        self.leaving = False
        self.since_s = since_s
        self.task: asyncio.Task[None] | None = None

    @property
    def key(self) -> JobKey:
        """Which job it is."""
        return self.claim.run, self.claim.key
