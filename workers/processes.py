"""Run one child process for each worker group, start again what dies, pass signals on."""

import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

from common.errors import HeadraceError

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 30.0
STABLE_S = 60.0
POLL_S = 0.2
KILL_MARGIN_S = 15.0
FATAL_CODES = frozenset({2, 3, 4, 5})
"""Exit codes that a restart would only repeat."""


class Child:
    """One worker group's process over its lives."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._next_s = 0.0
        self._backoff_s = FIRST_BACKOFF_S
        self.failed: int | None = None

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None

    def send(self, number: int) -> None:
        """Pass a signal on."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def look(self, now_s: float) -> None:
        """Start it if it is due; note how it ended if it has."""
        if self.alive or self.failed is not None:
            return
        if self._process is not None:
            self._note_end(now_s)
        elif now_s >= self._next_s:
            self._started_s = now_s
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)  # noqa: S603

    def _note_end(self, now_s: float) -> None:
        code = self._process.returncode if self._process else 0
        self._process = None
        if code in FATAL_CODES:
            self.failed = code
            return
        if now_s - self._started_s > STABLE_S:
            self._backoff_s = FIRST_BACKOFF_S
        log.warning("%s ended with %s: starting it again in %.0f s", self.name, code, self._backoff_s)
        self._next_s = now_s + self._backoff_s
        self._backoff_s = min(self._backoff_s * 2, LONGEST_BACKOFF_S)


def supervise(children: Sequence[Child], *, grace_s: float) -> int:
    """Keep all children running until a signal, then stop them.

    Args:
        children: At least one.
        grace_s: What they give their open requests; they get a margin beyond it before SIGKILL.

    Returns:
        0 after a clean stop.

    Raises:
        HeadraceError: A child ended for a reason that a restart would only repeat.
    """
    stopping = threading.Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        stopping.set()
        for child in children:
            child.send(signal.SIGTERM if number == signal.SIGHUP else number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)
    while not stopping.wait(POLL_S):
        for child in children:
            child.look(time.monotonic())
        if all(child.failed is not None for child in children):
            break
    return _end(children, grace_s, stopped=stopping.is_set())


def _end(children: Sequence[Child], grace_s: float, *, stopped: bool) -> int:
    deadline_s = time.monotonic() + grace_s + KILL_MARGIN_S
    while any(child.alive for child in children) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    for child in children:
        child.send(signal.SIGKILL)
    failed = [child for child in children if child.failed is not None]
    if failed and not stopped:
        error = HeadraceError(
            f"{', '.join(child.name for child in failed)} cannot run; the reason stands above"
        )
        error.exit_code = failed[0].failed or 1
        raise error
    return 0


def own_command(*args: str) -> list[str]:
    """Give the command line that calls `workers` in this very environment."""
    return [sys.executable, "-m", "workers", *args]
