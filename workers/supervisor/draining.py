"""End a server when what is open in it has ended; wait no longer than that can help."""

import asyncio
import time
from collections.abc import Callable

from common.errors import HeadraceError
from workers.client.faults import AttemptError
from workers.client.sglang import SGLangClient
from workers.readings.loads import ServerLoad
from workers.supervisor.processes import ServerProcesses

LOOK_S = 0.2
LOAD_EVERY_S = 2.0
LOAD_LIMIT_S = 2.0

IDLE_S = 12.0
"""A server that was told to end and holds nothing has so long: up to 0.5.12 some never end."""

STALL_S = 40.0
"""One in which nothing moves for so long will not end by itself."""


async def drain(
    processes: ServerProcesses,
    client: SGLangClient,
    *,
    limit_s: float,
    hurried: Callable[[], bool] = lambda: False,
) -> str:
    """Tell a server to end, and wait until it has or nothing speaks for waiting longer.

    Args:
        processes: Its.
        client: Of the server.
        limit_s: What open requests get.
        hurried: Whether somebody does not want to wait.

    Returns:
        Why it has to be killed, for people; empty when it has ended.
    """
    processes.drain()
    now_s = time.monotonic()
    deadline_s = now_s + limit_s
    asked_s, moved_s, idle_s = float("-inf"), now_s, None
    last: ServerLoad | None = None
    while processes.alive:
        now_s = time.monotonic()
        if hurried():
            return "told to hurry"
        if now_s >= deadline_s:
            return f"requests are open after {limit_s:g} s (--drain-limit)"
        if now_s - asked_s >= LOAD_EVERY_S:
            asked_s = now_s
            load = await _load(client)
            if load is not None and (last is None or load.moved_since(last)):
                moved_s = now_s
            last = load or last
            # Once it has closed its port it tells nothing more.
            if load is not None:
                idle_s = (idle_s or now_s) if load.idle else None
        if idle_s is not None and now_s - idle_s >= IDLE_S:
            return "it holds nothing and does not end"
        if idle_s is None and now_s - moved_s >= STALL_S:
            return "nothing moves in it"
        await asyncio.sleep(LOOK_S)
    return ""


async def _load(client: SGLangClient) -> ServerLoad | None:
    try:
        return await client.load(LOAD_LIMIT_S)
    except (AttemptError, HeadraceError):
        return None
