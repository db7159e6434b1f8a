"""A real server's figures: its pages, its log and what it has really generated say one thing."""

import asyncio
import time
from typing import Any

import msgspec
import pytest

from tests.real.conftest import ServerWith
from tests.real.pipeline import MAMBA_LIMITED, say
from tests.real.server import RealServer
from workers.client.requests import Request
from workers.client.sglang import SGLangClient
from workers.readings.loads import ServerLoad
from workers.servers.log_tail import LogTail
from workers.servers.telemetry import ServerFigures, Telemetry

pytestmark = [pytest.mark.real, pytest.mark.timeout(2000)]

LOOK_S = 1.0
WATCHED_S = 30.0
WATCHED_LINES = 8
"""A line of the log tells of 40 steps, which take 12 s where the machine has much else to do."""

WATCH_LIMIT_S = 600.0


def request(number: int, tokens: int) -> Request:
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0.7}
    members = {"input_ids": [5 + number % 100, 6, 7, 8], "sampling_params": sampling}
    raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in members.items()}
    return Request(
        endpoint="generate", members=raw, rid=f"figures-{number:08d}", max_tokens=tokens
    )


class Sides:
    """One server from two sides, each by itself; and the pages as they were last."""

    def __init__(self, server: RealServer) -> None:
        self.pages, self.log = Telemetry(WATCHED_S), Telemetry(WATCHED_S)
        self.tail = LogTail(lambda: server.log)
        self.loads: list[ServerLoad] = []

    async def look(self, client: SGLangClient) -> None:
        load = await client.load()
        now_s = time.monotonic()
        self.loads.append(load)
        self.pages.note_pages(load, now_s)
        self.log.note_log(self.tail.read(), now_s)

    def told(self) -> tuple[ServerFigures, ServerFigures]:
        now_s = time.monotonic()
        return self.pages.figures(now_s), self.log.figures(now_s)


async def watch(server: RealServer, *, at_once: int) -> Sides:
    """Keep so many requests open for a while, and look at the server from both sides."""
    sides, number, since = Sides(server), 0, server.mark()

    async def keep_asking(client: SGLangClient) -> None:
        nonlocal number
        while True:
            number += 1
            await client.generate(request(number, 200), 300.0)

    async with SGLangClient(server.url, slots=at_once) as client:
        async with asyncio.timeout(WATCH_LIMIT_S):
            asking = [asyncio.create_task(keep_asking(client)) for _ in range(at_once)]
            until_s = time.monotonic() + WATCHED_S
            while time.monotonic() < until_s or server.decodes(since) < WATCHED_LINES:
                await sides.look(client)
                await asyncio.sleep(LOOK_S)
            await sides.look(client)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    return sides


@pytest.mark.parametrize(
    ("flags", "cap"), [((), 32), (MAMBA_LIMITED, 4)], ids=["default", "mamba-limited"]
)
def test_pages_and_log_tell_the_same_of_a_real_server(
    server_with: ServerWith, flags: tuple[str, ...], cap: int
) -> None:
    server = server_with(*flags)
    sides = asyncio.run(watch(server, at_once=cap + 4))
    pages, log = sides.told()
    counted = [load.gen_tokens_total for load in sides.loads if load.gen_tokens_total is not None]
    told: dict[str, Any] = {
        "pages": f"{pages.gen_tokens_per_s:.0f} tok/s",
        "log": f"{log.gen_tokens_per_s:.0f} tok/s",
    }
    say("figures", **told, pages_full=msgspec.to_builtins(pages.load))

    assert (log.load.cap, sides.log.log.mamba_states is not None) == (cap, True)
    assert pages.load.cap in {cap, None}
    assert log.load.running is not None
    assert 0.5 * cap <= log.load.running <= cap
    # Between a prefill and the next report 0.5.12 shows only what ran beside the prefill.
    assert max(load.running or 0 for load in sides.loads) == cap
    assert log.load.mamba_usage == pytest.approx(pages.load.mamba_usage or -1.0, abs=0.3)
    assert log.gen_tokens_per_s == pytest.approx(pages.gen_tokens_per_s or -1.0, rel=0.35)
    # What its counter moved by while it was watched, whoever counts.
    assert log.load.gen_tokens_total == pytest.approx(counted[-1] - counted[0], rel=0.35)
