"""Run one child process for each worker group, start again what dies, pass signals on.

When this process itself is killed, its children see that their parent is another, and drain:
nobody would start them again.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from common.errors import HeadraceError
from common.program import config_arguments
from common.stops import on_stop
from workers.node.stop_request import BY_PARENT

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 30.0
STABLE_S = 20.0
"""A child that lived so long has proved that it can run: later ends are faults that pass."""

POLL_S = 0.2
KILL_MARGIN_S = 15.0
FATAL_CODES = frozenset({2, 3, 4, 5})
"""Exit codes that a restart would only repeat."""

WATCHED_BY = "HEADRACE_WATCHED_BY"
"""Variable with the pid of the process that starts a child again."""


class Child:
    """One worker group's process over its lives.

    Attributes:
        failed: The exit code that says it cannot run; None while it can.
    """

    def __init__(self, name: str, command: Sequence[str], *, env: Mapping[str, str]) -> None:
        self.name = name
        self.failed: int | None = None
        self._command = list(command)
        self._env = {**env, WATCHED_BY: str(os.getpid())}
        self._process: subprocess.Popen[bytes] | None = None
        self._proven = False
        self._told = False
        self._started_s = 0.0
        self._next_s = 0.0
        self._backoff_s = FIRST_BACKOFF_S

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None

    def send(self, number: int) -> None:
        """Send a signal."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def tell_to_stop(self) -> None:
        """Pass a stop on."""
        if self.alive:
            self._told = True
        self.send(BY_PARENT)

    def tell_late(self) -> None:
        """Pass a stop on if it was started after that had been done."""
        if not self._told:
            self.tell_to_stop()

    def look(self, now_s: float) -> None:
        """Start it if it is due; note how it ended if it has."""
        if self.alive or self.failed is not None:
            return
        if self._process is not None:
            self._note_end(now_s)
        elif now_s >= self._next_s:
            self._started_s = now_s
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                self._command, env=self._env, stdin=subprocess.DEVNULL
            )

    def _note_end(self, now_s: float) -> None:
        code = self._process.returncode if self._process else 0
        self._process = None
        stable = now_s - self._started_s > STABLE_S
        self._proven = self._proven or stable
        if code in FATAL_CODES and not self._proven:
            self.failed = code
            log.error("%s cannot run (exit %d); the reason stands above", self.name, code)
            return
        if stable:
            self._backoff_s = FIRST_BACKOFF_S
        log.warning(
            "%s ended with %s: starting it again in %.0f s", self.name, code, self._backoff_s
        )
        self._next_s = now_s + self._backoff_s
        self._backoff_s = min(self._backoff_s * 2, LONGEST_BACKOFF_S)


def supervise(children: Sequence[Child], *, grace_s: float) -> int:
    """Keep all children running until a signal, then stop them.

    Args:
        children: At least one.
        grace_s: What they give their open requests; they get a margin beyond it before SIGKILL.

    Returns:
        128 and the signal's number after a clean stop.

    Raises:
        HeadraceError: All children ended for a reason that a restart would only repeat.
    """
    stopped_by: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        stopped_by.append(number)
        for child in children:
            child.tell_to_stop()

    on_stop(on_signal)
    while not stopped_by:
        for child in children:
            child.look(time.monotonic())
        if all(child.failed is not None for child in children):
            raise _cannot_run(children)
        time.sleep(POLL_S)
    _end(children, grace_s)
    return 128 + stopped_by[0]


def _end(children: Sequence[Child], grace_s: float) -> None:
    for child in children:
        child.tell_late()
    deadline_s = time.monotonic() + grace_s + KILL_MARGIN_S
    while any(child.alive for child in children) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    for child in children:
        child.send(signal.SIGKILL)


def _cannot_run(children: Sequence[Child]) -> HeadraceError:
    names = ", ".join(child.name for child in children)
    error = HeadraceError(f"{names} cannot run; the reason stands above")
    error.exit_code = max(child.failed or 1 for child in children)
    return error


def watched_by() -> int | None:
    """Give the pid of the process that starts this one again; None when nobody does."""
    text = os.environ.get(WATCHED_BY, "")
    return int(text) if text.isdecimal() else None


def own_command(*args: str) -> list[str]:
    """Give the command line that calls `workers` in this very environment, by the same file."""
    return [sys.executable, "-m", "workers", *args, *config_arguments()]
