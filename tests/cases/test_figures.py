"""Cases of figures that deceive: rates and times left, counts that go back, ages that nobody sees.

The figures are those of `producer status`; where a case tells of minutes, they pass by a clock.
"""

import asyncio
import heapq
import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from common import names, snapshot
from common.flow import BUCKET_MS
from common.group_figures import GroupFigures
from common.models import Counts
from common.queue import Groups
from common.store.directory import DirectoryStore
from producer.view import of_run
from tests.support.engine_world import PAGES, EngineWorld, until
from tests.support.queue_world import SECRET
from tests.support.run_world import RUN, World
from tests.support.scripted_server import Reply, answer, scripted_server

pytestmark = [pytest.mark.timeout(400), pytest.mark.cases]


def figures_of(client: "redis.Redis") -> dict[str, Any]:
    read = snapshot.read(client, RUN)
    assert read is not None
    return read.figures()


def ready(**own: Any) -> GroupFigures:
    values = {"group": "gpu0@h", "epoch": "e1", "host": "h", "pid": 1, "server": "http://s"}
    return GroupFigures(**{**values, "state": "ready", **own})


# --- B47 -----------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_b47_one_row_that_holds_the_tail_is_seen_with_its_age(
    redis_client: "redis.Redis",
) -> None:
    go = asyncio.Event()

    async def step(body: dict[str, Any]) -> Reply:
        if "row 42" in json.dumps(body):
            await go.wait()
        return Reply(body=answer("hi"))

    async with scripted_server(step, pages=PAGES) as server:
        world = EngineWorld(redis_client, server.url, prompts=0)
        for number in range(100):
            world.world.add([number], text=f"row {number}.")
        async with world.running():
            await until(lambda: world.world.counts().completed == 99, "99 short answers")
            ages: list[float] = []
            told: dict[str, Any] = {}
            for _ in range(3):
                # What the worker group says is as old as its last word: for the next one.
                before = ages[-1] if ages else 0.0
                await until(lambda at=before: age(redis_client) > at, "an older age")  # type: ignore[misc]
                told = figures_of(redis_client)
                ages.append(told["worker_groups"][0]["oldest_s"])
                assert (told["in_flight"], told["queued"], told["completed"]) == (1, 0, 99)
                # It has not ended: no time left of 0, and no nonsense either.
                assert told["eta_hours"] is None or 0 < told["eta_hours"] < 1e6
                assert told["status"] in {"running", "ramping"}
            go.set()
            await until(lambda: world.world.counts().completed == 100, "the long one")
        assert ages == sorted(ages)
        assert figures_of(redis_client)["eta_hours"] == 0
    assert of_run(told, width=80)


def age(client: "redis.Redis") -> float:
    """How old the oldest request is by the last word of the worker group that has just one."""
    (group,) = Groups(client).fresh()
    return group.oldest_s or 0.0 if group.in_flight == 1 else 0.0


# --- B88 -----------------------------------------------------------------------------------------


def test_b88_what_was_done_before_a_resume_does_not_count_for_the_rate(
    redis_client: "redis.Redis", tmp_path: Path
) -> None:
    world = World(redis_client, DirectoryStore(tmp_path / "out"), prompts=1_351)
    world.finish(range(130))
    hour_ms = 3_600_000
    # An hour passes: what Redis counted moves into the past.
    rate = cast("dict[bytes, bytes]", redis_client.hgetall(names.rate(RUN)))
    redis_client.delete(names.rate(RUN))
    for bucket, count in rate.items():
        redis_client.hset(names.rate(RUN), str(int(bucket) - hour_ms // BUCKET_MS), count)
    redis_client.hset(names.counts(RUN), "active_ms", 2 * hour_ms)
    # 24 s ago its worker group began to work.
    begin = (world.runs.completions_per_bucket(RUN)[0] - 24_000) // BUCKET_MS
    redis_client.hset(names.rate(RUN), str(begin), 0)
    world.finish([130])
    Groups(redis_client).publish(ready(in_flight=1, running=1, up_s=24.0, oldest_s=5.0))

    told = figures_of(redis_client)

    assert (told["total"], told["completed"]) == (1_351, 131)
    assert told["rate_per_sec"] == pytest.approx(1 / 24, rel=0.2)
    assert told["eta_hours"] == pytest.approx(1_220 * 24 / 3_600, rel=0.2)
    # The sum of all sittings, which the rate has nothing to do with.
    assert told["elapsed_hours"] == pytest.approx(2.0, rel=0.01)


# --- B91 -----------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_b91_no_count_goes_back_while_rows_are_tried_again(
    redis_client: "redis.Redis",
) -> None:
    rows, tries = 30, Counter[str]()

    async def step(body: dict[str, Any]) -> Reply:
        if "messages" not in body:
            return Reply(body=answer("hi"))
        text = json.dumps(body["messages"])
        tries[text] += 1
        return Reply(body=answer("hi") if tries[text] > 2 else b'{"choices":[]}')

    async with scripted_server(step, pages=PAGES) as server:
        world = EngineWorld(redis_client, server.url, prompts=0)
        for number in range(rows):
            world.world.add([number], text=f"{SECRET} {number}.")
        seen: list[Counts] = []
        async with world.running():
            while not seen or seen[-1].completed < rows:
                seen.append(world.world.counts())
                await asyncio.sleep(0.1)

    assert set(tries.values()) == {3}
    for before, after in itertools.pairwise(seen):
        for name in ("completed", "failed", "retries"):
            assert getattr(before, name) <= getattr(after, name)
    for counts in seen:
        assert counts.failed == 0
        ended = counts.completed + counts.failed + counts.cancelled
        assert ended + counts.in_flight + counts.queued == counts.total == rows
    assert (seen[-1].completed, seen[-1].retries) == (rows, 2 * rows)


# --- B95 -----------------------------------------------------------------------------------------

SLOTS = 8
ROWS = 500
UNITS = (1, 4)
"""How long an answer takes at either server, by a clock that the test moves."""


class TurnedClock:
    """Holds the requests of two servers, and answers them in the order of a clock of its own.

    The clock moves only when nobody has anything to do: so it does not matter how fast this
    machine is, and what is seen is how the work was shared.
    """

    def __init__(self) -> None:
        self.now = 0
        self.held: list[tuple[int, int, asyncio.Event]] = []
        self.open, self.answered = [0, 0], [0, 0]

    def step(self, server: int) -> Callable[[dict[str, Any]], Any]:
        async def hold(body: dict[str, Any]) -> Reply:
            if "messages" in body:
                go, number = asyncio.Event(), len(self.held) + sum(self.answered)
                heapq.heappush(self.held, (self.now + UNITS[server], 2 * number + server, go))
                self.open[server] += 1
                await go.wait()
                self.open[server] -= 1
                self.answered[server] += 1
            return Reply(body=answer("hi"))

        return hold

    def turn(self) -> None:
        """Answer all that is due next."""
        self.now = self.held[0][0]
        while self.held and self.held[0][0] == self.now:
            heapq.heappop(self.held)[2].set()


@pytest.mark.anyio
async def test_b95_a_slow_gpu_gets_its_share_and_both_are_busy_to_the_end(
    redis_client: "redis.Redis",
) -> None:
    clock = TurnedClock()
    async with (
        scripted_server(clock.step(0), pages=PAGES) as fast,
        scripted_server(clock.step(1), pages=PAGES) as slow,
    ):
        options: dict[str, Any] = {"concurrency": SLOTS}
        worlds = [
            EngineWorld(redis_client, fast.url, prompts=ROWS, **options),
            EngineWorld(redis_client, slow.url, prompts=0, group="gpu1@test", **options),
        ]

        def settled() -> bool:
            left = redis_client.llen(names.rq_queue(RUN))
            return all(
                clock.open[server] == len(world.engine._holdings.open)
                and (clock.open[server] == SLOTS or not (left or world.engine._holdings.ready))
                for server, world in enumerate(worlds)
            )

        idle_at = ROWS
        async with worlds[0].running(), worlds[1].running():
            while sum(clock.answered) < ROWS:
                await until(settled, f"everybody at work, {clock.answered} answered", 90)
                if min(clock.open) < SLOTS:
                    idle_at = min(idle_at, sum(clock.answered))
                clock.turn()
                due = sum(clock.answered)
                await until(lambda seen=due: sum(clock.answered) > seen, "an answer")  # type: ignore[misc]
            await until(lambda: worlds[0].world.counts().completed == ROWS, "the end")

    assert ROWS - idle_at <= 2 * 2 * SLOTS, "both had work until the last rows"
    quick, slow_ones = clock.answered
    assert quick / slow_ones == pytest.approx(UNITS[1] / UNITS[0], rel=0.15)
    ideal = ROWS / sum(SLOTS / unit for unit in UNITS)
    assert clock.now <= 1.15 * ideal
