"""Jobs that another process got meanwhile, and a server that dies while nothing is open there.

The engine runs inside the test; the other process is a bare `Jobs` at another server.
"""

import asyncio
import logging
import resource
import subprocess
import sys
from typing import Any

import msgspec
import pytest
import redis

from common import descriptors
from common.models import Claim
from common.queue import Jobs
from tests.support.engine_world import PAGES, QUICK, EngineWorld, held, until
from tests.support.queue_world import QueueWorld
from tests.support.scripted_server import Reply, answer, scripted_server
from tests.support.server_process import free_port

pytestmark = pytest.mark.timeout(400)

GOOD = Reply(body=answer("hi"))
NO_RENEWAL = msgspec.structs.replace(QUICK, leases_every_s=600.0, reap_every_s=600.0)


class Gate:
    """Answers prompts when it is opened, probes always."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def step(self, body: dict[str, Any]) -> Reply:
        if "messages" in body:
            await self.open.wait()
        return GOOD


def steal(world: QueueWorld) -> tuple[Jobs, Claim]:
    """Let another process reap one open job and claim it."""
    thief = world.jobs("the-thief", group="gpu1@test", server="http://other:1")
    number = min(world.leased())
    world.expire_leases([number])
    assert thief.reap()[0] == 1
    [claim] = world.claim(thief, 1).claims
    assert world.number(claim.key) == number
    return thief, claim


async def test_a_stolen_job_is_let_go_at_the_next_renewal_and_aborted(
    redis_client: "redis.Redis",
) -> None:
    gate = Gate()
    slow = msgspec.structs.replace(QUICK, leases_every_s=0.5)
    async with scripted_server(gate.step, pages=PAGES) as server:
        made = EngineWorld(redis_client, server.url, prompts=4, timing=slow)
        async with made.running():
            await until(lambda: len(held(server)) == 4, "four open requests")
            thief, claim = steal(made.world)
            await until(lambda: len(server.aborts) == 1, "its request to be aborted")
            await until(lambda: made.engine._holdings.in_slots == 3, "its slot to be free")

            word = thief.finish([claim.ended("completed", b'{"by":"the thief"}')])
            gate.open.set()
            await until(lambda: made.world.counts().completed == 4, "all to be completed")

        counts = made.world.counts()
        assert word == ["ok"]
        assert (counts.duplicates_dropped, counts.failed, counts.retries) == (0, 0, 0)
        assert server.aborts[0] in held(server)
        made.world.check()


@pytest.mark.parametrize("first", ["thief", "we"])
async def test_the_first_to_finish_wins_whoever_has_the_lease(
    redis_client: "redis.Redis", first: str
) -> None:
    gate = Gate()
    async with scripted_server(gate.step, pages=PAGES) as server:
        made = EngineWorld(redis_client, server.url, prompts=1, timing=NO_RENEWAL)
        async with made.running():
            await until(lambda: len(held(server)) == 1, "an open request")
            thief, claim = steal(made.world)
            theirs = claim.ended("completed", b'{"by":"the thief"}')

            if first == "thief":
                words = thief.finish([theirs])
                gate.open.set()
                await until(lambda: not len(made.engine._holdings), "our result to be told")
            else:
                gate.open.set()
                await until(lambda: made.world.counts().completed == 1, "our result")
                words = thief.finish([theirs])

        counts = made.world.counts()
        assert words == ["ok" if first == "thief" else "duplicate"]
        assert (counts.completed, counts.duplicates_dropped, counts.in_flight) == (1, 1, 0)
        assert made.world.entries() == [(0, "c", 1)]
        made.world.check()


async def test_a_server_that_dies_with_nothing_open_is_down_and_comes_back(
    redis_client: "redis.Redis",
) -> None:
    port = free_port()
    async with scripted_server(pages=PAGES, port=port) as server:
        made = EngineWorld(redis_client, server.url, prompts=0)
        running = made.running()
        await running.__aenter__()
        await until(lambda: made.engine._watch.ready, "a ready server")
    try:
        await until(lambda: made.engine._watch.state == "down", "its death to be seen")
        assert "cannot be reached" in made.engine._watch.detail

        made.world.add(range(4))
        async with scripted_server(pages=PAGES, port=port):
            await until(lambda: made.world.counts().completed == 4, "work to go on")
        assert made.world.counts().retries == 0
    finally:
        await running.__aexit__(None, None, None)


# --- open files ----------------------------------------------------------------------------------


async def test_a_bound_beyond_the_open_files_is_cut_and_told(
    redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    few = descriptors.SPARE + 3
    monkeypatch.setattr(resource, "getrlimit", lambda _: (few, few))
    gate = Gate()
    with caplog.at_level(logging.WARNING):
        async with scripted_server(gate.step, pages=PAGES) as server:
            made = EngineWorld(redis_client, server.url, prompts=12, concurrency=8)
            async with made.running():
                await until(lambda: len(held(server)) == 3, "as many as fit")
                await until(lambda: made.slots_of() == 3, "as many slots")
                gate.open.set()
                await until(lambda: made.world.counts().completed == 12, "all to be completed")

    told = [each.getMessage() for each in caplog.records if "ulimit -n" in each.getMessage()]
    assert len(told) == 1
    assert f"to {descriptors.SPARE + 8}" in told[0]


def test_the_soft_limit_of_open_files_is_raised_as_far_as_it_goes() -> None:
    script = (
        "import resource, common.descriptors as d\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "most = min(hard, 4096) if hard > 0 else 4096\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))\n"
        "assert d.most_requests() == 256 - d.SPARE\n"
        "assert d.raise_limit() == most\n"
        "assert d.most_requests() == most - d.SPARE\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)

    assert done.returncode == 0, done.stderr.decode()
