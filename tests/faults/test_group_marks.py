"""A worker group marks what happens to it and to its server, in the runs that it serves."""

import asyncio
import contextlib
import json
from typing import Any, cast

import pytest
import redis

from common import names
from common.group_figures import GroupFigures
from common.marks.effect import Bucket
from common.marks.events import SILENT_S, START_MS
from common.queue import Groups
from common.queue.marks import Marks, Presence
from tests.support.engine_world import GROUP, PAGES, EngineWorld, until
from tests.support.scripted_server import Page, Reply, answer, scripted_server
from workers.engine import marking

RUN = "demo"

pytestmark = pytest.mark.timeout(400)


class Served:
    """What the server says of itself; each may be changed while it runs."""

    def __init__(self) -> None:
        self.strategy, self.cap, self.tokens = "extra_buffer", 32, 1_000
        self.away = False

    def pages(self) -> dict[str, Page]:
        return {**PAGES, "/server_info": self._info, "/metrics": self._metrics}

    def restart(self, *, strategy: str, cap: int) -> None:
        self.strategy, self.cap, self.tokens = strategy, cap, 0

    def _info(self) -> bytes | Reply:
        if self.away:
            return Reply(503)
        info = {
            "version": "0.5.23",
            "mamba_scheduler_strategy": self.strategy,
            "internal_states": [{"effective_max_running_requests_per_dp": self.cap}],
        }
        return json.dumps(info).encode()

    def _metrics(self) -> bytes | Reply:
        self.tokens += 10
        return (
            f"sglang:num_running_reqs 2\nsglang:num_queue_reqs 0\n"
            f"sglang:generation_tokens_total {self.tokens}\n"
        ).encode()


async def never(body: dict[str, Any]) -> Reply:
    """Answer probes alone: prompts are never done, so that the run is not over."""
    if "messages" in body:
        await asyncio.Event().wait()
    return Reply(body=answer("hi"))


def texts(client: "redis.Redis") -> list[str]:
    return [mark.text for mark in Marks(client, RUN).latest()]


async def marked(client: "redis.Redis", *wanted: str) -> None:
    """Wait for these marks and no others; two of one instant may be told in either order."""
    with contextlib.suppress(TimeoutError):
        await until(lambda: sorted(texts(client)) == sorted(wanted), "the marks")
    assert sorted(texts(client)) == sorted(wanted)


@pytest.mark.anyio
async def test_it_marks_that_it_comes_and_goes_and_what_its_server_turns_into(
    redis_client: "redis.Redis",
) -> None:
    served = Served()
    async with scripted_server(never, pages=served.pages()) as server:
        world = EngineWorld(redis_client, server.url, prompts=4)
        async with world.running():
            await marked(redis_client, f"worker group {GROUP} came")
            served.restart(strategy="no_buffer", cap=72)
            changed = (
                f"server of {GROUP} restarted: strategy extra_buffer -> no_buffer, cap 32 -> 72"
            )
            await marked(redis_client, f"worker group {GROUP} came", changed)
        gone = [f"worker group {GROUP} came", changed, f"worker group {GROUP} went"]
        assert sorted(texts(redis_client)) == sorted(gone)
        # Back within seconds, it had not left; and what it was is remembered.
        served.cap = 60
        again = EngineWorld(redis_client, server.url, prompts=0)
        async with again.running():
            await marked(
                redis_client,
                *gone[:2],
                f"worker group {GROUP} restarted",
                f"server of {GROUP} changed: cap 72 -> 60",
            )


@pytest.mark.anyio
async def test_it_says_what_its_server_has_brought(redis_client: "redis.Redis") -> None:
    async with scripted_server(never, pages=Served().pages()) as server:
        world = EngineWorld(redis_client, server.url, prompts=4)
        async with world.running():
            await until(lambda: sums(redis_client).tokens >= 20, "tokens in the history")
            await until(lambda: sums(redis_client).ready_ms >= 300, "time in the history")
        total = sums(redis_client)

    # Two requests run there all the time.
    assert total.running_ms == pytest.approx(2 * total.ready_ms, rel=0.3)
    assert total.completions == 0


@pytest.mark.anyio
async def test_who_stood_still_for_long_comes_anew(redis_client: "redis.Redis") -> None:
    async with scripted_server(never, pages=Served().pages()) as server:
        world = EngineWorld(redis_client, server.url, prompts=4)
        async with world.running():
            await marked(redis_client, f"worker group {GROUP} came")
            # Others have marked meanwhile that it went, long ago.
            presence, key = Presence(redis_client), names.PRESENT
            before = presence.all()[GROUP]
            redis_client.hset(key, GROUP, b'%d 1 {"epoch":"e"}' % (before.heard_ms - 2 * START_MS))
            cast(Any, world.engine)._showing._marking._looked_s -= SILENT_S + 1
            # The mark that it joins counts both.
            await until(
                lambda: Marks(redis_client, RUN).latest()[0].times == 2, "it has come again"
            )


@pytest.mark.anyio
async def test_a_server_that_is_away_for_a_minute_is_marked_and_so_is_its_return(
    redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marking, "AWAY_S", 0.2)
    served = Served()
    gone = f"server of {GROUP} went away"
    async with scripted_server(never, pages=served.pages()) as server:
        world = EngineWorld(redis_client, server.url, prompts=4)
        async with world.running():
            await marked(redis_client, f"worker group {GROUP} came")
            served.away = True
            world.engine._watch.report("connection refused")
            # It was away from the moment on in which it was found to be.
            await until(lambda: gone in texts(redis_client), gone)
            served.away = False
            await until(lambda: f"server of {GROUP} came back" in texts(redis_client), "back")
    assert len(texts(redis_client)) == 4


def sums(client: "redis.Redis") -> Bucket:
    values = cast("dict[bytes, bytes]", client.hgetall(names.history(RUN))).values()
    read = [Bucket.read(value) for value in values]
    return Bucket(
        *(sum(getattr(each, name) for each in read) for name in Bucket.__struct_fields__)
    )


@pytest.mark.anyio
async def test_a_drain_is_marked_and_what_it_is_for_is_not_taken_for_an_outage(
    redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marking, "AWAY_S", 0.2)
    served = Served()
    drained = [f"worker group {GROUP} came", f"server of {GROUP} drained"]
    async with scripted_server(never, pages=served.pages()) as server:
        world = EngineWorld(redis_client, server.url, prompts=4)
        showing: Any = world.engine._showing
        async with world.running():
            await marked(redis_client, drained[0])
            real = showing._state
            # Whatever drains it; here nothing but the word is needed.
            showing._state = lambda: ("drained", "by hand")
            await marked(redis_client, *drained)
            served.away = True
            world.engine._watch.report("connection refused")
            showing._state = real
            await until(lambda: shown(redis_client).state == "down", "it is away")
            away_s = shown(redis_client).unready_s or 0.0
            await until(
                lambda: (shown(redis_client).unready_s or 0.0) > away_s + 0.5, "long enough"
            )
            assert texts(redis_client) == drained
            served.away = False
            await until(lambda: shown(redis_client).state == "ready", "it is back")
            assert texts(redis_client) == drained


def shown(client: "redis.Redis") -> GroupFigures:
    """What the worker group said last."""
    (figures,) = Groups(client).spoke()
    return figures
