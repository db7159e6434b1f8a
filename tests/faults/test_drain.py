"""A worker group whose server is drained: what is open ends, uncharged, and then it goes on."""

import asyncio
import contextlib
import logging
from typing import Any, cast

import msgspec
import pytest
import redis

from common import names
from common.ids import fingerprint_of
from common.models import Prompt
from common.queue.drains import Drain, Held
from tests.faults.test_group_slots import ABORTED, GOOD
from tests.faults.test_group_slots import Held as HeldRequests
from tests.support.engine_world import PAGES, QUICK, EngineWorld, held, until
from tests.support.redis_server import RedisServer
from tests.support.scripted_server import Page, Reply, scripted_server
from tests.support.server_process import free_port
from workers.engine import draining, emptying

pytestmark = pytest.mark.timeout(400)

BOUND = 4


def drain_of(made: EngineWorld, *, limit_s: float = 300.0, **options: Any) -> Drain:
    return Drain(
        made.client,
        made.server,
        owner="workers restart at test",
        reason="no_buffer",
        limit_s=limit_s,
        **options,
    )


async def empty(ours: Drain) -> None:
    """Hold the drain until it says that nothing is open."""

    def holds() -> bool:
        seen.append(ours.hold())
        return seen[-1].empty

    seen: list[Held] = []
    await until(holds, "the server to be empty")


def engine_state(made: EngineWorld) -> str:
    return made.engine._showing.figures().state


def charges(made: EngineWorld) -> list[int]:
    """Attempts, deaths and lost leases of all jobs that are there."""
    jobs = [made.world.job(n) for n in made.world.known.values()]
    return [int(job.get(what, b"0")) for job in jobs for what in ("attempts", "deaths", "lost")]


async def test_what_is_open_ends_by_itself_and_nothing_more_is_opened(
    redis_client: "redis.Redis",
) -> None:
    hold = HeldRequests(GOOD)
    async with scripted_server(hold.step, pages=PAGES) as server:
        made = EngineWorld(redis_client, server.url, prompts=30)
        async with made.running():
            await until(lambda: len(held(server)) == BOUND, "a full server")
            ours = drain_of(made)
            ours.hold()
            await until(lambda: engine_state(made) == "draining", "its hearing of it")
            await until(
                lambda: made.world.counts().in_flight == BOUND, "what was held ready to go back"
            )
            assert ours.hold().open == BOUND
            figures = made.engine._showing.figures()
            assert figures.detail == "for workers restart at test: no_buffer"

            hold.go.set()
            await empty(ours)

            assert engine_state(made) == "drained"
            assert made.engine._showing.figures().bound == 0
            assert len(held(server)) == BOUND
            counts = made.world.counts()
            assert (counts.completed, counts.in_flight) == (BOUND, 0)

            probes = len(server.requests) - len(held(server))
            ours.lift()
            await until(lambda: made.world.counts().completed == 30, "all to be completed")
            after = server.requests[BOUND + probes]
            assert "messages" not in after, "the server has to give a token first"
        assert (len(held(server)), made.world.counts().retries) == (30, 0)
        made.world.check()


async def test_at_the_deadline_what_is_left_is_aborted_by_its_id_and_goes_back_uncharged(
    redis_client: "redis.Redis",
) -> None:
    hold = HeldRequests(ABORTED)

    async with scripted_server(hold.step, pages=PAGES) as server:
        made = EngineWorld(redis_client, server.url, prompts=BOUND)
        async with made.running():
            await until(lambda: len(held(server)) == BOUND, "a full server")
            ours = drain_of(made, limit_s=0.0)

            await empty(ours)

            assert sorted(server.aborts) == sorted(held(server))
            assert made.world.counts().in_flight == 0
            assert charges(made) == [0] * 3 * BOUND
            hold.reply = GOOD
            hold.go.set()
            ours.lift()
            await until(lambda: made.world.counts().completed == BOUND, "all to be completed")
        assert len(held(server)) == 2 * BOUND
        counts = made.world.counts()
        assert (counts.retries, counts.duplicates_dropped) == (0, 0)
        made.world.check()


async def test_what_somebody_aborts_at_a_drained_server_is_not_charged(
    redis_client: "redis.Redis",
) -> None:
    # As a server does with what is open when it is told to stop.
    hold = HeldRequests(ABORTED)
    async with scripted_server(hold.step, pages=PAGES) as server:
        made = EngineWorld(redis_client, server.url, prompts=BOUND)
        async with made.running():
            await until(lambda: len(held(server)) == BOUND, "a full server")
            ours = drain_of(made)
            ours.hold()
            await until(lambda: engine_state(made) == "draining", "its hearing of it")
            hold.go.set()
            await empty(ours)

            assert charges(made) == [0] * 3 * BOUND
            assert made.world.counts().in_flight == 0


def conversation(made: EngineWorld, turns: int) -> bytes:
    """Queue one prompt with several answers to generate; gives its key."""
    messages: list[Any] = []
    for turn in range(turns):
        messages += [{"role": "user", "content": f"question {turn}"}, None]
    body = {"messages": messages}
    prompt = Prompt(
        id=msgspec.Raw(b"99"),
        line=99,
        endpoint="chat",
        body=body,
        source="prompts.jsonl",
        turns=turns,
    )
    key = made.world.key(99)
    made.world.known[key] = 99
    made.world.ledger.add([(key, fingerprint_of("chat", body), msgspec.json.encode(prompt))])
    return key


async def test_a_conversation_stops_between_two_turns_and_goes_on_behind_the_kept_one(
    redis_client: "redis.Redis",
) -> None:
    hold = HeldRequests(GOOD)
    async with scripted_server(hold.step, pages=PAGES) as server:
        made = EngineWorld(redis_client, server.url, prompts=0)
        key = conversation(made, 3)
        async with made.running():
            await until(lambda: len(held(server)) == 1, "its first turn")
            ours = drain_of(made)
            ours.hold()
            await until(lambda: engine_state(made) == "draining", "its hearing of it")
            hold.go.set()
            await empty(ours)

            assert len(held(server)) == 1
            kept = cast("bytes", redis_client.hget(names.rq_job(key.hex()), "turns"))
            assert kept.count(b"\n") == 1
            ours.lift()
            await until(lambda: made.world.counts().completed == 1, "its end")
        assert len(held(server)) == 3


# --- The server goes away, as it should ----------------------------------------------------------


def alarms(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


async def test_a_drained_server_that_dies_alarms_nobody_and_costs_nothing(
    redis_client: "redis.Redis", caplog: pytest.LogCaptureFixture
) -> None:
    async with contextlib.AsyncExitStack() as first:
        server = await first.enter_async_context(
            scripted_server(HeldRequests(GOOD).step, pages=PAGES)
        )
        port = int(server.url.rpartition(":")[2])
        made = EngineWorld(redis_client, server.url, prompts=BOUND)
        async with made.running():
            await until(lambda: len(held(server)) == BOUND, "a full server")
            ours = drain_of(made)
            ours.hold()
            await until(lambda: engine_state(made) == "draining", "its hearing of it")
            caplog.clear()

            await first.aclose()
            await empty(ours)
            await until(lambda: made.engine._watch.state == "down", "its being seen as gone")
            await until(lambda: engine_state(made) == "drained", "the state of a drained one")

            assert alarms(caplog) == []
            made.engine._showing._ready_s -= 3600.0
            assert (made.engine._showing.figures().unready_s or 0.0) < 60.0
            assert charges(made) == [0] * 3 * BOUND
            assert redis_client.hget(names.run(made.world.run), "faults") is None
            async with scripted_server("ok", pages=PAGES, port=port):
                ours.lift()
                await until(lambda: made.world.counts().completed == BOUND, "all to be completed")
    made.world.check()


async def test_after_the_drain_the_server_is_asked_who_it_is(
    redis_client: "redis.Redis",
) -> None:
    # It was restarted between two looks at its load, with twice the cap.
    cap = 16
    hold = HeldRequests(GOOD)

    def info() -> bytes:
        states = [{"effective_max_running_requests_per_dp": cap}]
        return msgspec.json.encode({"version": "0.5.23", "internal_states": states})

    pages: dict[str, Page] = {**PAGES, "/server_info": info}
    async with scripted_server(hold.step, pages=pages) as server:
        slow = msgspec.structs.replace(QUICK, load_every_s=3600.0)
        made = EngineWorld(redis_client, server.url, prompts=60, concurrency="auto", timing=slow)
        async with made.running():
            await until(lambda: len(held(server)) == 18, "cap and backlog")
            ours = drain_of(made, limit_s=0.0)
            await empty(ours)
            cap = 32
            ours.lift()
            await until(lambda: len(held(server)) == 18 + 35, "the new cap and backlog")
            assert made.engine._showing.figures().cap == 32
            hold.go.set()
            await until(lambda: made.world.counts().completed == 60, "all to be completed")


async def test_a_process_that_starts_while_the_server_is_away_for_its_drain_waits_unalarmed(
    redis_client: "redis.Redis",
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # That a drain is over is heard, and not only believed after a while.
    monkeypatch.setattr(draining, "DRAIN_TTL_MS", 3_600_000)
    port = free_port()
    made = EngineWorld(redis_client, f"http://127.0.0.1:{port}", prompts=3, start_limit_s=60.0)
    ours = drain_of(made)
    ours.hold()
    async with made.running() as task:
        await until(lambda: engine_state(made) == "drained", "its hearing of it")
        # As after a restart that takes longer than the start limit.
        asked = "asked again"
        made.engine._watch._began_s -= 3600.0
        made.engine._watch.detail = asked
        await until(lambda: made.engine._watch.detail != asked, "its asking for a token")
        ours.lift()
        await until(lambda: engine_state(made) == "waiting", "its hearing that it is over")
        ours.hold()
        await until(lambda: engine_state(made) == "drained", "its hearing of the next one")

        async with scripted_server("ok", pages=PAGES, port=port) as server:
            await until(lambda: made.engine._watch.ready, "a token")
            await empty(ours)
            assert (held(server), engine_state(made)) == ([], "drained")
            assert not task.done()
            ours.lift()
            await until(lambda: made.world.counts().completed == 3, "all to be completed")
            assert alarms(caplog) == []


# --- Whoever drains dies, and Redis is away ------------------------------------------------------


async def test_when_its_owner_has_died_the_worker_group_goes_on(
    redis_client: "redis.Redis",
) -> None:
    hold = HeldRequests(GOOD)
    async with scripted_server(hold.step, pages=PAGES) as server:
        made = EngineWorld(redis_client, server.url, prompts=20)
        async with made.running():
            await until(lambda: len(held(server)) == BOUND, "a full server")
            drain_of(made, ttl_ms=600).hold()
            await until(lambda: engine_state(made) == "draining", "its hearing of it")
            hold.go.set()

            await until(lambda: made.world.counts().completed == 20, "all to be completed")

            assert engine_state(made) == "ready"
    made.world.check()


async def test_without_redis_it_stays_drained_and_after_a_while_aborts_nothing(
    valkey: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "DRAIN_TTL_MS", 1_000)
    hold = HeldRequests(GOOD)
    with valkey.client() as client:
        async with scripted_server(hold.step, pages=PAGES) as server:
            made = EngineWorld(client, server.url, prompts=BOUND + 1)
            async with made.running():
                await until(lambda: len(held(server)) == BOUND, "a full server")
                ours = drain_of(made, limit_s=300.0)
                ours.hold()
                await until(lambda: engine_state(made) == "draining", "its hearing of it")
                drained = made.engine._core.draining
                valkey.freeze()
                try:
                    await until(lambda: not drained.stands, "the last word to be old")
                    # The deadline passes, but the drain may long be over.
                    drained._deadline_s = 0.0
                    await asyncio.sleep(3 * emptying.LOOK_S)
                    assert server.aborts == []
                    assert made.engine._keeper.slots == 0
                    assert not made.engine.may_go_on()
                finally:
                    valkey.thaw()
                hold.go.set()
                ours.lift()
                await until(
                    lambda: made.world.counts().completed == BOUND + 1, "all to be completed"
                )
            made.world.check()


async def test_a_redis_that_forgets_the_drain_is_told_again_and_nothing_opens_in_between(
    redis_client: "redis.Redis",
) -> None:
    hold = HeldRequests(GOOD)
    async with scripted_server(hold.step, pages=PAGES) as server:
        long = msgspec.structs.replace(QUICK, slot_ttl_s=3600.0)
        made = EngineWorld(redis_client, server.url, prompts=20, timing=long)
        async with made.running():
            await until(lambda: len(held(server)) == BOUND, "a full server")
            ours = drain_of(made)
            ours.hold()
            await until(lambda: engine_state(made) == "draining", "its hearing of it")
            # Another history of Redis, in which there is neither drain nor process.
            redis_client.delete(names.drain(made.server), names.slots(made.server))
            await until(lambda: made.slots_of() == BOUND, "what is open to be declared")
            redis_client.delete(names.drain(made.server), names.slots(made.server))

            held_again = ours.hold()

            assert (held_again.empty, held_again.unsure_ms > 0) == (False, True)
            await until(lambda: ours.hold().open == BOUND, "what is open to be declared")
            hold.go.set()
            await until(lambda: ours.hold().open == 0, "what is open to end")
            assert len(held(server)) == BOUND


# --- Suspects ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["at the deadline", "by a death"])
async def test_a_suspect_that_is_tried_alone_goes_back_from_a_drained_server_as_it_came(
    redis_client: "redis.Redis", ends: str
) -> None:
    hold = HeldRequests(GOOD)

    async def step(body: dict[str, Any]) -> Reply | str:
        reply = await hold.step(body)
        return "drop" if reply is ABORTED else reply

    async with scripted_server(step, pages=PAGES) as server:
        made = EngineWorld(redis_client, server.url, prompts=1)
        job = names.rq_job(made.world.hex(0))
        redis_client.hset(job, mapping={"deaths": 4, "died_alone": 1})
        redis_client.lrem(names.rq_queue(made.world.run), 0, made.world.hex(0))
        redis_client.zadd(names.parked(made.world.run), {made.world.hex(0): -4e13})
        async with made.running():
            await until(lambda: len(held(server)) == 1, "its trial")
            ours = drain_of(made, limit_s=0.0 if ends == "at the deadline" else 300.0)
            ours.hold()
            if ends == "by a death":
                await until(lambda: engine_state(made) == "draining", "its hearing of it")
                hold.reply = ABORTED
                hold.go.set()
            await empty(ours)

            assert made.world.parked() == {0}
            assert redis_client.hmget(job, "deaths", "died_alone") == [b"4", b"1"]
            hold.reply = GOOD
            ours.lift()
            await until(lambda: len(held(server)) == 2, "its trial to begin anew")
            hold.go.set()
            await until(lambda: made.world.counts().completed == 1, "its end")
