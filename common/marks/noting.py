"""The one way in: an event becomes a mark of every run that it concerns."""

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from common.errors import RedisUnusableError
from common.group_figures import GroupFigures
from common.marks.events import Event, Silence
from common.pins import difference
from common.queue import Groups, Runs
from common.queue.marks import Marks, Presence

if TYPE_CHECKING:
    import redis

log = logging.getLogger(__name__)

LOOK_S = 10.0


def note(client: "redis.Redis", runs: Iterable[str], event: Event) -> None:
    """Mark an event in runs; one about a worker group only in those that are not over.

    Args:
        client: From `common.connect`.
        runs: The runs that it concerns; one that Redis does not know is passed over.
        event: What happened. Said again it may be counted again, but makes no second mark.

    Raises:
        RedisUnusableError: Some may have it, others not: say it again.
    """
    for run in runs:
        Marks(client, run).note(event, unless_over=bool(event.subject))


def note_of_run(client: "redis.Redis", run: str, kind: str, detail: str = "") -> None:
    """Mark what somebody does to a run; nothing that fails here stands in his way."""
    try:
        note(client, [run], Event(kind=kind, detail=detail))
    except RedisUnusableError as error:
        log.debug("run %s has no mark of %s: %s", run, kind, error)


def note_at_servers(client: "redis.Redis", event: Event) -> None:
    """Mark what somebody does to servers, in every run that is not over.

    Raises:
        RedisUnusableError: Some may have it, others not.
    """
    for run in Runs(client).names():
        Marks(client, run).note(event, unless_over=True)


class Watchman:
    """Notes the worker groups that are gone without a word: a killed one says nothing.

    Whoever serves the runs has one, and of several only one marks it: who makes the group leave.

    Args:
        client: From `common.connect`.
    """

    def __init__(self, client: "redis.Redis") -> None:
        self._client = client
        self._presence = Presence(client)
        self._silence = Silence()
        self._looked_s = float("-inf")

    def look(self, now_s: float | None = None) -> list[str]:
        """Look now and then who has fallen silent, and mark that; returns who.

        Args:
            now_s: On a clock that never goes back.

        Raises:
            RedisUnusableError: Look again later.
        """
        now_s = time.monotonic() if now_s is None else now_s
        if now_s - self._looked_s < LOOK_S:
            return []
        self._looked_s = now_s
        try:
            return self._mark_gone(now_s)
        except RedisUnusableError:
            # A Redis that is full takes no word of those who are alive either.
            self._silence = Silence()
            raise

    def _mark_gone(self, now_s: float) -> list[str]:
        present = self._presence.all()
        silent = self._silence.look(present, now_s)
        gone = [
            group
            for group in silent
            if self._presence.leave(group, heard_ms=present[group].heard_ms)
        ]
        now_ms = self._now_ms() if gone else 0
        for group in gone:
            heard = present[group]
            event = Event(kind="went", subject=group, ago_s=max(now_ms - heard.heard_ms, 0) / 1000)
            note(self._client, runs_of(self._client, group, only=heard.what.only), event)
        return gone

    def _now_ms(self) -> int:
        seconds, micros = self._client.time()
        return int(seconds) * 1000 + int(micros) // 1000


def runs_of(client: "redis.Redis", group: str, *, only: Iterable[str] = ()) -> list[str]:
    """Name the runs that a worker group served, by what it said last."""
    served = set(only)
    said = next((each for each in Groups(client).spoke() if each.group == group), None)
    return [
        name
        for name, known in Runs(client).known().items()
        if (not served or name in served)
        and not (said and _misfits(said, name, known.record.params.model, known.pinned))
    ]


def _misfits(
    said: GroupFigures, run: str, asked: str | None, pinned: dict[str, object] | None
) -> bool:
    if run in said.left_out:
        return True
    if None not in (asked, said.model) and said.model not in {
        asked,
        str(asked).rpartition(":")[0],
    }:
        return True
    return bool(pinned and said.identity and difference(pinned, said.identity))
