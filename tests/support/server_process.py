"""Server processes that tests start: ready when they answer, dead when a test says so."""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.support import programs

START_LIMIT_S = 120.0
STOP_LIMIT_S = 15.0
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.03


def free_port() -> int:
    """A loopback port that nothing listens on; somebody may still take it before its use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_steady = itertools.count(os.getpid() * 16)


def steady_port(count: int = 1) -> int:
    """A loopback port, and the next ones, that the system gives to nobody by itself.

    One from `free_port` may be some connection's own before it is used.
    """
    while True:
        first = 10_000 + next(_steady) * count % 10_000
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def wait_until(
    condition: Callable[[], bool],
    what: str,
    limit_s: float = START_LIMIT_S,
    *,
    every_s: float | None = None,
) -> None:
    """Return as soon as the condition holds; name it when it does not.

    It looks often at first, and less so later: where tests run side by side, looks of one are time
    that another one waits for.
    """
    pause_s = every_s or SHORTEST_PAUSE_S
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit_s:.0f} s: {what}")
        time.sleep(pause_s)
        if every_s is None:
            pause_s = min(pause_s * 1.1, LONGEST_PAUSE_S)


class ServerProcess:
    """One process; its output goes to `log`, whose end is told when it does not come up.

    As a context manager it is killed at the end of the block if it lives.
    """

    def __init__(
        self, command: Sequence[str | Path], *, log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = programs.start(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=log.parent,
                dies_with_us=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended, None while it lives; negative after a signal."""
        return self._process.poll()

    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, answers: Callable[[], bool]) -> bool:
        """Wait until it answers: True; or until it has ended by itself: False."""
        wait_until(lambda: answers() or not self.alive(), f"a server that answers ({self.tail()})")
        return self.alive()

    def wait(self, limit_s: float = START_LIMIT_S) -> int:
        """Wait until it ends by itself: its exit code, negative after a signal."""
        wait_until(lambda: not self.alive(), f"its end ({self.tail()})", limit_s)
        return self._process.returncode

    def tail(self) -> str:
        """The end of its output."""
        return self.log.read_text(errors="replace")[-600:].strip()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL when it does not listen."""
        if not self.alive():
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
