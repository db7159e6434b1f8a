"""Abort many requests at one server, a few at a time."""

import asyncio
from collections.abc import Iterable

from workers.client.sglang import SGLangClient

AT_ONCE = 16
LIMIT_S = 5.0


async def abort_all(client: SGLangClient, rids: Iterable[str], *, limit_s: float = LIMIT_S) -> int:
    """Abort each of these requests; ids that the server does not know are ignored by it.

    Args:
        client: Of the server.
        rids: Whole request ids.
        limit_s: How long all of it may take.

    Returns:
        How many aborts the server confirmed within that.
    """
    left = iter(rids)
    confirmed = 0

    async def work() -> None:
        nonlocal confirmed
        for rid in left:
            confirmed += await client.abort(rid)

    try:
        async with asyncio.timeout(limit_s), asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(work())
    except TimeoutError:
        pass
    return confirmed
