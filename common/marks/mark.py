"""One mark of a run, and how it is told. Pure."""

import re
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from common.harmless import one_line

TEXT_CHARS = 200
MOST = 200
"""Marks that Redis keeps of a run. Beyond that the oldest that set themselves go first."""

NAMED = 3
"""Of more subjects only the first and the last are named."""

HAND = "hand"

_GROUPS = {
    "came": ("worker group", "came"),
    "went": ("worker group", "went"),
    "restarted": ("worker group", "restarted"),
    "server_restarted": ("server", "restarted"),
    "server_changed": ("server", "changed"),
    "server_away": ("server", "went away"),
    "server_back": ("server", "came back"),
    "drained": ("server", "drained"),
}
_RUN = {
    "paused": "paused",
    "resumed": "goes on",
    "retried": "failed prompts tried again",
    "cancelled": "cancelled",
    "servers": "servers are restarted",
}
_REPEATS = {"restarted", "server_restarted", "server_away", "server_back"}
"""What happening twice to the same one says something."""

_DIGITS = re.compile(r"([0-9]{1,18})")


class Mark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One named instant; of events that belong together, the first and the last.

    Attributes:
        id: Its instant, who set it (`hand` or `self`), 12 hex digits: the name of its object.
        kind: `hand`, or a word of `common.marks.events`.
        at_ms, until_ms: Redis TIME of its first and of its last event.
        detail: What somebody wrote, or what there is to add.
        subjects: The worker groups that it is about; `more` of them are not listed.
        times: How many events it is made of.
        cap: Least and largest cap before, then after, where caps changed.
    """

    id: str
    kind: str
    at_ms: int
    until_ms: int
    detail: str = ""
    subjects: list[str] = []
    more: int = 0
    times: int = 1
    cap: list[float] | None = None

    @property
    def by_hand(self) -> bool:
        """Whether somebody set it on purpose."""
        return self.kind == HAND

    @property
    def text(self) -> str:
        """Say what it is, on one line."""
        if self.kind in _GROUPS:
            return one_line(self._of_groups(), 2 * TEXT_CHARS)
        said = _RUN.get(self.kind, "")
        return one_line(": ".join(filter(None, (said, self.detail))), 2 * TEXT_CHARS)

    def _of_groups(self) -> str:
        what, did = _GROUPS[self.kind]
        number = len(self.subjects) + self.more
        named = named_of(self.subjects, self.more)
        of = f"{what} of {named}" if what == "server" else f"{what} {named}"
        told = f"{of} {did}" if number == 1 else f"{number} {what}s {did} ({named})"
        if self.times > number and self.kind in _REPEATS:
            told += f", {self.times} times in all"
        cap = f"cap {_range(self.cap[:2])} -> {_range(self.cap[2:])}" if self.cap else ""
        changes = ", ".join(filter(None, (self.detail, cap)))
        return f"{told}: {changes}" if changes else told


def by_hand(text: str, at_ms: int) -> Mark:
    """Make the mark that somebody sets; its id is new each time."""
    return Mark(
        id=f"{at_ms:013d}-{HAND}-{secrets.token_hex(6)}",
        kind=HAND,
        at_ms=at_ms,
        until_ms=at_ms,
        detail=text,
    )


def named_of(subjects: Sequence[str], more: int = 0) -> str:
    """Name worker groups, in the order of their numbers: all of a few, else first and last."""
    ordered = sorted(subjects, key=natural)
    if len(ordered) + more <= NAMED:
        return ", ".join(ordered)
    return f"{ordered[0]} … {ordered[-1]}"


def natural(name: str) -> list[tuple[bool, int, str]]:
    """Give what sorts gpu2 before gpu10, and names of one machine together."""
    gpu, _, host = name.partition("@")
    parts = _DIGITS.split(f"{host} {gpu}")
    # What the pattern found stands at the odd places.
    return [
        (True, int(part), "") if place % 2 else (False, 0, part)
        for place, part in enumerate(parts)
    ]


def told(mark: Mark) -> dict[str, object]:
    """Give a mark as programs get it."""
    return {
        "id": mark.id,
        "at": iso(mark.at_ms),
        "until": iso(mark.until_ms) if mark.until_ms > mark.at_ms else None,
        "kind": mark.kind,
        "by_hand": mark.by_hand,
        "text": mark.text,
        "worker_groups": mark.subjects,
    }


def iso(at_ms: int) -> str:
    """Write an instant as ISO 8601 in UTC."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="seconds")


def _range(pair: Sequence[float]) -> str:
    low, high = (f"{value:g}" for value in pair)
    return low if low == high else f"{low} to {high}"
