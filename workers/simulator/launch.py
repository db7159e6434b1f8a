"""Start a simulator as a process of its own, for tests and benchmarks.

with SimulatorProcess(servers=2, latency="0.05", cap=8) as simulator:
    …  # requests to simulator.urls[0]
    simulator.control("queue_full", count=3)
    simulator.kill()
    assert simulator.account().requests == 7
"""

import http.client
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

from workers.simulator.log import Account, read_log

_READY_S = 120.0
_REPOSITORY = Path(__file__).resolve().parents[2]

start_program: Callable[..., "subprocess.Popen[bytes]"] = subprocess.Popen
"""Starts the simulator's process; tests have a way of their own, which is quicker."""


class SimulatorProcess:
    """A `python -m workers.simulator` that ends with the block, or with its parent.

    Args:
        faults: Armed from the start, as `--fault` takes them.
        log: The simulator's log; None keeps one until the block ends.
        options: Its other options by name: `cap=4`, `latency="0.05"`, `dirty=True`,
            `slow="1:0.5"`. Ports are free ones unless given.

    Attributes:
        urls: Base URL of each server; kept by `restart`.
        ports: Their ports.
        log: The log's path.
        process: The process as it runs now.
    """

    def __init__(
        self, *, faults: tuple[str, ...] = (), log: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        self._folder = Path(tempfile.mkdtemp(prefix="simulator-"))
        self.log = Path(log) if log else self._folder / "requests.jsonl"
        self.urls: list[str] = []
        self.ports: list[int] = []
        self.process: subprocess.Popen[bytes] | None = None
        self._control = ""
        self._arguments = _arguments({"port": 0, **options})
        for fault in faults:
            self._arguments += ["--fault", fault]

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    # --- its life --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it and wait until all servers listen.

        Raises:
            RuntimeError: If it ends instead, with what it said.
            TimeoutError: If it does neither.
        """
        command = [sys.executable, "-m", "workers.simulator", "--json", "--until-eof"]
        command += ["--log", str(self.log), *self._arguments]
        if self.ports:
            command += ["--ports", ",".join(str(port) for port in self.ports)]
        with self._errors.open("ab") as errors:
            self.process = start_program(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=_REPOSITORY,
            )
        ready = msgspec.json.decode(self._first_line())
        self.urls = [server["url"] for server in ready["servers"]]
        self.ports = [server["port"] for server in ready["servers"]]
        self._control = ready["control"]

    def _first_line(self) -> bytes:
        process = self._running()
        assert process.stdout is not None  # noqa: S101 (it was opened with a pipe)
        if not select.select([process.stdout], [], [], _READY_S)[0]:
            raise TimeoutError(f"the simulator is not ready after {_READY_S:.0f} s")
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the simulator did not start: {self.messages()}")
        return line

    def restart(self) -> None:
        """Start it again on the same ports, with the same log, after `kill` or `terminate`."""
        self._reap()
        self.start()

    def kill(self) -> None:
        """End it as a power cut does, and wait for that."""
        self._end(signal.SIGKILL)

    def terminate(self) -> int:
        """End it in good order; give its exit code."""
        self._end(signal.SIGTERM)
        return self.process.returncode if self.process else 0

    def close(self) -> None:
        """End it if it runs, and remove what it left."""
        self._end(signal.SIGKILL)
        self._reap()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait()

    def _reap(self) -> None:
        if self.process is not None:
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    pipe.close()
            self.process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            raise RuntimeError("the simulator does not run; use it in a with statement")
        return self.process

    @property
    def _errors(self) -> Path:
        return self._folder / "stderr.txt"

    def messages(self) -> str:
        """Give what it has written to stderr so far."""
        return self._errors.read_text() if self._errors.exists() else ""

    # --- what it is told and tells ---------------------------------------------------------------

    def control(self, kind: str, index: int | None = None, **fields: Any) -> None:
        """Arm a fault (see `faults`) at the server `index`, or at each of them.

        Raises:
            ValueError: If the simulator does not know such a fault.
        """
        fault = {"kind": kind, "server": index, **fields}
        self._ask("POST", "/_sim/faults", fault)

    def clear(self) -> None:
        """Disarm all faults and revive all servers."""
        self._ask("DELETE", "/_sim/faults")

    def states(self) -> list[dict[str, Any]]:
        """Give the counts of all servers (see `control.state_of`)."""
        states: list[dict[str, Any]] = self._ask("GET", "/_sim/state")
        return states

    def state(self, index: int = 0) -> dict[str, Any]:
        """Give the counts of one server."""
        return self.states()[index]

    def wait_until(
        self, holds: Callable[[list[dict[str, Any]]], bool], *, timeout_s: float = 10.0
    ) -> list[dict[str, Any]]:
        """Wait until something holds of the servers' counts; give them.

        Raises:
            TimeoutError: If it does not in time, with the last counts.
        """
        deadline = time.monotonic() + timeout_s
        while not holds(states := self.states()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not reached after {timeout_s} s: {states}")
            time.sleep(0.005)
        return states

    def account(self) -> Account:
        """Count what the log holds so far."""
        return read_log(self.log)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection(urlsplit(self._control).netloc, timeout=10)
        try:
            connection.request(method, path, None if body is None else msgspec.json.encode(body))
            reply = connection.getresponse()
            content = reply.read()
        finally:
            connection.close()
        if reply.status != http.HTTPStatus.OK:
            raise ValueError(content.decode())
        return msgspec.json.decode(content)


def _arguments(options: dict[str, Any]) -> list[str]:
    arguments: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            arguments.append(flag)
        elif value is not None and value is not False:
            values = value if isinstance(value, list | tuple) else [value]
            for each in values:
                arguments += [flag, str(each)]
    return arguments
