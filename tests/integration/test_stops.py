"""How long processes end when they are told to: by a terminal, a scheduler, a container, a pipe.

Real processes. Nothing may be lost, half-written or left with a traceback, wherever they were.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.faults.test_group_parent import children, start_all, two_servers
from tests.support.fleet import REPOSITORY, Fleet, write_prompts
from tests.support.redis_server import RedisServer
from tests.support.server_process import ServerProcess, wait_until
from tests.support.skips import skip_cannot_run
from tests.support.watching import QUICK_SINK, exit_code, members, open_now
from workers.engine.stopping import ABORTS_S
from workers.options import DEFAULT_GRACE_S
from workers.timing import Timing

pytestmark = pytest.mark.timeout(400)

RUN = "job"
LIMIT_S = 90.0
STOPS = [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]


def started(
    folder: Path, name: str, *command: str, env: dict[str, str], before: Sequence[str] = ()
) -> ServerProcess:
    """Start one of our commands, behind other words where there are some."""
    words = [*before, sys.executable, "-m", *command]
    return ServerProcess(words, log=folder / f"{name}.log", env=env)


def takes_stops(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True  # it has ended, which the caller finds
    [caught] = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


# --- a signal that reaches a whole family --------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_to_parent_and_children_is_one_stop(
    tmp_path: Path, number: signal.Signals
) -> None:
    # Ctrl-C in a terminal; scancel and systemd, which tell each process of a job or a unit.
    prompts = write_prompts(tmp_path / "job.jsonl", 100)
    with two_servers(tmp_path, latency="fixed:2", cap=4) as fleet:
        fleet.enqueue(prompts)
        parent = start_all(fleet, "--grace", "60")
        fleet.wait(lambda: open_now(fleet, 0) >= 4 and open_now(fleet, 1) >= 4, "full servers")
        family = [*children(parent).values(), psutil.Process(parent.pid)]

        for each in family:
            each.send_signal(number)
        wait_until(lambda: not parent.alive(), "its end", LIMIT_S)

        counts = fleet.counts(RUN)
        assert exit_code(parent) == 128 + number
        assert (counts.in_flight, counts.failed) == (0, 0)
        assert counts.completed == fleet.prompt_requests(), "what was open came to its end"
        assert "Traceback" not in parent.log.read_text()
        del fleet.processes["parent"]


def test_two_signals_to_a_whole_family_end_it_at_once(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 40)
    with two_servers(tmp_path, latency="0.1", cap=4) as fleet:
        fleet.simulator.control("no_answer", match="say ")
        fleet.enqueue(prompts)
        parent = start_all(fleet, "--grace", "1000")
        fleet.wait(lambda: open_now(fleet, 0) >= 4 and open_now(fleet, 1) >= 4, "full servers")
        family = [*children(parent).values(), psutil.Process(parent.pid)]

        for _ in range(2):
            for each in family:
                each.send_signal(signal.SIGINT)
            # Of two equal signals at once the kernel keeps one, so both children hear the first.
            wait_until(
                lambda: parent.log.read_text().count("stopping:") == 2, "all to hear it", LIMIT_S
            )
        wait_until(lambda: not parent.alive(), "its end", LIMIT_S)

        assert exit_code(parent) == 130
        assert (fleet.counts(RUN).in_flight, fleet.counts(RUN).queued) == (0, 40)
        assert "Traceback" not in parent.log.read_text()
        del fleet.processes["parent"]


def test_a_server_that_is_stopped_together_with_its_group_casts_no_suspicion(
    tmp_path: Path,
) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 20)
    with Fleet(tmp_path, latency="0.1", cap=4) as fleet:
        fleet.simulator.control("no_answer", match="say ")
        fleet.enqueue(prompts)
        process = fleet.start_group(0, "--grace", "60")
        fleet.wait(lambda: open_now(fleet) >= 4, "open requests")

        process.send(signal.SIGTERM)
        wait_until(lambda: "stopping:" in process.log.read_text(), "the signal to be heard")
        fleet.simulator.control("die")
        wait_until(lambda: not process.alive(), "its end", LIMIT_S)

        assert set(members(fleet, "deaths")) == {0}
        assert (fleet.counts(RUN).in_flight, fleet.counts(RUN).queued) == (0, 20)
        del fleet.processes["gpu0"]


# --- a terminal that is gone ---------------------------------------------------------------------


def test_a_group_without_its_terminal_drains(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 40)
    with Fleet(tmp_path, latency="fixed:1", cap=4) as fleet:
        fleet.enqueue(prompts)
        process = fleet.start_group()
        fleet.wait(lambda: open_now(fleet) >= 4, "open requests")

        process.send(signal.SIGHUP)
        wait_until(lambda: not process.alive(), "its end", LIMIT_S)

        assert exit_code(process) == 128 + signal.SIGHUP
        assert fleet.counts(RUN).completed == fleet.prompt_requests()
        assert fleet.counts(RUN).in_flight == 0
        del fleet.processes["gpu0"]


def test_under_nohup_the_end_of_the_terminal_is_no_stop(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 300)
    with Fleet(tmp_path, latency="0.2", cap=4) as fleet:
        fleet.enqueue(prompts)
        url = fleet.simulator.urls[0]
        group = ("workers", "start", "--gpu", "0", "--server", url, "--ramp", "1000")
        sink = ("workers", "sink", "--state-dir", "state", *QUICK_SINK)
        for name, command in (("gpu0", group), ("sink", sink)):
            process = started(tmp_path, name, *command, env=fleet.env, before=["nohup"])
            fleet.processes[name] = process
        fleet.wait(lambda: bool(fleet.rows()), "the first stored rows")

        for process in fleet.processes.values():
            process.send(signal.SIGHUP)
        fleet.wait_done(RUN)

        assert all(process.alive() for process in fleet.processes.values())


def test_a_sink_without_its_terminal_stores_what_waits(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 30)
    with Fleet(tmp_path, latency="0", cap=8) as fleet:
        fleet.enqueue(prompts)
        fleet.start_group()
        sink = fleet.start_sink("sink", "--first-batch-seconds", "1000")
        fleet.wait(lambda: fleet.counts(RUN).stream_entries == 30, "results in the stream")
        fleet.wait(lambda: "serving run" in sink.log.read_text(), "the sink")

        sink.send(signal.SIGHUP)
        wait_until(lambda: not sink.alive(), "its end", LIMIT_S)

        assert exit_code(sink) == 129
        assert (fleet.counts(RUN).stream_entries, len(fleet.rows())) == (0, 30)
        del fleet.processes["sink"]


# --- PID 1 ---------------------------------------------------------------------------------------


def as_pid_1() -> list[str]:
    """The words that make what follows PID 1 of its own."""
    words = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    words += ["--pid", "--fork", "--mount-proc", "--kill-child"]
    tried = subprocess.run([*words, "true"], capture_output=True, check=False)
    if not shutil.which("unshare") or tried.returncode:
        skip_cannot_run("no namespaces of processes may be made")
    return words


def first_inside(outside: ServerProcess) -> psutil.Process | None:
    """PID 1 of the namespace, by its number out here."""
    found = psutil.Process(outside.pid).children()
    return found[0] if found else None


@pytest.mark.parametrize("shell", ["", "exec"])
@pytest.mark.cases
def test_b94_a_group_that_is_pid_1_drains(tmp_path: Path, shell: str) -> None:
    # B94. PID 1 gets no signal that it has no handler for, and a shell passes none on.
    unshare = as_pid_1()
    prompts = write_prompts(tmp_path / "job.jsonl", 40)
    with Fleet(tmp_path, latency="fixed:1", cap=4) as fleet:
        fleet.enqueue(prompts)
        command = [sys.executable, "-m", "workers", "start", "--gpu", "0"]
        command += ["--server", fleet.simulator.urls[0], "--ramp", "1000", "--grace", "60"]
        words = command
        if shell:
            line = " ".join(command)
            words = ["sh", "-c", f"exec {line}"]
        outside = ServerProcess([*unshare, *words], log=tmp_path / "pid1.log", env=fleet.env)
        try:
            wait_until(lambda: open_now(fleet) >= 4, f"requests ({outside.tail()})", LIMIT_S)
            inside = first_inside(outside)
            assert inside is not None

            inside.send_signal(signal.SIGTERM)
            wait_until(lambda: not outside.alive(), "its end", LIMIT_S)
        finally:
            outside.stop()

        assert exit_code(outside) == 143
        assert fleet.counts(RUN).completed == fleet.prompt_requests()
        assert fleet.counts(RUN).in_flight == 0


@pytest.mark.parametrize("command", [["workers", "start", "--gpu", "0"], ["workers", "sink"]])
def test_a_shell_that_keeps_signals_to_itself_is_named(
    tmp_path: Path, valkey: RedisServer, command: list[str]
) -> None:
    unshare = as_pid_1()
    line = " ".join([sys.executable, "-m", *command, "; true"])
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HEADRACE_REDIS": valkey.url}

    outside = ServerProcess([*unshare, "sh", "-c", line], log=tmp_path / "sh.log", env=env)
    try:
        said = "write `exec` before the command"
        wait_until(lambda: said in outside.log.read_text(), "the warning", LIMIT_S)
    finally:
        outside.kill()


@pytest.mark.parametrize(
    "command",
    [
        ["workers", "start", "--gpu", "0", "--server", "http://127.0.0.1:9"],
        ["workers", "sink"],
        ["producer", "watch", "no-such-run"],
    ],
)
def test_a_signal_during_the_start_is_heard_as_pid_1(
    tmp_path: Path, valkey: RedisServer, command: list[str]
) -> None:
    unshare = as_pid_1()
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HEADRACE_REDIS": valkey.url}
    outside = started(tmp_path, "early", *command, env=env, before=unshare)
    try:
        wait_until(lambda: bool(first_inside(outside)) or not outside.alive(), "its first process")
        inside = first_inside(outside)
        assert inside is not None
        wait_until(lambda: takes_stops(inside.pid), "a handler", LIMIT_S)

        inside.send_signal(signal.SIGTERM)
        wait_until(lambda: not outside.alive(), "its end", LIMIT_S)
    finally:
        outside.stop()

    assert "Traceback" not in outside.log.read_text()
    assert exit_code(outside) == 143


# --- in time -------------------------------------------------------------------------------------


def test_all_of_a_stop_fits_into_the_half_minute_that_kubernetes_and_slurm_give() -> None:
    redis_s = Timing().redis_limit_s

    # Open requests, their aborts, Redis, RQ's own record, the end of the interpreter.
    assert DEFAULT_GRACE_S + ABORTS_S + redis_s + redis_s / 2 + 0.5 <= 30


def test_a_stop_waits_neither_for_a_dead_server_nor_for_a_dead_redis(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 20)
    with Fleet(tmp_path, latency="0.1", cap=4) as fleet:
        fleet.simulator.control("no_answer", match="say ")
        fleet.enqueue(prompts)
        process = fleet.start_group(0, "--grace", "1")
        fleet.wait(lambda: open_now(fleet) >= 4, "open requests")

        fleet.simulator.control("stall")
        fleet.redis.freeze()
        process.send(signal.SIGTERM)
        try:
            # Calls to a frozen Redis or server time out after 20 s and more, several in a row.
            wait_until(lambda: not process.alive(), "its end", 30)
        finally:
            fleet.redis.thaw()

        assert exit_code(process) == 143
        assert "Traceback" not in process.log.read_text()
        del fleet.processes["gpu0"]


# --- the producer's commands ---------------------------------------------------------------------


def asks_redis(pid: int) -> bool:
    """Whether a process has a connection open."""
    try:
        return bool(psutil.Process(pid).net_connections())
    except psutil.Error:
        return True


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        ("status", *STOPS[0]),
        ("watch", *STOPS[1]),
        ("watch", *STOPS[2]),
        ("peek", *STOPS[1]),
        ("resume", *STOPS[0]),
        ("cancel", *STOPS[2]),
    ],
)
def test_a_command_that_waits_for_a_frozen_redis_ends_in_one_line(
    tmp_path: Path, valkey: RedisServer, command: str, number: signal.Signals, code: int
) -> None:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HEADRACE_REDIS": valkey.tcp_url}
    extra = ["--yes"] if command == "cancel" else []
    valkey.freeze()
    try:
        process = started(tmp_path, command, "producer", command, "some", *extra, env=env)
        wait_until(lambda: asks_redis(process.pid), "its question", LIMIT_S)

        process.send(number)
        wait_until(lambda: not process.alive(), "its end", LIMIT_S)
    finally:
        valkey.thaw()

    said = process.log.read_text()
    assert exit_code(process) == code
    assert said.startswith("producer: ")
    assert said.count("\n") == 1
    assert "goes on" in said
