"""Keep a server empty: a drain that is held, whoever else drains it and however Redis is."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from common.errors import BackendError, ConflictError, HeadraceError, RedisUnusableError
from common.queue.drains import DRAIN_TTL_MS, Drain, Held
from workers.client.faults import AttemptError
from workers.client.sglang import SGLangClient

if TYPE_CHECKING:
    import redis

LOOK_S = 0.2
RENEW_S = min(2.0, DRAIN_TTL_MS / 1000 / 5)
DEAF_S = 60.0
"""What worker groups get beyond the drain's limit to have nothing open."""

LOAD_S = 3.0


class Interrupted(Exception):  # noqa: N818 - no error: somebody wants it
    """Whoever called does not want to wait any more."""


class Emptied:
    """The drain of one server.

    Args:
        client: Of Redis; None to drain nothing.
        name: The server's, for people.
        server: As its slots are named.
        url: Where it is asked what it holds, with `api_key`.
        host: This machine's name.
        reason: Why, for people.
        limit_s: What open requests get.
        say: Takes the step it is at, and what there is to say of it.
        stop: Set when whoever called is to end.

    Attributes:
        took_s: How long it took until nothing was open; None before.
    """

    def __init__(
        self,
        client: "redis.Redis | None",
        *,
        name: str,
        server: str,
        url: str,
        host: str,
        reason: str,
        limit_s: float,
        say: Callable[[str, str], None],
        stop: threading.Event,
        api_key: str | None = None,
    ) -> None:
        self._name = name
        self._url = url
        self._limit_s = limit_s
        self._api_key = api_key
        self._say = say
        self._stop = stop
        self._renewed_s = float("-inf")
        self.took_s: float | None = None
        self._drain = (
            None
            if client is None
            else Drain(
                client,
                server,
                owner=f"workers restart (pid {os.getpid()} on {host})",
                reason=reason,
                limit_s=limit_s,
            )
        )

    @property
    def stands(self) -> bool:
        """Whether nobody opens anything now, for certain; also where nothing is drained."""
        return self._drain is None or self._drain.stands

    def hold(self) -> None:
        """Hold the drain until nothing is open.

        Raises:
            Interrupted: `stop` was set.
            ConflictError: Somebody else drains the server.
            BackendError: A worker group does not heed it.
            RedisUnusableError: It cannot be held.
        """
        drain = self._drain
        if drain is None:
            return
        began_s, quiet = time.monotonic(), False
        while True:
            if self._stop.is_set():
                raise Interrupted
            held = drain.hold(quiet=quiet)
            self._renewed_s = time.monotonic()
            if held.refused:
                self._wait_for(held.refused, began_s)
                continue
            if held.empty and drain.stands:
                self.took_s = round(time.monotonic() - began_s, 1)
                return
            quiet = bool(held.unsure_ms) and self._is_quiet()
            self._say("draining", _told(held, drain.left_s))
            if time.monotonic() - began_s > self._limit_s + DEAF_S:
                raise BackendError(
                    f"{self._name}: {_told(held, 0)} {DEAF_S:.0f} s after the limit: see the log "
                    "of its worker group; nothing was restarted"
                )
            self._stop.wait(RENEW_S / 2)

    def renew(self) -> None:
        """Keep it while the server is away; where it ends, its worker group only waits."""
        if self._drain is None or time.monotonic() - self._renewed_s < RENEW_S:
            return
        self._renewed_s = time.monotonic()
        try:
            self._drain.hold()
        except RedisUnusableError as error:
            self._say("", f"Redis does not answer, the drain may have ended: {error}")

    def lift(self) -> None:
        """End it; without Redis it ends by itself."""
        drain, self._drain = self._drain, None
        if drain is None:
            return
        try:
            drain.lift()
        except RedisUnusableError:
            self._say("", "Redis does not answer: the drain ends by itself")

    def _wait_for(self, owner: str, began_s: float) -> None:
        """Let somebody else's drain run out: whoever took it may be dead.

        Raises:
            ConflictError: He lives.
        """
        if time.monotonic() - began_s > 1.5 * DRAIN_TTL_MS / 1000:
            raise ConflictError(
                f"{self._name} is drained by {owner}, who lives: wait for it, or stop it"
            )
        self._say("waiting", f"drained by {owner}, who may be dead")
        self._stop.wait(LOOK_S)

    def _is_quiet(self) -> bool:
        """Whether the server itself says that nothing is open there."""

        async def look() -> bool:
            async with SGLangClient(self._url, slots=1, api_key=self._api_key) as client:
                return (await client.load(LOAD_S)).idle

        try:
            return asyncio.run(look())
        except (AttemptError, HeadraceError):
            return False


def _told(held: Held, left_s: float) -> str:
    if held.unsure_ms and not held.open:
        return f"Redis is new: waiting {held.unsure_ms / 1000:.0f} s for others to speak"
    if held.unheard:
        # Of these only their slots are known, of which few may be in use.
        deaf = "its worker group has" if held.unheard == 1 else f"{held.unheard} processes have"
        return f"up to {held.open} open: {deaf} not heard of it yet"
    return f"{held.open} open, {left_s:.0f} s left for them"
