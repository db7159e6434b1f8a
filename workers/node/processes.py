"""Run child processes, start again what dies, pass signals on.

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
from typing import Literal

from common.errors import HeadraceError
from common.program import config_arguments
from common.stops import on_stop
from workers.node.part_log import PartLog
from workers.stop_request import BY_PARENT, HURRY

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 30.0
STABLE_S = 20.0
"""A child that lived so long has proved that it can run: later ends are faults that pass."""

POLL_S = 0.2
KILL_MARGIN_S = 15.0
FATAL_CODES = frozenset({2, 3, 4, 5})
"""Exit codes that a restart would only repeat."""

PASSING_CODES = frozenset({4, 5})
"""Of those, what may pass by itself: Redis, S3 or a server is away, or another process has what is
to be ours alone, as one of an earlier life that is just ending."""

AGAIN_S = 60.0
"""The longest wait between two tries of a child that ends with one of these."""

Standing = Literal["running", "restarting", "failed", "ended"]

WATCHED_BY = "HEADRACE_WATCHED_BY"
"""Variable with the pid of the process that starts a child again."""


class Child:
    """One process over its lives.

    Args:
        name: For people.
        command: What is run.
        env: Its environment.
        log: Takes what it says; None lets it say that where we do. With a log it is kept apart
            from the terminal too: a Ctrl-C there is for us to pass on.
        passing: Exit codes after which it is tried again now and then, though said only once.
        final: Exit codes that say that it has done what it was for.

    Attributes:
        failed: The exit code that says it cannot run; None while it can.
        ended: The exit code that says it is done; None while it is not.
        lives: How often it was started.
        killed_by: The signal that ended its last life; empty where it ended by itself.
        since: Seconds since the epoch: when it came to stand as it does.
        log: As given; it knows where the present life's lines begin.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: PartLog | None = None,
        passing: frozenset[int] = frozenset(),
        final: frozenset[int] = frozenset(),
    ) -> None:
        self.name = name
        self.failed: int | None = None
        self.ended: int | None = None
        self.lives = 0
        self.killed_by = ""
        self.since = time.time()
        self._command = list(command)
        self._env = {**env, WATCHED_BY: str(os.getpid())}
        self.log = log
        self._passing = passing
        self._final = final
        self._process: subprocess.Popen[bytes] | None = None
        self._passing_said = False
        self._passing_s = FIRST_BACKOFF_S
        self._proven = False
        self._told = self._to_end = False
        self._started_s = 0.0
        self._next_s = 0.0
        self._backoff_s = FIRST_BACKOFF_S

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Of its process, None while there is none."""
        return self._process.pid if self._process is not None and self.alive else None

    @property
    def standing(self) -> Standing:
        """How it is."""
        if self.failed is not None:
            return "failed"
        if self.alive:
            return "running"
        return "ended" if self.ended is not None or self._to_end else "restarting"

    @property
    def told(self) -> bool:
        """Whether a stop was passed on to it."""
        return self._to_end

    def send(self, number: int) -> None:
        """Send a signal."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def tell_to_stop(self) -> None:
        """Pass a stop on."""
        self._to_end = True
        if self.alive:
            self._told = True
        self.send(BY_PARENT)

    def hurry(self) -> None:
        """Tell it to wait for nothing that is open."""
        self._to_end = True
        if self.alive:
            self._told = True
        self.send(HURRY)

    def tell_late(self) -> None:
        """Pass a stop on if it was started after that had been done."""
        if not self._told:
            self.tell_to_stop()

    def look(self, now_s: float) -> None:
        """Start it if it is due; note how it ended if it has."""
        if self.alive or self.failed is not None or self.ended is not None:
            return
        if self._process is not None:
            self._note_end(now_s)
            self.since = time.time()
        elif now_s >= self._next_s:
            self._started_s = now_s
            try:
                self._start()
            except OSError as error:
                # No process, descriptor or room left here: that passes, and the others go on.
                log.warning("%s cannot be started: %s", self.name, error.strerror or error)
                self._back_off(now_s)

    def _start(self) -> None:
        if self.log is None:
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                self._command, env=self._env, stdin=subprocess.DEVNULL
            )
        else:
            with self.log.opened() as file:
                self._process = subprocess.Popen(  # noqa: S603 - our own program
                    self._command, env=self._env, stdin=subprocess.DEVNULL, stdout=file,
                    stderr=file, process_group=0,
                )  # fmt: skip
        self.lives += 1
        self.since = time.time()

    def _note_end(self, now_s: float) -> None:
        code = self._process.returncode if self._process else 0
        self._process = None
        self.killed_by = _signal_name(-code) if code < 0 else ""
        if code in self._final:
            self.ended = code
            return
        stable = now_s - self._started_s > STABLE_S
        self._proven = self._proven or stable
        if code in FATAL_CODES and not self._proven:
            self._note_fatal(code, now_s)
            return
        if stable:
            self._backoff_s = self._passing_s = FIRST_BACKOFF_S
            self._passing_said = False
        log.warning(
            "%s ended with %s: starting it again in %.0f s", self.name, code, self._backoff_s
        )
        self._back_off(now_s)

    def _back_off(self, now_s: float) -> None:
        self._next_s = now_s + self._backoff_s
        self._backoff_s = min(self._backoff_s * 2, LONGEST_BACKOFF_S)

    def _note_fatal(self, code: int, now_s: float) -> None:
        why = "the reason stands above" if self.log is None else self.log.last_line()
        if code not in self._passing:
            self.failed = code
            log.error("%s cannot run (exit %d): %s", self.name, code, why)
            return
        self._next_s = now_s + self._passing_s
        self._passing_s = min(self._passing_s * 2, AGAIN_S)
        if not self._passing_said:
            self._passing_said = True
            log.error(
                "%s cannot run now (exit %d), and is tried again now and then: %s",
                self.name, code, why,
            )  # fmt: skip


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of those without a name
        return f"signal {number}"


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
            if len(stopped_by) == 1:
                child.tell_to_stop()
            else:
                child.hurry()

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


def own_command(name: str, *arguments: str) -> list[str]:
    """Give the command line that calls a command of `workers` in this very environment.

    Args:
        name: Of the command.
        arguments: Its own; what follows a `--` among them is SGLang's.
    """
    # The file that we were given comes first: behind a `--` it would be an argument for SGLang.
    return [sys.executable, "-m", "workers", name, *config_arguments(), *arguments]
