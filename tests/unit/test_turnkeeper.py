"""Finished turns on their way to Redis: once, in order, again after an outage, with a return."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from common.errors import RedisFullError, RedisUnusableError
from common.models import KeptTurns
from common.queue import Jobs
from workers.engine.desk import RedisDesk
from workers.engine.holdings import Holdings
from workers.engine.returns import Returns
from workers.engine.turnkeeper import TurnKeeper

KEY = ("r", b"k" * 16)


class Queue:
    """The calls of `Jobs` that concern turns, each answered as told; the last answer stays."""

    def __init__(self, *answers: str | Exception) -> None:
        self.answers = list(answers)
        self.calls: list[Any] = []

    def keep_turns(self, kept: Sequence[KeptTurns]) -> list[str]:
        self.calls.append([each.turns for each in kept])
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return [answer for _ in kept]

    def give_back(self, held: Sequence[tuple[str, bytes]], *, died: bool = False) -> list[str]:
        self.calls.append(("back", list(held), died))
        return ["queued" for _ in held]


class World:
    def __init__(self, *answers: str | Exception) -> None:
        self.queue = Queue(*answers)
        self.holdings = Holdings()
        self.desk = RedisDesk("test")
        jobs = cast("Jobs", self.queue)
        self.keeper = TurnKeeper(jobs, self.holdings, self.desk)
        self.returns = Returns(jobs, self.holdings, self.desk)

    async def until(self, calls: int) -> None:
        async with asyncio.timeout(10):
            while len(self.queue.calls) < calls or self.holdings.turns:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


def turns(text: bytes, key: bytes = KEY[1]) -> KeptTurns:
    return KeptTurns(run="r", uid="u", key=key, fingerprint=b"f", try_=1, turns=text)


@asynccontextmanager
async def running(*answers: str | Exception) -> AsyncIterator[World]:
    world = World(*answers)
    task = asyncio.create_task(world.keeper.run())
    yield world
    task.cancel()
    world.desk.close()


async def test_whoever_asks_hears_what_redis_said() -> None:
    async with running("ok", "stolen") as world:
        assert await world.keeper.keep(turns(b"1\n")) == "ok"
        assert await world.keeper.keep(turns(b"1\n2\n")) == "stolen"

        assert world.queue.calls == [[b"1\n"], [b"1\n2\n"]]
        assert world.holdings.turns == {}


async def test_turns_of_many_prompts_go_in_one_call() -> None:
    async with running("ok") as world:
        keys = [b"%016d" % number for number in range(50)]

        words = await asyncio.gather(*(world.keeper.keep(turns(b"1\n", key)) for key in keys))

        assert words == ["ok"] * 50
        assert len(world.queue.calls) <= 2


async def test_an_outage_is_told_at_once_and_the_newest_turns_are_sent_after_it() -> None:
    async with running(RedisUnusableError("away"), "ok") as world:
        assert await world.keeper.keep(turns(b"1\n")) == "away"
        assert await world.keeper.keep(turns(b"1\n2\n")) == "away"

        await world.until(2)
        assert world.queue.calls == [[b"1\n"], [b"1\n2\n"]]


async def test_turns_that_redis_does_not_know_yet_are_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.engine.turnkeeper.AGAIN_S", 0.01)
    async with running("untaught", "untaught", "ok") as world:
        assert await world.keeper.keep(turns(b"1\n")) == "untaught"

        await world.until(3)
        assert world.queue.calls == [[b"1\n"]] * 3


async def test_turns_of_a_task_that_is_cancelled_are_sent_all_the_same() -> None:
    async with running("ok") as world:
        asking = asyncio.create_task(world.keeper.keep(turns(b"1\n")))
        await asyncio.sleep(0)
        asking.cancel()

        await world.until(1)
        assert world.queue.calls == [[b"1\n"]]


async def test_a_job_goes_back_with_its_turns() -> None:
    world = World("ok")
    world.holdings.turns[KEY] = turns(b"1\n")
    world.returns.add(KEY, died=True)

    assert await world.returns.flush(5)

    assert world.queue.calls == [[b"1\n"], ("back", [KEY], True)]
    assert world.holdings.turns == {}
    world.desk.close()


async def test_a_full_redis_gets_the_job_back_without_its_turns() -> None:
    world = World(RedisFullError("full"))
    world.holdings.turns[KEY] = turns(b"1\n")
    world.returns.add(KEY, died=False)

    assert await world.returns.flush(5)

    assert world.queue.calls[-1] == ("back", [KEY], False)
    world.desk.close()


async def test_an_outage_keeps_the_job_and_its_turns_here() -> None:
    world = World(RedisUnusableError("away"), "ok")
    world.holdings.turns[KEY] = turns(b"1\n")
    world.returns.add(KEY, died=False)

    assert await world.returns.flush(5)

    assert world.queue.calls == [[b"1\n"], [b"1\n"], ("back", [KEY], False)]
    world.desk.close()
