"""Tell a hook what is new of runs, once for all processes that watch them with the same hook.

What was told last stands in Redis, so that a restart repeats nothing and of several sinks one
tells. Who sets it tells it: a process that dies between is one notification lost, never a storm.
That Redis itself is gone each process tells for itself.
"""

import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

import msgspec

from common import connect, names
from common.errors import RedisFullError
from common.hooks import Hook, Messenger
from common.news import (
    GONE_S,
    HOLD_S,
    RECOVERED,
    REDIS_GONE,
    State,
    message,
    message_of_redis,
    next_event,
    state_of,
)

if TYPE_CHECKING:
    import redis

KEPT_S = 30 * 86_400
"""Of a run that nobody has looked at for so long, its state would be news again."""

BEGIN_S = 15.0
"""A run that is over when a process so young sees it first was over before it."""

LEAVE_S = 15.0


class Notifier:
    """Sees the figures of runs again and again, and tells one hook.

    Args:
        client: From `common.connect`.
        target: As `--notify` gives it.
        old_too: Also tell of a run that is over already when it is first seen.
        clock: Seconds on a clock that never goes back.

    Raises:
        UsageError: The target is neither a command nor an address that can be used.
    """

    def __init__(
        self,
        client: "redis.Redis",
        target: str,
        *,
        old_too: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._hook = Hook(target)
        self._messenger = Messenger(self._hook)
        self._clock = clock
        self._old_too = old_too
        self._began_s = clock()
        # Run -> the state that it was seen in last, and since when.
        self._since: dict[str, tuple[State, float]] = {}
        # Run -> what was told while Redis had no room to note it.
        self._unnoted: dict[str, State] = {}
        self._away_since_s: float | None = None
        self._away_told = False

    def note(self, figures: Mapping[str, Any]) -> None:
        """See a run's figures, and tell what is new.

        Raises:
            RedisUnusableError: Nothing was told; the next look may.
        """
        run, now, now_s = figures["run"], state_of(figures), self._clock()
        self._redis_back()
        # A run that comes later has begun since, however short it was.
        begins = now_s - self._began_s < BEGIN_S and not self._old_too
        first_look = begins and run not in self._since
        seen, since_s = self._since.get(run, (now, now_s))
        if seen != now:
            seen, since_s = now, now_s
        self._since[run] = seen, since_s
        if not now.ended and now_s - since_s < HOLD_S:
            return
        now_ms = round(datetime.fromisoformat(figures["updated_at"]).timestamp() * 1000)
        raw = self._noted(run)
        told = self._unnoted.get(run) or (msgspec.json.decode(raw, type=State) if raw else None)
        event = next_event(told, now, first_look=first_look, now_ms=now_ms)
        if event is None:
            return
        state = msgspec.structs.replace(now, at_ms=now_ms if event else 0)
        if self._set(run, raw, state) and event:
            self._messenger.tell(message(event, now if event != RECOVERED else State(), figures))

    def redis_away(self, why: str) -> None:
        """See that no figures can be read; told once an outage by each process, for itself.

        Args:
            why: For people, without a password.
        """
        now_s = self._clock()
        if self._away_since_s is None:
            self._away_since_s = now_s
        if not self._away_told and now_s - self._away_since_s >= GONE_S:
            self._away_told = True
            self._messenger.tell(message_of_redis(REDIS_GONE, self._since, why))

    def _redis_back(self) -> None:
        self._away_since_s = None
        if self._away_told:
            self._away_told = False
            self._messenger.tell(message_of_redis(RECOVERED, self._since, ""))

    def close(self, limit_s: float = LEAVE_S) -> None:
        """Tell what waits, within so many seconds."""
        self._messenger.close(limit_s)

    def _noted(self, run: str) -> bytes | None:
        with connect.mapping_errors(self._client):
            raw = self._client.get(names.notified(run, self._hook.name))
        return cast("bytes | None", raw)

    def _set(self, run: str, before: bytes | None, state: State) -> bool:
        """Note what is told now; False when another process has done so since."""
        try:
            with connect.mapping_errors(self._client):
                was = self._client.set(
                    names.notified(run, self._hook.name),
                    msgspec.json.encode(state),
                    ex=KEPT_S,
                    get=True,
                )
        except RedisFullError:
            # That is what there may be to tell: each process tells it for itself.
            self._unnoted[run] = state
            return True
        self._unnoted.pop(run, None)
        return was == before
