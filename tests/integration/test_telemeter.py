"""A worker group's samples: of what it serves, by its server's log too, and in nobody's way."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import redis

from common import names
from common.errors import RedisFullError
from common.queue import Groups
from common.queue.samples import Samples
from common.telemetry import UID_CHARS, Sample
from tests.support.engine_world import GROUP, PAGES, QUICK, EngineWorld, held, until
from tests.support.scripted_server import Reply, answer, scripted_server
from workers.servers.log_tail import LogTail
from workers.timing import Timing

EVER = 2**62
SECRET = "somebody's words"
TIMING = Timing(
    **{name: getattr(QUICK, name) for name in QUICK.__struct_fields__ if name != "sample_every_s"},
    sample_every_s=0.1,
)


class Hold:
    """Answers prompts when it is let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def step(self, body: dict[str, Any]) -> Reply:
        if "messages" in body:
            await self.go.wait()
        return Reply(body=answer("hi"))


def samples(client: "redis.Redis") -> list[Sample]:
    return [sample for *_, sample in Samples(client).between([GROUP], 0, EVER)]


async def test_samples_say_what_is_served_and_what_was_between_two_of_them(
    redis_client: "redis.Redis",
) -> None:
    hold = Hold()
    async with scripted_server(hold.step, pages=PAGES) as server:
        made = EngineWorld(redis_client, server.url, prompts=9, timing=TIMING)
        uid = made.world.record.uid[:UID_CHARS]
        async with made.running():
            await until(
                lambda: any(each.runs == {uid: 4} for each in samples(redis_client)),
                "a sample with four open requests",
            )
            hold.go.set()
            await until(
                lambda: any(each.completed == 9 for each in samples(redis_client)), "all of it"
            )
            await until(
                lambda: samples(redis_client)[-1].runs == {}, "a sample with nothing to do"
            )

    told = samples(redis_client)
    assert {each.epoch for each in told} == {made.jobs.epoch}
    assert {each.server for each in told} == {server.url}
    assert max(each.in_flight for each in told) == 4
    assert sum(each.dropped for each in told) == 0
    # The last completions are in a sample of the run, though nothing is open any more.
    assert max(each.completed for each in told if uid in each.runs) == 9


async def test_answers_that_come_between_two_looks_are_the_run_s_all_the_same(
    redis_client: "redis.Redis",
) -> None:
    hold = Hold()
    async with scripted_server(hold.step, pages=PAGES) as server:
        made = EngineWorld(redis_client, server.url, prompts=4, timing=TIMING)
        uid = made.world.record.uid[:UID_CHARS]
        async with made.running():
            await until(
                lambda: any(each.runs == {uid: 4} for each in samples(redis_client)), "a sample"
            )
            # From here on nothing is seen of what is held.
            telemeter = made.engine._showing._telemeter
            telemeter._look = lambda: None  # type: ignore[method-assign]
            telemeter._served.clear()
            hold.go.set()
            await until(
                lambda: any(each.completed == 4 for each in samples(redis_client)), "all of it"
            )

    first = next(each for each in samples(redis_client) if each.completed == 4)
    assert first.runs == {uid: 0}


async def test_a_redis_without_room_for_samples_goes_on_without_them(
    redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuses = [True]
    add = Samples.add

    def refusing(self: Samples, group: str, sample: Sample) -> None:
        if refuses[0]:
            raise RedisFullError("no room")
        add(self, group, sample)

    monkeypatch.setattr(Samples, "add", refusing)
    async with scripted_server("ok", pages=PAGES) as server:
        made = EngineWorld(redis_client, server.url, prompts=9, timing=TIMING)
        async with made.running() as running:
            telemeter = made.engine._showing._telemeter
            await until(lambda: made.world.counts().completed == 9, "all completed")
            await until(lambda: telemeter.dropped >= 3, "some samples dropped")
            refuses[0] = False
            await until(lambda: bool(samples(redis_client)), "a sample")
            assert not running.done()

    assert samples(redis_client)[0].dropped >= 3
    assert "room" not in caplog.text


async def test_an_error_of_telemetrys_own_harms_nothing_else_and_is_told_once(
    redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = [0]

    def broken(_self: LogTail) -> None:
        looks[0] += 1
        raise KeyError(SECRET)

    monkeypatch.setattr(LogTail, "read", broken)
    async with scripted_server("ok", pages=PAGES) as server:
        made = EngineWorld(redis_client, server.url, prompts=9, timing=TIMING)
        async with made.running() as running:
            await until(lambda: made.world.counts().completed == 9, "all completed")
            await until(lambda: looks[0] >= 3 and bool(samples(redis_client)), "samples")
            assert not running.done()

    assert caplog.text.count("telemetry has a fault of ours") == 1
    assert SECRET not in caplog.text


async def test_a_log_that_hangs_holds_up_neither_prompts_nor_samples_nor_a_stop(
    redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(LogTail, "read", lambda _self: [hangs.wait(300)][:0])
    try:
        async with scripted_server("ok", pages=PAGES) as server:
            made = EngineWorld(redis_client, server.url, prompts=9, timing=TIMING)
            async with made.running() as running:
                await until(lambda: made.world.counts().completed == 9, "all completed")
                await until(lambda: len(samples(redis_client)) >= 2, "samples")
                made.engine.stop.ask()
                await until(running.done, "its end")
    finally:
        hangs.set()


LINES = (
    "[2026-01-01 10:00:00] server_args={'mamba_radix_cache_strategy': 'extra_buffer'}",
    "[2026-01-01 10:00:01] max_total_num_tokens=45000, max_running_requests=6, context_len=9",
    "[2026-01-01 10:00:02] Decode batch, #running-req: 5, #queue-req: 2, mamba usage: 0.61",
)


async def test_a_server_whose_pages_tell_nothing_is_known_by_its_log(
    redis_client: "redis.Redis", tmp_path: Path
) -> None:
    log = tmp_path / "sglang_gpu0.log"
    log.write_text("".join(f"{line}\n" for line in LINES))
    hold = Hold()
    only_name = {"/v1/models": PAGES["/v1/models"]}
    async with scripted_server("ok", hold.step, pages=only_name) as server:
        made = EngineWorld(
            redis_client,
            server.url,
            prompts=20,
            timing=TIMING,
            concurrency="auto",
            find_log=lambda: log,
        )
        async with made.running():
            # The cap of the log and a backlog of two: not what is assumed of a silent server.
            await until(lambda: len(held(server)) == 8, "as many requests as its cap allows")
            await until(
                lambda: any(each.mamba_usage for each in Groups(redis_client).fresh()), "figures"
            )
            [told] = Groups(redis_client).fresh()
            hold.go.set()

    assert (told.cap, told.bound, told.running, told.queued) == (6, 8, 5, 2)
    assert (told.mamba_usage, told.strategy) == (0.61, "extra_buffer")
    assert names.telemetry(GROUP).encode() in set(redis_client.scan_iter("headrace:telemetry:*"))
