"""One worker group's engine inside the test, on a real Redis, so that a test can break its parts.

What stands around it (signals, RQ's record, the parent) is the business of `tests.support.fleet`.
"""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

import redis

from common import names
from common.connect import server_run_id
from common.queue import Groups, Jobs
from tests.support.queue_world import QueueWorld
from tests.support.scripted_server import ScriptedServer
from workers.engine.caretaker import Caretaker
from workers.engine.eligible import Eligible
from workers.engine.engine import Engine
from workers.options import GroupOptions, slots_server
from workers.timing import Timing

GROUP = "gpu0@test"
HOST = "test"
LIMIT_S = 150.0
QUICK = Timing(
    ask_again_s=0.05,
    load_every_s=0.1,
    leases_every_s=0.1,
    reap_every_s=0.1,
    slots_every_s=0.1,
    publish_every_s=0.1,
)
PAGES: dict[str, bytes] = {
    "/v1/models": b'{"data":[{"id":"tiny","max_model_len":4096}]}',
    "/server_info": b'{"max_running_requests":16,"version":"0.5.23"}',
}
"""Of a scripted server that is good enough for an engine."""


class EngineWorld:
    """An engine for the prompts of a `QueueWorld`, at a server of the test's."""

    def __init__(
        self,
        client: "redis.Redis",
        url: str,
        *,
        prompts: int,
        group: str = GROUP,
        **options: Any,
    ) -> None:
        self.world = QueueWorld(client, prompts=prompts)
        self.client = client
        self.beats: list[tuple[bool, int, int]] = []
        options = {"ramp": 10_000.0, "concurrency": 4, "grace_s": 0.0, "timing": QUICK, **options}
        self.options = GroupOptions(group=group, server=url, host=HOST, **options)
        self.server = slots_server(url, HOST)
        self.jobs = Jobs(client, epoch=secrets.token_hex(6), group=group, server=self.server)
        # Redis has known its worker groups for long: nobody waits for a slot TTL.
        client.hset(
            names.slots(self.server),
            mapping={"run_id": server_run_id(client), "since": 0},
        )
        eligible = Eligible(client)
        self.engine = Engine(
            self.options,
            jobs=self.jobs,
            groups=Groups(client),
            eligible=eligible,
            caretaker=Caretaker(client, eligible, self.options.timing),
            on_beat=lambda *beat: self.beats.append(beat),
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["asyncio.Task[None]"]:
        """Let it run; told to stop at the end, if it has not ended by itself."""
        task = asyncio.create_task(self.engine.run())
        try:
            yield task
        finally:
            self.engine.stop.hurry()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LIMIT_S):
                    await asyncio.wait([task])
            asyncio.get_running_loop().set_exception_handler(None)

    def slots_of(self, epoch: str | None = None) -> int:
        """What Redis says of a process's slots; 0 when it knows none."""
        value = self.client.hget(names.slots(self.server), epoch or self.jobs.epoch)
        return int(json.loads(value)["slots"]) if isinstance(value, bytes) else 0


async def until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait for a condition while the loop runs; name it when it does not come."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + limit_s
    while not condition():
        if loop.time() > deadline_s:
            raise TimeoutError(f"not within {limit_s:.0f} s: {what}")
        await asyncio.sleep(0.01)


def held(server: ScriptedServer) -> list[str]:
    """Ids of the prompts' requests, in the order in which they came."""
    return [str(each["rid"]) for each in server.requests if "messages" in each]
