"""What one worker group's process holds: leased jobs ready to open, open requests, unsent results.

Owned by the event loop's thread; nobody else reads or writes it.
"""

from collections import OrderedDict
from collections.abc import Iterator

from common.models import Claim, KeptTurns, Result
from workers.prompt.job import JobKey, Open, Ready, same_try


class GoingBack:
    """One return of a job; the next return of the same job is another one.

    Redis may have handed a job to this very process again, and that may be giving it back anew,
    before the answer to the first return is read: what that answer ends is the first alone.

    Attributes:
        died: The server died with it.
    """

    def __init__(self, *, died: bool) -> None:
        self.died = died


class Holdings:
    """All jobs that this process leases, by where they stand.

    Attributes:
        ready: Leased, without a slot, by key, in the order of their claim.
        open: Holding a slot, by key.
        leaving: Holding a slot until their requests are aborted; no longer ours to renew.
        unsent: Ended, not yet recorded in Redis; still leased.
        returning: To be given back as soon as Redis answers.
        turns: Finished turns of prompts that are not finished, which Redis has not taken yet.
        claimed: What was claimed since leases were renewed last: the answer to a renewal that
            was asked for before says nothing of it.
    """

    def __init__(self) -> None:
        self.ready: OrderedDict[JobKey, Ready] = OrderedDict()
        self.open: dict[JobKey, Open] = {}
        self.leaving: set[Open] = set()
        self.unsent: dict[JobKey, Result] = {}
        self.returning: dict[JobKey, GoingBack] = {}
        self.turns: dict[JobKey, KeptTurns] = {}
        self.claimed: set[JobKey] = set()

    def returned(self, key: JobKey, going: GoingBack) -> None:
        """Redis has taken a job back."""
        if self.returning.get(key) is going:
            del self.returning[key]

    def forget_turns(self, kept: KeptTurns) -> None:
        """Redis has these turns, or nobody needs them any more; newer ones still wait."""
        if self.turns.get((kept.run, kept.key)) is kept:
            del self.turns[kept.run, kept.key]

    def leased(self) -> list[JobKey]:
        """List every job whose lease must be renewed."""
        return list(self._leased())

    def __len__(self) -> int:
        return len(self.ready) + self.in_slots + len(self.unsent) + len(self.returning)

    @property
    def in_slots(self) -> int:
        """How many requests may be open at the server now."""
        return len(self.open) + len(self.leaving)

    def leave(self, job: Open) -> None:
        """Begin to take a job out of its slot."""
        job.leaving = True
        self.open.pop(job.key, None)
        self.leaving.add(job)

    def left(self, job: Open) -> None:
        """The job's slot is free."""
        self.leaving.discard(job)
        # The same job may have come back meanwhile and be open anew.
        if self.open.get(job.key) is job:
            del self.open[job.key]

    def add_ready(self, ready: Ready) -> None:
        """Take over a claimed job; that it could be claimed proves that it was leased to nobody.

        Such a job may be held here all the same: Redis was rewound, or this process stood still
        until others had reaped its jobs. It is ours once more then, and what is held goes on: a
        second request for it would take the first one out of sight, and nothing could end that.
        """
        key = ready.key
        self.returning.pop(key, None)
        self.claimed.add(key)
        held = self.held(key) or self.unsent.get(key)
        if held is None or not same_try(held, ready.claim):
            self.ready[key] = ready

    def held(self, key: JobKey) -> Claim | None:
        """Give the claim by which a job is open or ready; None where it is neither."""
        held = self.open.get(key) or self.ready.get(key)
        return held.claim if held is not None else None

    def has_suspect(self) -> bool:
        """Whether a job is held beside which nothing else may be open."""
        jobs: tuple[Open | Ready, ...]
        jobs = (*self.open.values(), *self.leaving, *self.ready.values())
        return any(job.suspect for job in jobs)

    def oldest_s(self, now_s: float) -> float | None:
        """Give the age of the oldest open request in seconds, None when none is open."""
        return max((now_s - job.since_s for job in self.open.values()), default=None)

    def ages_s(self, now_s: float) -> float:
        """Sum the ages of the open requests in seconds."""
        return sum(now_s - job.since_s for job in self.open.values())

    def next_ready(self) -> Ready:
        """Take the job out of `ready` that waits longest for a slot."""
        return self.ready.popitem(last=False)[1]

    def take_ready(self) -> list[JobKey]:
        """Empty `ready` and list what was in it."""
        taken = list(self.ready)
        self.ready.clear()
        return taken

    def drop_ready(self, key: JobKey) -> None:
        """Take one job out of `ready`, if it is there."""
        self.ready.pop(key, None)

    def _leased(self) -> Iterator[JobKey]:
        yield from self.ready
        yield from self.open
        yield from self.unsent
