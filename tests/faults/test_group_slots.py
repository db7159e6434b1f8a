"""Slots: a process that lost them opens nothing, none is ever lost, and the bound holds meanwhile.

What was open is judged by the server: ids of the requests that reached it, in their order.
"""

import asyncio
import dataclasses
import errno
import os
import random
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import redis

from common.queue import Jobs
from tests.support.engine_world import GROUP, PAGES, QUICK, EngineWorld, held, until
from tests.support.scripted_server import Reply, Step, answer, scripted_server
from tests.support.server_process import wait_until
from workers.client import transport
from workers.client.faults import ServerAnswer
from workers.client.requests import Request
from workers.client.sglang import SGLangClient
from workers.timing import Timing

pytestmark = pytest.mark.timeout(400)

BOUND = 4
TTL_S = 1.5
SHORT = msgspec.structs.replace(QUICK, slot_ttl_s=TTL_S)
GOOD = Reply(body=answer("hi"))
ABORTED = Reply(body=answer("h", finish_reason="abort"))
EMPTY = Reply(body=b"{}")
FULL = Reply(503, b"{}", headers="retry-after: 0\r\n")
BROKEN = Reply(500, b"{}")


class Held:
    """Holds prompts' requests until it is let go, then gives this; probes get a good answer."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.probed = dataclasses.replace(GOOD, headers=reply.headers)
        self.go = asyncio.Event()

    async def step(self, body: dict[str, Any]) -> Reply:
        if "messages" not in body:
            return self.probed
        await self.go.wait()
        return self.reply


def heir_of(made: EngineWorld) -> Jobs:
    """Another process of the same worker group takes all slots, as soon as they have run out."""
    bound = int(made.options.concurrency)
    heir = Jobs(made.client, epoch="the-heir", group=GROUP, server=made.server)

    def take(settled: str = "") -> str:
        about = {"host": "elsewhere", "pid": 1, "started": "1"}
        reply = heir.take_slots(
            bound, bound=bound, rid_prefix="the-heir-", about=about, settled=settled
        )
        return reply.what

    # A renewal that was on its way in its thread may have come after the loop stood still.
    wait_until(lambda: take() == "settle", "its slots to run out")
    assert take(made.jobs.epoch) == "granted"
    return heir


@pytest.mark.parametrize(
    "reply",
    [GOOD, ABORTED, EMPTY, FULL, BROKEN],
    ids=["good", "aborted", "empty", "full", "broken"],
)
async def test_a_process_that_slept_beyond_its_slots_opens_nothing_before_it_has_some_again(
    redis_client: "redis.Redis", reply: Reply
) -> None:
    hold = Held(reply)
    async with scripted_server(hold.step, pages=PAGES) as server:
        made = EngineWorld(redis_client, server.url, prompts=40, timing=SHORT)
        async with made.running():
            await until(lambda: len(held(server)) == BOUND, "a full server")

            time.sleep(TTL_S + 0.1)  # noqa: ASYNC251 - the loop is to stand still
            heir = heir_of(made)
            hold.go.set()
            await until(lambda: made.engine._holdings.in_slots == 0, "all to have left")
            await until(lambda: made.slots_of() == 0 < made.slots_of(heir.epoch), "its renewal")
            await until(lambda: not len(made.engine._holdings), "what it held to go back")

            assert len(held(server)) == BOUND
            counts = made.world.counts()
            assert counts.in_flight == counts.failed == 0
            assert counts.completed == (BOUND if reply is GOOD else 0)
            # Whoever has the slots aborts what it finds open: that is nobody's fault.
            assert counts.retries == (BOUND if reply in {EMPTY, BROKEN} else 0)

            hold.reply = GOOD
            heir.take_slots(0, bound=BOUND, rid_prefix="the-heir-", about={})
            await until(lambda: made.world.counts().completed == 40, "all by the first one")
        made.world.check()


async def test_a_request_whose_connection_comes_too_late_is_not_sent(
    redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    # No connection is used twice, so the prompt's request must make one.
    close = "connection: close\r\n"
    hold = Held(dataclasses.replace(GOOD, headers=close))
    lacking = ("/v1/loads", "/metrics", "/get_load", "/get_server_info", "/model_info")
    pages = {path: Reply(404, headers=close) for path in lacking}
    pages |= {path: Reply(body=body, headers=close) for path, body in PAGES.items()}
    heirs: list[Jobs] = []

    def sleeps(*args: Any) -> socket.socket:
        # The prompt's request alone asks whether it may be sent; pages are read meanwhile.
        if transport._note.get().may_send is not None and not heirs:
            time.sleep(TTL_S + 0.1)
            heirs.append(heir_of(made))
        return socket.socket(*args)

    async with scripted_server(hold.step, pages=pages) as server:
        made = EngineWorld(redis_client, server.url, prompts=1, timing=SHORT)
        monkeypatch.setattr(transport, "_new_socket", noting(sleeps))
        async with made.running():
            await until(lambda: bool(heirs), "a freeze while it connects")
            hold.go.set()
            await until(lambda: made.slots_of() == 0 < made.slots_of("the-heir"), "its renewal")
            await until(lambda: not len(made.engine._holdings), "what it held to go back")

            assert held(server) == []
            assert made.world.counts().retries == 0
            heirs[0].take_slots(0, bound=BOUND, rid_prefix="the-heir-", about={})
            await until(lambda: made.world.counts().completed == 1, "its answer")
        made.world.check()


def noting(make: Callable[..., socket.socket]) -> Callable[[Any], socket.socket]:
    """A factory of sockets as the transport has it."""

    def factory(address: Any) -> socket.socket:
        transport._note.get().fresh = True
        family, kind, protocol, _, _ = address
        return make(family, kind, protocol)

    return factory


# --- nothing leaks -------------------------------------------------------------------------------

FAULTS: tuple[Step, ...] = (
    "reset", "reset in the head", "reset in the body", "half", "drop", "nonsense", "cut chunks",
    "garbled chunks", "http 1.0", "1xx first", FULL, BROKEN, EMPTY, ABORTED, Reply(429),
    Reply(400, b'{"error":{"message":"no"}}'), Reply(404, b"{}"), Reply(302),
    Reply(body=b"<html>"),
    Reply(body=b"no gzip", headers="content-encoding: gzip\r\n"),
    Reply(body=answer("late"), after_s=0.3),
)  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_befalls_requests_every_slot_comes_back(
    redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = random.Random(seed)
    hold = Held(GOOD)
    left = 150
    most = open_now = 0

    async def step(body: dict[str, Any]) -> Reply | str:
        nonlocal left, most, open_now
        if "messages" not in body:
            return GOOD
        open_now += 1
        most = max(most, open_now)
        try:
            left -= 1
            if left < 0:
                return await hold.step(body)
            await asyncio.sleep(chance.random() / 50)
            # Successes between, or the run would rightly be paused.
            fault = chance.choice(FAULTS) if chance.random() < 0.6 else GOOD
            assert isinstance(fault, Reply | str)
            return fault
        finally:
            open_now -= 1

    def some_sockets(*args: Any) -> socket.socket:
        if left > 0 and chance.random() < 0.2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return socket.socket(*args)

    ask = SGLangClient.generate

    async def in_time(
        self: SGLangClient, request: Request, deadline_s: float, *, fresh: bool = False
    ) -> ServerAnswer:
        # What is held at the end must not time out: the script would go on counting it.
        deadline_s = 0.25 if left > 2 * BOUND else deadline_s
        return await ask(self, request, deadline_s, fresh=fresh)

    monkeypatch.setattr(SGLangClient, "generate", in_time)
    monkeypatch.setattr("workers.client.faults.FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(transport, "_new_socket", noting(some_sockets))
    async with scripted_server(step, pages=PAGES) as server:
        made = EngineWorld(redis_client, server.url, prompts=2_000)
        async with made.running():
            await until(lambda: left < 0, "all faults to have happened")
            await until(lambda: open_now == BOUND, "the full bound at the server")

            assert most == BOUND, "and never more"
            await until(lambda: made.slots_of() == BOUND, "the full bound in Redis")
            assert len(made.engine._holdings.open) == BOUND
            hold.go.set()
        assert made.slots_of() == 0
        assert made.world.counts().in_flight == 0
        made.world.check()


def test_the_clock_of_production_leaves_room_between_its_own_and_that_of_redis() -> None:
    timing = Timing()

    assert timing.slot_ttl_s - timing.slots_trusted_s >= 2.0
    assert timing.slots_trusted_s > 3 * timing.slots_every_s
