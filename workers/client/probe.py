"""Find out whether a server lives: by a token of its own, or by the tokens that it gives others.

`/health` is no witness: it says 503 under a long prefill and 200 over a dead scheduler. A request
for one token is one, but at a full server it waits in the queue until another request ends, which
may take minutes. So while it waits, the server's own counters are read; tokens generated or
prefilled since the question was put prove the same.
"""

import asyncio
from contextlib import suppress

from common.errors import ServerUnusableError
from workers.client.faults import AttemptError
from workers.client.sglang import SGLangClient

READ_EVERY_S = 1.0
ASK_AGAIN_S = 0.5
"""After a probe that came to nothing: no descriptor was left for it, or the server is warming up.

Waiting for its counters instead would be in vain: claims stand still, so nothing moves there.
"""


async def is_alive(client: SGLangClient, *, limit_s: float) -> bool:
    """Say whether the server gives tokens now.

    Args:
        client: Of that server.
        limit_s: How long a token may take to come.

    Returns:
        True as soon as a probe's token has come, or other requests' tokens have moved; False
        when neither has happened within `limit_s`.
    """
    witnesses = {
        asyncio.create_task(_gives_token(client, limit_s), name="probe-token"),
        asyncio.create_task(_moves(client, limit_s), name="probe-counters"),
    }
    try:
        for witness in asyncio.as_completed(witnesses):
            if await witness:
                return True
        return False
    finally:
        for task in witnesses:
            task.cancel()
        await asyncio.wait(witnesses)


async def _gives_token(client: SGLangClient, limit_s: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while True:
                try:
                    await client.probe_token(limit_s)
                except ServerUnusableError:
                    return False
                except AttemptError:
                    await asyncio.sleep(ASK_AGAIN_S)
                else:
                    return True
    return False


async def _moves(client: SGLangClient, limit_s: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            first = None
            while True:
                with suppress(AttemptError):
                    load = await client.load()
                    if first is not None and load.moved_since(first):
                        return True
                    first = first or load
                await asyncio.sleep(READ_EVERY_S)
    return False
