"""`workers serve` as its users call it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import REPOSITORY
from tests.support import programs
from tests.support.server_process import ServerProcess, steady_port, wait_until
from tests.support.supervised import HYBRID, marked
from workers.simulator.environment import simulated_python
from workers.supervisor.records import ServerRecord, read_records

HOST = "node1"
LIMIT_S = 150.0


class Node:
    """A folder in which the command is called, and what it leaves there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = steady_port(2)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(HYBRID))
        self.python = simulated_python(folder / "sim", "0.5.23")
        self.env = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "HEADRACE_HOST": HOST,
            "HEADRACE_SIM_LOAD": "0",
            "HEADRACE_SIM_SPEED": "50",
            "HEADRACE_SIM_LOG": str(folder / "requests.jsonl"),
        }
        self.processes: list[ServerProcess] = []

    def command(self, *flags: str) -> list[str]:
        return [
            *(sys.executable, "-m", "workers", "serve", "--model", "model"),
            *("--python", str(self.python), "--port", str(self.port), *flags),
        ]

    def run(
        self, *flags: str, env: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        return programs.run(
            self.command(*flags),
            cwd=self.folder, env={**self.env, **(env or {})}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip

    def start(self, *flags: str) -> ServerProcess:
        log = self.folder / f"serve-{len(self.processes)}.txt"
        process = ServerProcess(self.command(*flags), log=log, env=self.env)
        self.processes.append(process)
        return process

    def ready(self, servers: int = 1, *, by: int = 0) -> list[ServerRecord]:
        """Wait until so many servers are ready, supervised by another process than `by`."""
        found: list[ServerRecord] = []

        def holds() -> bool:
            assert self.processes[-1].alive(), self.processes[-1].tail()
            found[:] = read_records(self.folder / ".headrace", HOST)
            good = [
                r
                for r in found
                if r.state == "ready" and r.supervisor.alive and r.supervisor.pid != by
            ]
            return len(good) == servers

        wait_until(holds, "ready servers", LIMIT_S)
        return found

    def end(self) -> None:
        for serving in self.processes:
            serving.kill()
        for process in marked(self.folder):
            with suppress(psutil.Error):
                process.kill()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.end()


def first_pids(records: list[ServerRecord]) -> list[int]:
    return [record.server.pid for record in records if record.server is not None]


def test_a_line_is_printed_and_nothing_is_launched(node: Node) -> None:
    said = node.run("--gpu", "2,3", "--tp", "2", "--print-command", "--", "--log-level", "info",
                    env={"HEADRACE_API_KEY": "made up for tests"})  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith(
        f"CUDA_VISIBLE_DEVICES=2,3 {node.python} -m sglang.launch_server"
    )
    assert said.stdout.endswith('--log-level info --api-key "$HEADRACE_API_KEY"\n')
    assert "made up" not in said.stdout + said.stderr
    assert not (node.folder / ".headrace").exists()


FETCHES = """
import os, pathlib
def hf_hub_download(name, file):
    folder = pathlib.Path(os.environ["HF_HOME"], "hub", "models--" + name.replace("/", "--"))
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / file).write_text(CONFIG)
"""


def test_a_hybrid_model_gets_its_strategy_the_first_time_too(node: Node) -> None:
    library = node.python.parents[1] / "lib"
    name = ("--gpu", "0", "--model", "owner/hybrid", "--print-command")
    hub = {"HF_HOME": str(node.folder / "hub"), "HF_HUB_OFFLINE": "1"}

    unknown = node.run(*name, env=hub)
    (library / "huggingface_hub.py").write_text(f"CONFIG = {json.dumps(HYBRID)!r}\n{FETCHES}")
    fetched = node.run(*name, env=hub)
    (library / "huggingface_hub.py").unlink()
    kept = node.run(*name, env=hub)

    assert "no_buffer" not in unknown.stdout
    assert "whether it is a hybrid one is not known" in unknown.stderr
    assert "--mamba-radix-cache-strategy no_buffer" in fetched.stdout
    assert kept.stdout == fetched.stdout


def test_it_ends_with_4_where_a_restart_would_only_repeat_it(node: Node) -> None:
    said = node.run("--gpu", "0", "--", "--no-such-flag")
    assert said.returncode == 4
    last = said.stderr.strip().splitlines()[-1]
    assert "unrecognized arguments: --no-such-flag" in last
    assert "sglang_logs/sglang_gpu0.log" in last
    said = node.run("--gpu", "0", "--strategy", "no_buffer", "--", "--page-size", "64")
    assert said.returncode == 2
    assert "no_buffer works on single tokens" in said.stderr


def test_two_gpus_are_two_servers_that_outlive_a_kill_and_end_with_a_stop(node: Node) -> None:
    serving = node.start("--gpu", "0-1")
    records = node.ready(2)
    assert [record.name for record in records] == ["gpu0@node1", "gpu1@node1"]
    assert [record.port for record in records] == [node.port, node.port + 1]
    before = first_pids(records)

    serving.kill()
    wait_until(
        lambda: not any(record.supervisor.alive for record in records),
        "the end of the supervisors", LIMIT_S,
    )  # fmt: skip
    assert all(psutil.pid_exists(pid) for pid in before)

    serving = node.start("--gpu", "0-1")
    records = node.ready(2)
    assert first_pids(records) == before
    second = node.run("--gpu", "1")
    assert second.returncode == 5
    assert (
        f"gpu1@node1 has a supervisor already (pid {records[1].supervisor.pid})" in second.stderr
    )

    serving.send(signal.SIGINT)
    wait_until(lambda: not serving.alive(), "its end", LIMIT_S)
    assert {record.state for record in read_records(node.folder / ".headrace", HOST)} == {
        "stopped"
    }
    assert marked(node.folder) == []


def test_a_server_whose_process_was_never_written_down_is_found_and_ended(node: Node) -> None:
    node.env["HEADRACE_CRASH_AT"] = "server.launched"
    killed = node.run("--gpu", "0")
    assert killed.returncode == -signal.SIGKILL
    [record] = read_records(node.folder / ".headrace", HOST)
    assert record.server is None
    wait_until(
        lambda: any("launch_server" in " ".join(p.cmdline()) for p in marked(node.folder)), "it"
    )

    del node.env["HEADRACE_CRASH_AT"]
    node.start("--gpu", "0")
    [record] = node.ready()
    servers = [p.pid for p in marked(node.folder) if "sglang.launch_server" in p.cmdline()]
    assert servers == first_pids([record])
