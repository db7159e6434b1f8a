"""Processes that come from the nursery, as their round sees them."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

START_S = 120.0
END_S = 60.0


class Born:
    """One process, as `tests.support.server_process.ServerProcess` is one."""

    def __init__(self, nursery: "Nursery", pid: int, log: Path) -> None:
        self._nursery = nursery
        self.pid = pid
        self.log = log

    @property
    def exit_code(self) -> int | None:
        """How it ended, None while it lives; negative after a signal."""
        return self._nursery.code_of(self.pid)

    def alive(self) -> bool:
        return self.exit_code is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal; to one that has ended nothing, for its number may be another's."""
        if self.alive():
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.send(signal.SIGKILL)
        limit_s = time.monotonic() + END_S
        while self.alive():
            if time.monotonic() > limit_s:
                raise TimeoutError(f"process {self.pid} does not end")
            time.sleep(0.001)

    def tail(self) -> str:
        """The end of its output."""
        return self.log.read_text(errors="replace")[-600:].strip()


class Nursery:
    """Starts our programs by forking a process that has imported them."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**env},
            cwd=Path(__file__).resolve().parents[2],
        )
        assert self._process.stdin
        assert self._process.stdout
        self._orders = self._process.stdin
        self._answers = self._process.stdout.fileno()
        self._rest = b""
        self._born: list[int] = []
        self._codes: dict[int, int] = {}

    def start(
        self, program: str, arguments: Sequence[str], *, env: Mapping[str, str], log: Path
    ) -> Born:
        """Start `producer` or `workers`."""
        self._order(
            {"program": program, "arguments": [*arguments], "env": {**env}, "log": str(log)}
        )
        limit_s = time.monotonic() + START_S
        while not self._born:
            self._hear(0.05)
            if time.monotonic() > limit_s:
                raise TimeoutError("the nursery does not answer")
        return Born(self, self._born.pop(), log)

    def code_of(self, pid: int) -> int | None:
        self._hear(0.0)
        return self._codes.get(pid)

    def close(self) -> None:
        """End it, and with it whatever of it still lives."""
        self._orders.close()
        self._process.kill()
        self._process.wait(END_S)
        if self._process.stdout:
            self._process.stdout.close()

    def _order(self, what: dict[str, object]) -> None:
        self._orders.write(msgspec.json.encode(what) + b"\n")
        self._orders.flush()

    def _hear(self, wait_s: float) -> None:
        while select.select([self._answers], [], [], wait_s)[0]:
            data = os.read(self._answers, 1 << 16)
            if not data:
                raise RuntimeError(f"the nursery ended: {self._process.wait()}")
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                told = msgspec.json.decode(line)
                if "code" not in told:
                    # A number that comes again was buried before: its old end is forgotten.
                    self._codes.pop(told["pid"], None)
                    self._born.append(told["pid"])
                else:
                    self._codes[told["pid"]] = told["code"]
                    self._order({"bury": told["pid"]})
            wait_s = 0.0
