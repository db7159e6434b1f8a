"""Mark what happens to this worker group and to its server, in the runs that it serves.

    it is ready for the first time   it came; within a minute after it was last heard, it restarted
    its server counts from zero      restarted, with what changed: strategy, version, model, cap
    any of these changes             changed, once it has been seen twice: a page may be late
    its server is away for a minute  away, and then back
    it is drained, it leaves         so it says; of a killed one the others say it (`Watchman`)

What a page does not tell has not changed. With each look it also says what was generated since the
last one, which is what before and after are made of.
"""

import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from common.group_figures import GroupFigures
from common.marks.events import AWAY_S, SILENT_S, Event, Present, of_arrival, of_change
from common.marks.noting import Watchman, note
from common.queue.marks import Presence
from workers.engine.core import Core

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_WAITING = 50
LONGEST_STEP_S = 15.0
"""More is not made up for a time in which nobody looked."""

_SERVING = {"ready", "draining"}
_AWAY = {"down", "faulty"}


class Marking:
    """What one process marks; used by one thread.

    Args:
        core: What is marked of.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        client = core.groups.client
        self._client = client
        self._presence = Presence(client)
        self._watchman = Watchman(client)
        # What was marked last; None before this worker group has come.
        self._is: Present | None = None
        self._seen: Present | None = None
        # As marked, and as looked at last.
        self._restarts = self._seen_restarts = 0
        self._away = self._drained = self._planned = False
        self._runs: Sequence[str] = ()
        self._waiting: deque[tuple[float, Event]] = deque(maxlen=MOST_WAITING)
        self._looked_s: float | None = None
        self._said_s: float | None = None

    def look(self, figures: GroupFigures, restarts: int) -> None:
        """Take note of how this worker group is; call it before anything that may fail.

        Args:
            figures: As they are published.
            restarts: How often its server was seen to have restarted.
        """
        now_s = time.monotonic()
        if self._looked_s is not None and now_s - self._looked_s > SILENT_S:
            self._is = None  # it stood still, and the others have marked that it went
        self._looked_s = now_s
        now = self._present(figures)
        if self._is is not None and now is not None and figures.state in _SERVING:
            self._note_changes(figures, now.knows_what(self._is), restarts, now_s)
        self._seen, self._seen_restarts = now, restarts
        self._note_states(figures, now_s)

    def tell(self, figures: GroupFigures) -> None:
        """Tell Redis what there is to tell.

        Raises:
            RedisUnusableError: The rest is told the next time.
        """
        watch = self._core.watch
        now = self._present(figures)
        if now is None:
            return
        if figures.state == "ready":
            self._runs = self._core.eligible.names(watch.identity)
            if self._is is None:
                self._arrive(now)
        if self._is is None:
            return
        while self._waiting:
            at_s, event = self._waiting[0]
            event = msgspec.structs.replace(event, ago_s=time.monotonic() - at_s)
            note(self._client, self._runs, event)
            self._waiting.popleft()
        self._work(figures)
        self._watchman.look()

    def leave(self) -> None:
        """Say that it goes.

        Raises:
            RedisUnusableError: Others find out.
        """
        group = self._core.jobs.group
        if self._is is not None and self._presence.leave(group):
            note(self._client, self._runs, Event(kind="went", subject=group))

    def _present(self, figures: GroupFigures) -> Present | None:
        if figures.model is None:
            return None
        return Present(
            epoch=figures.epoch,
            model=figures.model,
            strategy=figures.strategy or None,
            version=figures.server_version or None,
            cap=figures.cap,
            only=self._core.options.runs,
        )

    def _arrive(self, now: Present) -> None:
        group = self._core.jobs.group
        now_ms, before = self._presence.arrive(group, now)
        at_s = time.monotonic()
        self._waiting.extend(
            (at_s, event) for event in of_arrival(group, before, now, now_ms=now_ms)
        )
        self._is, self._restarts = now, self._seen_restarts

    def _note_changes(
        self, figures: GroupFigures, now: Present, restarts: int, now_s: float
    ) -> None:
        before = self._is
        steady = self._seen is not None and now == self._seen.knows_what(now)
        if before is None or not steady:
            return  # a reading that stands alone, or a server that is just telling who it is
        restarted = restarts > self._restarts
        kind = "server_restarted" if restarted else "server_changed"
        events = of_change(figures.group, before, now, kind=kind)
        if self._away and figures.state == "ready" and not events:
            events = [Event(kind="server_back", subject=figures.group)]
        if figures.state == "ready":
            self._away = False
        self._waiting.extend((now_s, event) for event in events)
        self._is, self._restarts = now, restarts

    def _note_states(self, figures: GroupFigures, now_s: float) -> None:
        if self._is is None:
            return
        drained = figures.state == "drained"
        if drained and not self._drained:
            self._waiting.append((now_s, Event(kind="drained", subject=figures.group)))
        self._drained = drained
        # Whoever drains a server does something to it: that it is away then is no news.
        self._planned = drained or (self._planned and figures.state != "ready")
        unready_s = figures.unready_s or 0.0
        if figures.state in _AWAY and unready_s >= AWAY_S and not (self._away or self._planned):
            self._away = True
            event = Event(kind="server_away", subject=figures.group)
            self._waiting.append((now_s - unready_s, event))

    def _work(self, figures: GroupFigures) -> None:
        now_s, said_s = time.monotonic(), self._said_s
        self._said_s = now_s
        if said_s is None or self._is is None:
            return
        passed_s = min(now_s - said_s, LONGEST_STEP_S)
        serves = figures.state in _SERVING
        self._presence.work(
            figures.group,
            self._is,
            tokens=(figures.gen_tokens_per_s or 0.0) * passed_s if serves else 0,
            running_ms=(figures.running or 0) * passed_s * 1000 if serves else 0,
            ready_ms=passed_s * 1000 if serves else 0,
            runs=self._runs,
        )
