"""What makes a mark: changes of worker groups, of their servers, and of the run itself. Pure.

Events of one kind that follow each other within `open_ms` become one mark, so that a hundred GPUs
which start together, and a server that dies every two minutes, leave a line and not a flood.
"""

from collections.abc import Mapping

import msgspec

START_MS = 60_000
"""So long after another a worker group still comes or goes with it; and one that is back within it
has restarted."""

ROLLING_MS = 900_000
"""The same for servers: where they are restarted one by one, each is drained first."""

LONGEST_MS = 3_600_000
"""No mark takes events for longer."""

SILENT_S = 60.0
"""A worker group that says nothing for so long has gone without a word."""

AWAY_S = 60.0
"""A server that was away for so long is marked; a hiccup is not."""

_PARTS = ("strategy", "version", "model")
_OPEN_MS = {"came": START_MS, "went": START_MS, "restarted": START_MS}


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened.

    Attributes:
        kind: What (`common.marks.mark` says it in words).
        subject: The worker group; empty where it is about the run.
        detail: What there is to add. Events that differ in it are different marks.
        cap: The cap before and after, where it changed; events that differ in it are one mark.
        ago_s: How long ago.
        takes_back: The kind of an earlier event of this subject that was none after all.
    """

    kind: str
    subject: str = ""
    detail: str = ""
    cap: tuple[int, int] | None = None
    ago_s: float = 0.0
    takes_back: str = ""

    @property
    def burst(self) -> str:
        """Say what is one mark with it."""
        return f"{self.kind}:{self.detail}" if self.detail else self.kind

    @property
    def open_ms(self) -> int:
        """How long after it others are one mark with it."""
        return _OPEN_MS.get(self.kind, ROLLING_MS) if self.subject else 0


class Present(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of a worker group: what it was when it last spoke.

    Attributes:
        only: The runs that it serves; empty for all.
    """

    epoch: str
    model: str | None = None
    strategy: str | None = None
    version: str | None = None
    cap: int | None = None
    only: tuple[str, ...] = ()

    def knows_what(self, before: "Present") -> "Present":
        """Fill in from before what it does not tell now: not to be told is no change."""
        kept = {
            name: getattr(before, name)
            for name in (*_PARTS, "cap")
            if getattr(self, name) in {None, ""}
        }
        return msgspec.structs.replace(self, **kept)


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """A worker group in Redis: what it was, when it last spoke, whether it has left since."""

    what: Present
    heard_ms: int
    left: bool = False


def heard_of(raw: bytes) -> Heard | None:
    """Read what Redis remembers of a worker group; None for what is not ours."""
    heard, _, rest = raw.partition(b" ")
    left, _, about = rest.partition(b" ")
    try:
        what = msgspec.json.decode(about, type=Present)
        return Heard(what=what, heard_ms=int(heard), left=left == b"1")
    except (msgspec.MsgspecError, ValueError):
        return None


def changes(before: Present, now: Present) -> tuple[str, tuple[int, int] | None]:
    """Say in words what differs, and the caps where they do; nothing where one is not told."""
    pairs = ((name, getattr(before, name), getattr(now, name)) for name in _PARTS)
    words = [
        f"{'SGLang' if name == 'version' else name} {was} -> {is_}"
        for name, was, is_ in pairs
        if was and is_ and was != is_
    ]
    caps = (before.cap, now.cap) if before.cap and now.cap and before.cap != now.cap else None
    return ", ".join(words), caps


def of_arrival(group: str, before: Heard | None, now: Present, *, now_ms: int) -> list[Event]:
    """Say what a worker group's first word is: it came, or was away for a moment.

    Args:
        group: Its name.
        before: What was remembered of it.
        now: What it is.
        now_ms: Redis TIME.
    """
    if before is None:
        return [Event(kind="came", subject=group)]
    away_ms = now_ms - before.heard_ms
    # The same process said so before, and the answer was lost with what had been known until then.
    again = before.what.epoch == now.epoch and not before.left
    if again or away_ms > START_MS:
        first = Event(kind="came", subject=group)
    else:
        first = Event(kind="restarted", subject=group, takes_back="went" if before.left else "")
    return [first, *of_change(group, before.what, now, kind="server_changed")]


def of_change(group: str, before: Present, now: Present, *, kind: str) -> list[Event]:
    """Say what a server's change is; `server_restarted` is one though nothing differs."""
    words, caps = changes(before, now)
    if not words and caps is None and kind != "server_restarted":
        return []
    return [Event(kind=kind, subject=group, detail=words, cap=caps)]


class Silence:
    """Finds out by one process's own clock which worker groups have fallen silent.

    What was not watched for the whole time does not count: after an outage of Redis, or of this
    process, everybody gets the time anew.
    """

    def __init__(self) -> None:
        self._since: dict[str, tuple[int, float]] = {}
        self._looked_s: float | None = None

    def look(self, present: Mapping[str, Heard], now_s: float) -> list[str]:
        """Give the worker groups that have not spoken for `SILENT_S`."""
        if self._looked_s is None or now_s - self._looked_s > SILENT_S / 2:
            self._since.clear()
        self._looked_s = now_s
        seen: dict[str, tuple[int, float]] = {}
        for group, heard in present.items():
            if heard.left:
                continue
            was = self._since.get(group)
            seen[group] = was if was and was[0] == heard.heard_ms else (heard.heard_ms, now_s)
        self._since = seen
        return [group for group, (_, since_s) in seen.items() if now_s - since_s >= SILENT_S]
