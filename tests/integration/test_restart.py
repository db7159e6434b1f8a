"""The restart of one server, by the records of its supervisor and a drain in a real Redis."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import redis

from common import crashpoints, names
from common.connect import server_run_id
from common.queue.drains import Drain, look
from tests.conftest import REPOSITORY
from tests.faults.test_group_slots import GOOD, Held
from tests.support.engine_world import HOST, PAGES, EngineWorld, held, until
from tests.support.ordered_server import NAME, OrderedServer
from tests.support.redis_server import RedisServer
from tests.support.scripted_server import Page, scripted_server
from tests.support.server_process import wait_until
from workers.node.restart import emptied
from workers.node.restart import server as restart_module
from workers.node.restart.choice import Asked, Outcome
from workers.node.restart.server import ServerRestart, Told
from workers.options import slots_server
from workers.supervisor import records
from workers.supervisor.records import read_wanted

pytestmark = pytest.mark.timeout(400)

URL = "http://127.0.0.1:39999"
SERVER = slots_server(URL, HOST)
NO_BUFFER = Asked(strategy="no_buffer")


@pytest.fixture
def client(redis_client: "redis.Redis") -> "redis.Redis":
    # It has long known the server, and nobody drives it.
    redis_client.hset(
        names.slots(SERVER), mapping={"run_id": server_run_id(redis_client), "since": 0}
    )
    return redis_client


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_module, "LOOK_S", 0.02)
    monkeypatch.setattr(emptied, "LOOK_S", 0.02)
    monkeypatch.setattr(emptied, "RENEW_S", 0.1)
    monkeypatch.setattr(restart_module, "SETTLED_S", 1.0)


class Restarting:
    """One restart, and what it said."""

    def __init__(
        self,
        ordered: OrderedServer,
        folder: Path,
        client: "redis.Redis | None",
        asked: Asked = NO_BUFFER,
        **told: Any,
    ) -> None:
        self.said: list[str] = []
        self.stop = threading.Event()
        told = {"drain_limit_s": 60.0, "start_limit_s": 60.0, **told}
        self._restart = ServerRestart(
            ordered.record,
            asked,
            Told(state_dir=folder, host=HOST, **told),
            client=client,
            say=lambda step, detail: self.said.append(f"{step}: {detail}"),
            stop=self.stop,
        )

    def run(self) -> Outcome:
        return self._restart.run()


def test_an_empty_server_is_ordered_and_compared_and_its_drain_lifted(
    client: "redis.Redis", tmp_path: Path
) -> None:
    with OrderedServer(tmp_path, URL) as ordered:
        done = Restarting(ordered, tmp_path, client).run()

    assert done.state == "restarted"
    assert done.before is not None
    assert done.after is not None
    assert f"{done.before.text} -> {done.after.text}" == (
        "extra_buffer 32 slots -> no_buffer 72 slots"
    )
    assert [each.strategy for each in ordered.taken] == ["no_buffer"]
    assert look(client, SERVER) is None


def test_on_a_full_disk_nothing_is_drained(
    client: "redis.Redis", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    drained: list[object] = []
    monkeypatch.setattr(emptied.Emptied, "hold", drained.append)
    with OrderedServer(tmp_path, URL) as ordered, monkeypatch.context() as at_full:
        at_full.setattr(records, "replace_file", full)
        done = Restarting(ordered, tmp_path, client).run()

    assert (done.state, done.code) == ("failed", 4)
    assert done.detail.endswith("cannot be written: No space left on device")
    assert not drained
    assert ordered.taken == []


def test_without_redis_it_is_ordered_all_the_same(tmp_path: Path) -> None:
    with OrderedServer(tmp_path, URL) as ordered:
        done = Restarting(ordered, tmp_path, None, Asked(arguments=("--a",))).run()

    assert done.state == "restarted"
    assert [each.arguments for each in ordered.taken] == [("--a",)]


def test_a_server_that_does_not_start_so_is_told_with_the_reason_and_runs_as_it_did(
    client: "redis.Redis", tmp_path: Path
) -> None:
    with OrderedServer(tmp_path, URL, refuses="it does not start: ValueError: no") as ordered:
        done = Restarting(ordered, tmp_path, client).run()

    assert (done.state, done.code) == ("failed", 4)
    assert done.detail == (
        "gpu0@test does not run with strategy no_buffer: it does not start: ValueError: no; it "
        "runs as it did (extra_buffer 32 slots), and its log is /logs/sglang_gpu0.log"
    )
    assert look(client, SERVER) is None


def test_flags_that_did_not_start_do_not_come_along_with_what_is_asked_next(
    client: "redis.Redis", tmp_path: Path
) -> None:
    with OrderedServer(tmp_path, URL) as ordered:
        Restarting(ordered, tmp_path, client, Asked(arguments=("--good",))).run()
        ordered.refuses = "it does not start"
        Restarting(ordered, tmp_path, client, Asked(arguments=("--bad",))).run()
        ordered.refuses = ""

        done = Restarting(ordered, tmp_path, client).run()

    assert done.state == "restarted"
    assert [(each.strategy, each.arguments) for each in ordered.taken] == [
        (None, ("--good",)),
        (None, ("--bad",)),
        ("no_buffer", ("--good",)),
    ]


def test_a_server_that_gives_no_token_in_its_time_is_ordered_back(
    client: "redis.Redis", tmp_path: Path
) -> None:
    with OrderedServer(tmp_path, URL, never=True) as ordered:
        done = Restarting(ordered, tmp_path, client, start_limit_s=0.3).run()
        wait_until(lambda: len(ordered.taken) == 2, "the order to be taken back")

    assert (done.state, done.code, done.after) == ("failed", 4, None)
    assert "--start-limit" in done.detail
    assert [each.strategy for each in ordered.taken] == ["no_buffer", "extra_buffer"]
    assert look(client, SERVER) is None


def test_a_server_whose_supervisor_has_given_up_is_told(
    client: "redis.Redis", tmp_path: Path
) -> None:
    ordered = OrderedServer(tmp_path, URL)
    restarting = Restarting(ordered, tmp_path, client)
    gone = ordered.record.supervisor.__class__(os.getpid(), "long ago")
    ordered.tell(state="failed", detail="no GPU", supervisor=gone)

    done = restarting.run()

    assert (done.state, done.code) == ("failed", 4)
    assert "gpu0@test is failed and has no supervisor any more: no GPU" in done.detail


def test_what_an_earlier_call_has_ordered_is_waited_for_and_not_ordered_again(
    client: "redis.Redis", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordered = OrderedServer(tmp_path, URL, never=True)
    first = Restarting(ordered, tmp_path, client)
    runs = threading.Thread(target=first.run)
    runs.start()
    wait_until(lambda: read_wanted(tmp_path, NAME) is not None, "the order")
    first.stop.set()
    runs.join(60)
    assert look(client, SERVER) is None, "an interrupted call lifts its drain"
    ordered.never = False
    # Nothing is written for it any more, so there need be no room.
    monkeypatch.setattr(restart_module, "refuse_full_disk", None)

    with ordered:
        done = Restarting(ordered, tmp_path, client).run()

    assert done.state == "restarted"
    assert [each.serial for each in ordered.taken] == [1]


def test_interrupted_before_the_order_nothing_is_ordered(
    client: "redis.Redis", tmp_path: Path
) -> None:
    client.hset(names.slots(SERVER), "since", int(client.time()[0]) * 1000)
    client.hset(names.slots(SERVER), "unsure", "restarted")
    with OrderedServer(tmp_path, URL) as ordered:
        restarting = Restarting(ordered, tmp_path, client)
        done: list[Outcome] = []
        runs = threading.Thread(target=lambda: done.append(restarting.run()))
        runs.start()
        wait_until(lambda: bool(restarting.said), "its waiting for others to speak")
        restarting.stop.set()
        runs.join(60)

    assert (done[0].state, done[0].code) == ("stopped", 130)
    assert (ordered.taken, look(client, SERVER)) == ([], None)


def test_a_server_that_somebody_else_drains_is_left_to_him_and_he_is_named(
    client: "redis.Redis", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emptied, "DRAIN_TTL_MS", 400)
    Drain(client, SERVER, owner="somebody", reason="his own", limit_s=9).hold()

    with OrderedServer(tmp_path, URL) as ordered:
        done = Restarting(ordered, tmp_path, client).run()

    assert (done.state, done.code, ordered.taken) == ("failed", 5, [])
    assert "gpu0@test is drained by somebody (his own)" in done.detail
    assert look(client, SERVER) is not None


def test_redis_away_while_the_server_is_away_holds_nothing_up(
    valkey: RedisServer, tmp_path: Path
) -> None:
    with valkey.client() as client:
        client.hset(names.slots(SERVER), mapping={"run_id": server_run_id(client), "since": 0})
        with OrderedServer(tmp_path, URL, never=True) as ordered:
            restarting = Restarting(ordered, tmp_path, client)
            done: list[Outcome] = []
            runs = threading.Thread(target=lambda: done.append(restarting.run()))
            runs.start()
            wait_until(lambda: bool(ordered.taken), "the order to be taken")
            valkey.kill()
            wait_until(
                lambda: any("Redis does not answer" in each for each in restarting.said),
                "its seeing that Redis is away",
            )
            ordered.tell(state="ready")
            runs.join(60)

    assert (done[0].state, done[0].detail) == ("restarted", "")


# --- with a worker group -------------------------------------------------------------------------


def info(cap: int) -> bytes:
    states = [{"effective_max_running_requests_per_dp": cap}]
    return json.dumps({"version": "0.5.23", "internal_states": states}).encode()


async def test_nothing_is_ordered_before_all_has_ended_and_it_ends_when_the_group_is_full_again(
    redis_client: "redis.Redis", tmp_path: Path
) -> None:
    hold, cap = Held(GOOD), [32]
    pages: dict[str, Page] = {**PAGES, "/server_info": lambda: info(cap[0])}
    async with scripted_server(hold.step, pages=pages) as server:
        made = EngineWorld(redis_client, server.url, prompts=200, concurrency="auto")
        ordered = OrderedServer(tmp_path, server.url)
        async with made.running():
            await until(lambda: len(held(server)) == 35, "a full server")
            with ordered:
                restarting = Restarting(ordered, tmp_path, redis_client)
                running = asyncio.create_task(asyncio.to_thread(restarting.run))
                await until(lambda: bool(made.engine._core.draining.token), "its hearing of it")
                await until(
                    lambda: any("draining: 35 open" in each for each in restarting.said),
                    "its waiting for what is open",
                )
                assert restarting.said[0] == (
                    "draining: up to 35 open: its worker group has not heard of it yet"
                )
                assert ordered.taken == []
                cap[0] = 72
                hold.go.set()
                await until(lambda: bool(ordered.taken), "the order")
                assert made.world.counts().completed == 35
                assert len(held(server)) == 35
                hold.go.clear()
                done = await running

            assert done.state == "restarted"
            assert not any("0 of 0" in each for each in restarting.said), "it has no bound yet"
            assert len(held(server)) >= 35 + 0.9 * 79, "the new bound is used, to a tenth"
            hold.go.set()
            await until(lambda: made.world.counts().completed == 200, "all to be completed")
        counts = made.world.counts()
        assert (counts.retries, counts.duplicates_dropped, len(held(server))) == (0, 0, 200)
        made.world.check()


# --- the command, killed -------------------------------------------------------------------------


def call(folder: Path, url: str, *arguments: str, crash_at: str = "") -> Any:
    at = ("--state-dir", str(folder))
    return subprocess.run(
        [sys.executable, "-m", "workers", "restart", *at, "--json", *arguments],
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "HEADRACE_HOST": HOST,
            "HEADRACE_REDIS": url,
            "HEADRACE_LEASES": json.dumps({"drain_ms": 3_000}),
            crashpoints.VARIABLE: crash_at,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.mark.parametrize(
    ("point", "orders"), [("restart.drained", 0), ("restart.ordered", 1), ("restart.ready", 1)]
)
def test_killed_between_two_steps_the_same_call_goes_on(
    client: "redis.Redis", valkey: RedisServer, tmp_path: Path, point: str, orders: int
) -> None:
    asked = ("--strategy", "no_buffer")
    with OrderedServer(tmp_path, URL) as ordered:
        killed = call(tmp_path, valkey.url, *asked, crash_at=point)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        standing = read_wanted(tmp_path, NAME)
        assert (0 if standing is None else standing.serial) == orders
        wait_until(lambda: ordered.record.serial == orders, "its being carried out")
        wait_until(lambda: ordered.record.state == "ready", "its token")

        again = call(tmp_path, valkey.url, *asked)

    assert again.returncode == 0, again.stderr
    told = json.loads(again.stdout)
    state = told["servers"][0]["state"]
    # What had been ordered has been carried out without it.
    assert (told["ok"], state) == (True, "skipped" if orders else "restarted")
    assert [each.strategy for each in ordered.taken] == ["no_buffer"]
    wait_until(lambda: look(client, SERVER) is None, "the end of the dead one's drain")


def test_where_no_server_is_ours_it_says_so(valkey: RedisServer, tmp_path: Path) -> None:
    done = call(tmp_path, valkey.url)

    assert done.returncode == 2
    assert "no server here has a supervisor of Headrace's" in done.stderr
