"""The named crash points of each kind of process; a new one joins by its first word."""

from functools import cache

from common.crashpoints import POINTS
from tests.chaos.schedule import Kind

OWN = {
    "producer": ("enqueue",),
    "sink": ("sink", "progress"),
    "group": ("run", "slots", "takeover", "claim", "serve", "charge", "finish", "return", "lease",
              "reap"),
}  # fmt: skip
"""First words of the points of what a kind does all the time."""

NOW_AND_THEN = {
    "producer": ("adopt", "reconcile"),
    "sink": ("reconcile", "end", "feed", "archive"),
    "group": ("reconcile", "feed", "audit", "turn", "sample"),
}

OFTEN = 3
"""Points of what it does all the time are picked so many times as often: it will come to them."""


@cache
def points_of(kind: Kind) -> tuple[str, ...]:
    """List the points that a process of this kind may die at, the likely ones repeated."""
    return tuple(
        point for point in sorted(POINTS) for _ in range(_weight(kind, point.partition(".")[0]))
    )


def _weight(kind: Kind, word: str) -> int:
    if word in OWN.get(kind, ()):
        return OFTEN
    return int(word in NOW_AND_THEN.get(kind, ()))
