"""`workers start` with several GPUs: one process watches a process for each worker group."""

import os
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from common.queue import Groups
from tests.support import programs
from tests.support.fleet import Fleet, write_prompts
from tests.support.server_process import ServerProcess, wait_until
from tests.support.watching import QUICK_SINK, exit_code, open_now, timed

pytestmark = pytest.mark.timeout(400)

RUN = "job"
PASSWORD = "hunter2"


def start_all(fleet: Fleet, *extra: str, gpus: str = "0-1") -> ServerProcess:
    """One parent for the first two simulated servers."""
    assert fleet.simulator.ports[1] == fleet.simulator.ports[0] + 1, "consecutive ports"
    # {gpu} stands for one digit here, so the ports must differ in their last one only.
    stem = str(fleet.simulator.ports[0])[:-1]
    command = ("workers", "start", "--gpu", gpus, "--server", f"http://127.0.0.1:{stem}{{gpu}}")
    return fleet.spawn("parent", *command, "--ramp", "10000", *extra)


def two_servers(tmp_path: Path, **options: object) -> Fleet:
    """A fleet whose servers listen on ports that end with 0 and 1."""
    return Fleet(tmp_path, servers=2, port=free_tens(), env=timed(), **options)  # type: ignore[arg-type]


def free_tens() -> int:
    """A free port that is a multiple of ten, and the next one free too.

    Each process that runs tests looks in a range of its own: a port is free until it is used.
    """
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 21_000 + process % 10 * 1_000
    for port in range(first, first + 1_000, 10):
        try:
            with socket.create_server(("127.0.0.1", port)):
                pass
            with socket.create_server(("127.0.0.1", port + 1)):
                return port
        except OSError:
            continue
    raise OSError("no free port")


def children(parent: ServerProcess) -> dict[str, psutil.Process]:
    """The worker groups of a parent by their GPU."""
    found = {}
    for process in psutil.Process(parent.pid).children():
        try:
            arguments = process.cmdline()
        except psutil.Error:  # it is just ending
            continue
        if "--gpu" in arguments:
            found[arguments[arguments.index("--gpu") + 1]] = process
    return found


def groups(fleet: Fleet) -> set[str]:
    return {figures.group.partition("@")[0] for figures in Groups(fleet.client).fresh()}


def test_each_gpu_gets_its_process_and_a_killed_one_is_started_again(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 300)
    with two_servers(tmp_path, latency="0.2", cap=4) as fleet:
        fleet.enqueue(prompts)
        parent = start_all(fleet)
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait(lambda: fleet.counts(RUN).completed >= 50, "50 completions")
        killed = children(parent)["0"]

        killed.kill()
        fleet.wait(lambda: children(parent).get("0", killed).pid != killed.pid, "another process")
        counts = fleet.wait_done(RUN)

        assert groups(fleet) == {"gpu0", "gpu1"}
        assert (counts.completed, counts.failed) == (300, 0)
        assert fleet.max_open() <= 6
        assert "gpu0@" in parent.log.read_text()
        assert "starting it again" in parent.log.read_text()


def test_a_stopped_parent_stops_all_within_the_grace(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 40)
    with two_servers(tmp_path, latency="0.1", cap=4) as fleet:
        fleet.simulator.control("no_answer", match="say ")
        fleet.enqueue(prompts)
        parent = start_all(fleet, "--grace", "2")
        fleet.wait(lambda: open_now(fleet, 0) >= 4 and open_now(fleet, 1) >= 4, "full servers")
        processes = list(children(parent).values())

        parent.send(signal.SIGTERM)
        told_s = time.monotonic()
        wait_until(lambda: not parent.alive(), "its end", 10)

        assert 1.5 < time.monotonic() - told_s < 6
        assert exit_code(parent) == 128 + signal.SIGTERM
        assert not any(process.is_running() for process in processes)
        assert (fleet.counts(RUN).in_flight, fleet.counts(RUN).queued) == (0, 40)
        assert open_now(fleet, 0) == open_now(fleet, 1) == 0
        del fleet.processes["parent"]


def test_a_second_signal_to_the_parent_does_not_wait(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 40)
    with two_servers(tmp_path, latency="0.1", cap=4) as fleet:
        fleet.simulator.control("no_answer", match="say ")
        fleet.enqueue(prompts)
        parent = start_all(fleet, "--grace", "60")
        fleet.wait(lambda: open_now(fleet, 0) >= 4 and open_now(fleet, 1) >= 4, "full servers")

        parent.send(signal.SIGINT)
        fleet.wait(
            lambda: {each.state for each in Groups(fleet.client).fresh()} == {"draining"},
            "both to drain",
        )
        parent.send(signal.SIGINT)
        wait_until(lambda: not parent.alive(), "its end", 6)

        assert exit_code(parent) == 128 + signal.SIGINT
        assert fleet.counts(RUN).in_flight == 0
        del fleet.processes["parent"]


def test_the_children_of_a_killed_parent_drain(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 100)
    with two_servers(tmp_path, latency="fixed:1", cap=4) as fleet:
        fleet.enqueue(prompts)
        parent = start_all(fleet)
        fleet.wait(lambda: open_now(fleet, 0) >= 4 and open_now(fleet, 1) >= 4, "full servers")
        processes = list(children(parent).values())

        parent.kill()
        wait_until(lambda: not any(each.is_running() for each in processes), "their end", 10)

        counts = fleet.counts(RUN)
        assert (counts.in_flight, counts.failed) == (0, 0)
        assert counts.completed == fleet.prompt_requests(), "what was open came to its end"
        del fleet.processes["parent"]


def test_a_group_that_cannot_run_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 100)
    with two_servers(tmp_path, latency="0.2", cap=4) as fleet:
        url = fleet.simulator.urls[1]
        fleet.spawn("other", "workers", "start", "--gpu", "9", "--server", url)
        fleet.wait(lambda: "gpu9" in groups(fleet), "the other group")
        fleet.wait(lambda: any(fleet.client.scan_iter("headrace:slots:*")), "its slots")
        fleet.enqueue(prompts)
        parent = start_all(fleet)
        fleet.start_sink("sink", *QUICK_SINK)

        counts = fleet.wait_done(RUN)
        fleet.wait(lambda: "cannot run" in parent.log.read_text(), "the parent to say so")

        assert counts.completed == 100
        assert "gpu1@" in parent.log.read_text()
        assert "(exit 4)" in parent.log.read_text()
        assert children(parent).keys() == {"0"}


def test_a_parent_whose_groups_all_cannot_run_ends_with_their_code(tmp_path: Path) -> None:
    with two_servers(tmp_path, api_key="secret-of-the-servers") as fleet:
        parent = start_all(fleet)

        wait_until(lambda: not parent.alive(), "its end", 20)

        said = parent.log.read_text()
        assert exit_code(parent) == 4
        assert "HEADRACE_API_KEY" in said
        assert "secret-of-the-servers" not in said
        assert "Traceback" not in said
        del fleet.processes["parent"]


def test_the_password_of_redis_stands_in_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is forked has the command line of what it was forked from.
    monkeypatch.setenv(programs.ALWAYS_EXEC, "1")
    with two_servers(tmp_path) as fleet:
        fleet.client.config_set("requirepass", PASSWORD)
        address = fleet.redis.url.replace("unix://", "unix://:" + PASSWORD + "@")
        fleet.env["HEADRACE_REDIS"] = address
        parent = start_all(fleet)
        fleet.client.auth(PASSWORD)
        wait_until(lambda: len(children(parent)) == 2, "two processes")

        lines = [psutil.Process(parent.pid).cmdline()]
        lines += [process.cmdline() for process in children(parent).values()]

        assert PASSWORD not in str(lines)
        wait_until(lambda: groups(fleet) == {"gpu0", "gpu1"}, "both groups")
