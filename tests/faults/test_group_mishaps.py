"""An error of ours in any part of a worker group ends all of it, and what it held goes back.

Half alive it would be worse than dead: it would keep slots and leases and do nothing with them.
"""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest
import redis

from common.mishaps import InternalError
from tests.support.engine_world import PAGES, EngineWorld, held, until
from tests.support.queue_world import SECRET
from tests.support.scripted_server import Reply, answer, scripted_server
from workers.engine.desk import Bell
from workers.engine.engine import Engine

pytestmark = pytest.mark.timeout(400)

Break = Callable[[Engine, Callable[..., Any]], None]

# Task of the group -> how its next step is made to fail.
TASKS: dict[str, Break] = {
    "watch": lambda engine, fails: setattr(engine._watch, "_note_load", fails),
    "slots": lambda engine, fails: setattr(engine._keeper, "_renew_slots", fails),
    "leases": lambda engine, fails: setattr(engine._keeper, "_renew_leases", fails),
    "reap": lambda engine, fails: setattr(engine._keeper, "_reap", fails),
    "finish": lambda engine, fails: setattr(engine._finisher, "_send", fails),
    "turns": lambda engine, fails: fail_waiting(engine._turns._bell, fails),
    "return": lambda engine, fails: fail_waiting(engine._returns._bell, fails),
    "show": lambda engine, fails: setattr(engine._showing, "figures", fails),
    "care": lambda engine, _: fail_caring(engine),
    "claim": lambda engine, fails: setattr(engine, "_claimable", fails),
    "open": lambda engine, fails: setattr(engine, "_open_what_fits", fails),
    "request": lambda engine, fails: setattr(engine._prompter, "serve", fails),
    "parent": lambda _, fails: setattr(os, "getppid", fails),
}


def fail_waiting(bell: Bell, fails: Callable[..., Any]) -> None:
    """Wake whoever waits for a bell, and fail its next wait."""
    setattr(bell, "wait", fails)  # noqa: B010 - mypy knows it as a method
    bell.ring()


def fail_caring(engine: Engine) -> None:
    """Let the caretaker meet something of which it cannot say whether it concerns it."""
    caretaker: Any = engine._caretaker
    caretaker.note = str
    caretaker._why = ["not hashable"]


class Hold:
    """Answers `now` requests at once and holds the others until it is let go."""

    def __init__(self, now: int) -> None:
        self.now = now
        self.go = asyncio.Event()

    async def step(self, body: dict[str, Any]) -> Reply:
        self.now -= "messages" in body
        if "messages" in body and self.now < 0:
            await self.go.wait()
        return Reply(body=answer("hi"))


@pytest.mark.parametrize("task", TASKS)
async def test_a_part_that_fails_ends_the_process_and_gives_everything_back(
    redis_client: "redis.Redis",
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    task: str,
) -> None:
    hold = Hold(2)
    async with scripted_server(hold.step, pages=PAGES) as server:
        made = EngineWorld(redis_client, server.url, prompts=20, **parent_of(task))
        async with made.running() as running:
            await until(lambda: len(held(server)) == 6, "four open requests after two answers")
            await until(lambda: made.world.counts().completed == 2, "two completions")
            assert made.slots_of() == 4

            monkeypatch.setattr(os, "getppid", os.getppid)
            TASKS[task](made.engine, fails)
            if task in {"finish", "request"}:
                # These have something to do when an answer comes.
                hold.go.set()
            await until(running.done, "its end")

        error = running.exception()
        assert isinstance(error, InternalError), repr(error)
        assert error.exit_code == 1
        assert made.slots_of() == 0, "its slots are free"
        counts = made.world.counts()
        assert counts.failed == counts.retries == 0
        # What may stay until its lease has run out: results that cannot be recorded, and prompts
        # with which serving itself failed, of which nobody knows what they would do next.
        most_left = {"finish": len(made.engine._holdings.unsent), "request": 12}
        assert counts.in_flight <= most_left.get(task, 0)
        assert counts.completed + counts.queued + counts.in_flight == 20
        if task not in {"finish", "request"}:
            assert set(held(server)[2:]) <= set(server.aborts), "what was open was aborted"
            assert [made.world.job(n).get("lost") for n in made.world.listed()] == [None] * 18
        made.world.check()
    assert f"the task `{task}`" in caplog.text
    assert SECRET not in caplog.text


def parent_of(task: str) -> dict[str, Any]:
    return {"parent_pid": os.getppid()} if task == "parent" else {}


def fails(*_: Any, **__: Any) -> Any:
    """Raise what nobody foresees, with a prompt's words in it."""
    raise KeyError(SECRET)


async def test_an_event_loop_without_memory_ends_the_process(redis_client: "redis.Redis") -> None:
    hold = Hold(0)

    def no_memory() -> None:
        raise MemoryError

    async with scripted_server(hold.step, pages=PAGES) as server:
        made = EngineWorld(redis_client, server.url, prompts=8)
        async with made.running() as running:
            await until(lambda: len(held(server)) == 4, "four open requests")
            asyncio.get_running_loop().call_soon(no_memory)
            await until(running.done, "its end")

        assert isinstance(running.exception(), InternalError)
        assert made.slots_of() == 0
        assert (made.world.counts().in_flight, made.world.counts().queued) == (0, 8)
        made.world.check()
