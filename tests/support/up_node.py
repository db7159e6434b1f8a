"""A node that `workers up` runs, for tests: its record, its parts, its end."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.support import programs
from tests.support.fleet import Fleet
from tests.support.server_process import ServerProcess, wait_until
from tests.support.watching import exit_code, timed
from workers.node.node_record import NodeRecord, Row, read_node
from workers.supervisor.records import read_record

LIMIT_S = 90.0


def environment(fleet: Fleet) -> dict[str, str]:
    """Of a node with a name of its own: several run on one machine while tests do."""
    return {
        **fleet.env,
        **timed(),
        "HEADRACE_HOST": f"node{fleet.simulator.ports[0]}",
        "HEADRACE_RAMP": "10000",
        "HEADRACE_BATCH_SECONDS": "0.5",
        "HEADRACE_FIRST_BATCH_SECONDS": "0.5",
        "HEADRACE_POLL": "0.1",
    }


class UpNode:
    """One `workers up`, started in the fleet's folder."""

    def __init__(
        self, fleet: Fleet, *arguments: str, env: Mapping[str, str] | None = None, **more: str
    ) -> None:
        self.fleet = fleet
        self.arguments = arguments
        self.env = {**environment(fleet), **(env or {}), **more}
        self.process = ServerProcess(
            [sys.executable, "-m", "workers", "up", *arguments],
            log=fleet.folder / f"up-{len(list(fleet.folder.glob('up-*.log')))}.log",
            env=self.env,
        )
        fleet.processes[f"up-{self.process.pid}"] = self.process

    def record(self) -> NodeRecord:
        found = read_node(self.fleet.folder / ".headrace", self.env["HEADRACE_HOST"])
        assert found is not None
        return found

    def row(self, name: str) -> Row:
        """The row of a part; an empty one while this node has not written any."""
        found = read_node(self.fleet.folder / ".headrace", self.env["HEADRACE_HOST"])
        if found is None or found.pid != self.process.pid:
            return Row(name=name)
        return next((row for row in found.rows if row.name == name), Row(name=name))

    def wait_row(self, name: str, *states: str) -> Row:
        """Wait until a part is in one of these states."""

        def holds() -> bool:
            assert self.process.alive(), f"workers up ended: {self.process.tail()}"
            return self.row(name).state in states

        wait_until(holds, f"{name} to be {' or '.join(states)}", LIMIT_S)
        return self.row(name)

    def wait_next_life(self, name: str, pid: int) -> None:
        """Wait until another process of a part runs."""
        wait_until(lambda: self.row(name).pid not in {None, pid}, f"{name} again", LIMIT_S)

    def part(self, name: str) -> psutil.Process:
        """The process of a part, once it has one."""
        wait_until(lambda: self.row(name).pid is not None, f"a process of {name}", LIMIT_S)
        return psutil.Process(self.row(name).pid)

    def server(self, gpu: str) -> int:
        """The first process of a server that this node's `workers serve` has launched."""
        name, pids = f"{gpu}@{self.env['HEADRACE_HOST']}", []

        def launched() -> bool:
            found = read_record(self.fleet.folder / ".headrace", name)
            if found is not None and found.server is not None:
                # The next look may find none: the server has died, and is launched anew.
                pids.append(found.server.pid)
            return bool(pids)

        wait_until(launched, f"a server on {gpu}", LIMIT_S)
        return pids[0]

    def family(self) -> list[psutil.Process]:
        """All processes below this one."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait_end(self) -> int | None:
        """Wait until it has ended, and give its exit code."""
        wait_until(lambda: not self.process.alive(), f"its end ({self.process.tail()})", LIMIT_S)
        self.fleet.processes.pop(f"up-{self.process.pid}")
        return exit_code(self.process)

    def kill(self) -> None:
        """SIGKILL for the one process."""
        self.process.kill()
        self.fleet.processes.pop(f"up-{self.process.pid}")

    def said(self) -> str:
        return self.process.log.read_text()

    def part_log(self, name: str) -> str:
        return Path(self.fleet.folder / ".headrace" / "logs" / name).read_text()


def runs(process: psutil.Process) -> bool:
    """Whether a process has not ended; one that nobody waits for may stay as a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def workers_up(
    fleet: Fleet, env: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    """`workers up` with these arguments, to its end."""
    return programs.run(
        [sys.executable, "-m", "workers", "up", *arguments],
        env=env,
        cwd=fleet.folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def told_json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout)
    return found
