"""Requests that dead processes left open at a server are ended, and that is looked after."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from common.queue.jobs import Holder
from tests.support.tls import TLS
from workers.client.sglang import SGLangClient
from workers.engine.core import Core
from workers.engine.holdings import Holdings
from workers.engine.zombies import MOST_TRIES, Zombies
from workers.readings.loads import ServerLoad
from workers.rids import possible_rids
from workers.simulator.launch import SimulatorProcess
from workers.timing import Timing

pytestmark = pytest.mark.anyio

DEAD = "0123456789ab-"
URL = "http://gpu.test:30000"


class Desk:
    async def ask(self, call: Callable[[], Any]) -> Any:
        return call()


def core(
    client: Any, *, load: ServerLoad | None = None, holders: dict[str, Holder] | None = None
) -> Core:
    """What `Zombies` sees of a process that has nothing open itself."""
    return cast(
        "Core",
        SimpleNamespace(
            client=client,
            watch=SimpleNamespace(ready=True, load=load),
            holdings=Holdings(),
            beat=Desk(),
            jobs=SimpleNamespace(epoch="us", holders=lambda: holders or {}),
            timing=Timing(),
            cap=32,
        ),
    )


def holder(slots: int) -> Holder:
    return Holder(slots=slots, deadline_ms=0, rid_prefix="x-", group="gpu0@test", about="{}")


async def test_what_a_dead_process_left_is_aborted_until_the_server_has_it_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    rids = [rid for rid in possible_rids(DEAD, 3) if rid.endswith("-2")]
    with SimulatorProcess(servers=1, latency="1000") as simulator:
        async with (
            SGLangClient(simulator.urls[0], slots=4) as client,
            httpx.AsyncClient(verify=TLS, base_url=simulator.urls[0], timeout=120) as asker,
        ):
            asked = [asyncio.create_task(ask(asker, rid)) for rid in rids]
            await asyncio.to_thread(
                simulator.wait_until, lambda states: states[0]["running"] == 3, timeout_s=60
            )
            zombies = Zombies(core(client))
            zombies.note(DEAD, 3)
            await zombies.look()
            async with asyncio.timeout(60):
                assert [(await each).status_code for each in asked] == [200] * 3
            await zombies.look()
    assert "3 requests too many" in caplog.text
    assert "has ended" in caplog.text
    assert not zombies._dead


async def ask(client: httpx.AsyncClient, rid: str) -> httpx.Response:
    body = {"input_ids": [1], "rid": rid, "sampling_params": {"max_new_tokens": 100}}
    return await client.post("/generate", json=body)


class Server:
    """A server that says how much it has open, whatever is aborted there."""

    url = URL

    def __init__(self, running: int) -> None:
        self.running = running
        self.aborted: list[str] = []

    async def load(self, _timeout_s: float) -> ServerLoad:
        return ServerLoad(running=self.running, queued=0)

    async def abort(self, rid: str) -> bool:
        self.aborted.append(rid)
        return True


async def test_what_living_processes_hold_is_nobodys_leftover() -> None:
    server = Server(5)
    zombies = Zombies(core(server, holders={"us": holder(72), "them": holder(5)}))
    zombies.note(DEAD, 2)
    await zombies.look()
    assert server.aborted == []
    assert not zombies._dead


async def test_nobody_aborts_for_ever_and_somebody_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server(5)
    zombies = Zombies(core(server))
    zombies.note(DEAD, 2)
    for _ in range(MOST_TRIES + 3):
        await zombies.look()
    assert len(server.aborted) == MOST_TRIES * len(list(possible_rids(DEAD, 2)))
    assert "5 requests open that no worker group holds" in caplog.text


async def test_other_clients_of_a_server_are_told_of_once_when_they_stay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strange = core(Server(0), load=ServerLoad(running=30, queued=10), holders={"them": holder(20)})
    zombies = Zombies(strange)
    for _ in range(MOST_TRIES - 1):
        await zombies.look()
    assert caplog.messages == []
    for _ in range(5):
        await zombies.look()
    [line] = caplog.messages
    assert "20 requests open that no worker group holds" in line
