"""Let worker groups empty a server before it is ended: a drain in Redis, where there is one.

A server that was told to end takes new requests all the same, so that one which is fed never comes
to its end by itself. Without Redis, or with a Redis that is away, it is ended as it is: what was
open goes back uncharged.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from common.errors import RedisUnusableError
from common.queue.drains import DRAIN_TTL_MS, Drain

if TYPE_CHECKING:
    import redis

log = logging.getLogger(__name__)

LOOK_S = 0.5
OTHERS_S = 1.5 * DRAIN_TTL_MS / 1000
"""A drain whose owner has died is over by then, and worker groups would feed what is to end."""

MARGIN_S = 5.0
"""Beyond the limit: what is open is aborted by then, and the aborts take a moment."""


class Emptying:
    """Drains of one server.

    Args:
        client: From `common.connect`; None without Redis.
        server: As its worker group names it: `workers.options.slots_server`.
        name: `gpu0@host`.
    """

    def __init__(self, client: "redis.Redis | None", *, server: str, name: str) -> None:
        self._client = client
        self._server = server
        self._name = name
        self._drain: Drain | None = None
        # Since when somebody else drains it.
        self._refused_s: float | None = None

    async def empty(
        self,
        reason: str,
        *,
        limit_s: float,
        hurried: Callable[[], bool],
        quiet: Callable[[], Awaitable[bool]],
    ) -> None:
        """Wait until no worker group has anything open there.

        Args:
            reason: Why, for people.
            limit_s: After which worker groups abort what is open, and give it back.
            hurried: Whether somebody does not want to wait.
            quiet: Whether the server itself says that nothing is open there.
        """
        if self._client is None:
            return
        owner = f"workers serve (pid {os.getpid()}, {self._name})"
        self._drain = Drain(
            self._client, self._server, owner=owner, reason=reason, limit_s=limit_s
        )
        nothing_open, self._refused_s = False, None
        until_s = time.monotonic() + limit_s + MARGIN_S
        while not hurried() and time.monotonic() < until_s:
            try:
                held = await asyncio.to_thread(self._drain.hold, quiet=nothing_open)
            except RedisUnusableError as error:
                log.warning("%s: worker groups are not told that it ends: %s", self._name, error)
                return
            if held.empty:
                return
            # Asked only where processes may be there that this Redis has forgotten, or of the
            # drain of somebody else, which has emptied the server, or whose owner has died.
            nothing_open = bool(held.unsure_ms or held.refused) and await quiet()
            if held.refused and self._leaves_it_to(held.refused, quiet=nothing_open):
                return
            await asyncio.sleep(LOOK_S)

    def _leaves_it_to(self, owner: str, *, quiet: bool) -> bool:
        """Whether another's drain does: it has emptied the server, or its owner lives."""
        now_s = time.monotonic()
        if self._refused_s is None:
            self._refused_s = now_s
            log.info("%s: drained by %s already", self._name, owner)
        return quiet or now_s - self._refused_s > OTHERS_S

    async def lift(self) -> None:
        """Let worker groups go on; they wait for a token of the server first."""
        drain, self._drain = self._drain, None
        if drain is None:
            return
        try:
            await asyncio.to_thread(drain.lift)
        except RedisUnusableError:
            log.warning("%s: its drain in Redis is not lifted; it ends by itself", self._name)
