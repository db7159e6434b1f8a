"""What a watch of a server knows when it says ready: of the one that gave the token."""

import asyncio
from typing import Any, cast

from workers.readings.loads import ServerIdentity, ServerLoad
from workers.servers.watch import ServerWatch
from workers.timing import Timing


class Replaced:
    """A server that tells who it is and gives no token, until another takes its place."""

    url = "http://gpu.test:30000"

    def __init__(self) -> None:
        self.serves = ("old", 4)

    async def identify(self) -> ServerIdentity:
        await asyncio.sleep(0)
        return ServerIdentity(model=self.serves[0])

    async def load(self, _timeout_s: float = 5.0) -> ServerLoad:
        await asyncio.sleep(0)
        # It has counted nothing yet, so that nothing shows that it counts anew.
        return ServerLoad(running=0, gen_tokens_total=0, counted_by="x", cap=self.serves[1])

    async def probe_token(self, _limit_s: float) -> None:
        await asyncio.sleep(0)
        self.serves = ("new", 8)


async def test_a_server_replaced_while_its_token_was_awaited_is_known_as_it_is_now() -> None:
    known: list[tuple[str, int | None]] = []

    def note() -> None:
        if watch.ready and watch.identity and watch.load:
            known.append((watch.identity.model, watch.load.cap))

    watch = ServerWatch(cast("Any", Replaced()), on_change=note, timing=Timing())
    watching = asyncio.create_task(watch.run(lambda: None))
    async with asyncio.timeout(30):
        while not known:  # noqa: ASYNC110 - it says nothing else
            await asyncio.sleep(0)
    watching.cancel()

    # From here on prompts are claimed for that model.
    assert known[0] == ("new", 8)
