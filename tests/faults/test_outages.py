"""Redis frozen, full, silent or much smaller than before: nothing is lost, charged or stuck."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from common import names
from common.errors import RedisFullError
from common.queue import Ledger
from common.store.directory import DirectoryStore
from tests.support import programs
from tests.support.fleet import REPOSITORY, Fleet, write_prompts
from tests.support.redis_server import RedisServer
from tests.support.run_world import World
from tests.support.server_process import wait_until
from tests.support.watching import QUICK_SINK, members, open_now, timed

RUN = "job"
SMALL = "8mb"
TOO_MANY = 6_000
"""Prompts of whose requests SMALL does not hold all."""
FAR_TOO_MANY = 16_000
"""Prompts of which SMALL does not hold the ledger, wherever the last thousand of requests fell.

A tenth of what it leaves for both is the ledger's alone: 0.5 MB, or 11,000 prompts; 3,000 come in
with their requests.
"""

LEASE_S = 2.0
QUICK_LEASES = {"lease_s": LEASE_S, "leases_every_s": 0.3, "reap_every_s": 0.05}


@pytest.mark.timeout(400)
def test_a_frozen_redis_costs_no_living_process_its_leases(tmp_path: Path) -> None:
    # What a process had asked for before the freeze is carried out after it, when every lease has
    # run out: a reap among it must not take what others renew a moment later.
    prompts = write_prompts(tmp_path / f"{RUN}.jsonl", 40)
    with Fleet(tmp_path, servers=2, latency="fixed:30", cap=8, env=timed(**QUICK_LEASES)) as fleet:
        fleet.simulator.control("no_answer", match="say ")
        fleet.enqueue(prompts)
        fleet.start_group(0, "--concurrency", "8")
        fleet.start_group(1, "--concurrency", "8")
        fleet.wait(lambda: min(open_now(fleet, 0), open_now(fleet, 1)) == 8, "two full servers")
        holder = next(iter(fleet.client.scan_iter(names.renewed("*"))))

        for _ in range(2):
            # Only who renewed for a whole lease may reap, so that is when a freeze can hurt.
            wait_until(lambda: renewed_for_s(fleet, holder) > 1.5 * LEASE_S, "steady renewals")
            fleet.redis.freeze()
            until_s = time.monotonic() + 1.5 * LEASE_S
            wait_until(partial(passed, until_s), "leases to run out")
            fleet.redis.thaw()
            wait_until(lambda: renewed_for_s(fleet, holder) < LEASE_S, "renewals to begin anew")

        assert sum(members(fleet, "lost")) == 0
        for process in fleet.processes.values():
            process.kill()


def passed(until_s: float) -> bool:
    return time.monotonic() > until_s


def renewed_for_s(fleet: Fleet, holder: bytes) -> float:
    """For how long a process has renewed without a gap, as Redis remembers it."""
    since, last = (fleet.client.get(holder) or b"0 0").split()
    return (int(last) - int(since)) / 1000


@contextmanager
def small_redis() -> Iterator[RedisServer]:
    with RedisServer("valkey", appendonly=True, settings={"maxmemory": SMALL}) as server:
        yield server


@pytest.mark.timeout(400)
def test_more_prompts_than_redis_holds_leave_room_for_the_work_on_them(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / f"{RUN}.jsonl", TOO_MANY)
    with small_redis() as server, Fleet(tmp_path, redis=server, latency="0", cap=64) as fleet:
        enqueue = fleet.spawn("enqueue", "producer", *fleet.enqueue_arguments(prompts))
        wait_until(lambda: "full" in enqueue.tail(), "enqueue to wait for room")
        assert enqueue.alive()
        del fleet.processes["enqueue"]

        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait(lambda: not enqueue.alive(), "enqueue to end")
        counts = fleet.wait_done(RUN)

        assert (counts.total, counts.completed) == (TOO_MANY,) * 2
        fleet.verify(RUN)


@pytest.mark.timeout(400)
def test_a_run_that_lost_its_redis_goes_on_in_a_smaller_one(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / f"{RUN}.jsonl", FAR_TOO_MANY)
    with (
        RedisServer("valkey", appendonly=True) as server,
        Fleet(tmp_path, redis=server, latency="fixed:0.1", cap=64) as fleet,
    ):
        fleet.enqueue(prompts)
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait(lambda: fleet.counts(RUN).completed > 200, "some completions")
        server.wipe()
        fleet.client.config_set("maxmemory", SMALL)

        fleet.producer("resume", RUN, "--output", fleet.output)
        taken = fleet.counts(RUN)
        assert taken.total < FAR_TOO_MANY, "the rest waits in the store"
        # Results of prompts that it has no room for are taken all the same, or workers would wait.
        fleet.wait(lambda: fleet.counts(RUN).completed > taken.completed + 500, "it to go on")
        fleet.client.config_set("maxmemory", 0)
        fleet.simulator.control("slow", factor=50)
        counts = fleet.wait_done(RUN)

        assert (counts.total, counts.completed) == (FAR_TOO_MANY, FAR_TOO_MANY)
        fleet.verify(RUN)


def test_new_prompts_wait_for_room_and_known_ones_do_not(tmp_path: Path) -> None:
    with small_redis() as server:
        world = World(server.client(), DirectoryStore(tmp_path / "out"), prompts=1000)
        used = int(world.client.info("memory")["used_memory"])
        world.client.config_set("maxmemory", int(used * 1.2))
        ledger = Ledger(world.client, world.record)

        def row(number: int) -> tuple[bytes, bytes, bytes]:
            return world.key(number), world.fingerprint(number), world.prompt(number)

        assert ledger.add([row(0), row(999)]).queued == 2
        with pytest.raises(RedisFullError, match="maxmemory"):
            ledger.add([row(0), row(1000)])
        assert world.runs.counts(world.record.run).total == 1000
        world.close()


def test_a_result_whose_prompt_had_no_room_yet_is_taken(tmp_path: Path) -> None:
    # A worker that must keep it claims nothing, and nothing else would make room.
    with small_redis() as server:
        world = World(server.client(), DirectoryStore(tmp_path / "out"), prompts=1000)
        assert world.finish([1000]) == ["untaught"], "a rebuild may be under way"
        used = int(world.client.info("memory")["used_memory"])
        world.client.config_set("maxmemory", int(used * 1.2))
        with pytest.raises(RedisFullError):
            world.queue([1000])

        # Its room counts for results.
        world.client.config_set("maxmemory", used * 2)
        assert world.finish([1000, 1000]) == ["ok", "duplicate"]
        counts = world.runs.counts(world.record.run)
        assert (counts.total, counts.completed, counts.queued) == (1001, 1, 1000)
        world.client.hdel(names.run(world.record.run), "reconciled")
        assert world.finish([1001]) == ["untaught"]
        world.close()


def test_a_redis_that_takes_connections_and_says_nothing_is_told_soon(tmp_path: Path) -> None:
    commands = [
        ("producer", "status", RUN),
        ("workers", "sink"),
        ("workers", "start", "--gpu", "0"),
    ]
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor() as pool:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        url = f"redis://:fakesekret@{where}/0"
        for ended in pool.map(lambda command: call(tmp_path, url, *command), commands):
            assert ended.returncode == 4
            assert where in ended.stderr
            assert "fakesekret" not in ended.stderr + ended.stdout


@pytest.mark.parametrize(
    "url",
    [
        "redis://:fakesek/ret@127.0.0.1:6379/0",
        "redis://:fakesek#ret@127.0.0.1:6379/0",
        "redis://:fakesekret@127.0.0.1:99999/0",
        "redis://:fakesekret@[::1/0",
        "user:fakesekret@127.0.0.1:6379",
    ],
)
def test_an_address_that_is_none_is_told_without_its_password(tmp_path: Path, url: str) -> None:
    ended = call(tmp_path, url, "producer", "status", RUN)

    assert ended.returncode == 2
    assert "address of Redis" in ended.stderr
    assert "sek" not in ended.stderr + ended.stdout


def call(folder: Path, url: str, *command: str) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end; well below what four time-outs of a working client take."""
    return programs.run(
        [sys.executable, "-m", *command],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "HEADRACE_REDIS": url},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
