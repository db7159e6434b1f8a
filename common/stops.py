"""Signals that ask a process to stop: which they are, and how a command ends on them.

SIGTERM, SIGINT (Ctrl-C) and SIGHUP (its terminal is gone); the last one is left alone where it was
ignored from the start, as `nohup` and `disown -h` do. SIGQUIT keeps its meaning, the end at once,
which costs what SIGKILL costs. Handlers are set before anything slow is imported: to PID 1 of a
container the kernel gives no signal that has no handler, so one that came too early would be lost.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

LEAVE_S = 10
"""What a command may take to clear up after a stop: a call to S3 or Redis may hang."""

log = logging.getLogger(__name__)

_SHELLS = {"sh", "dash", "bash", "ash", "busybox", "zsh"}
_SHOW_CURSOR = b"\x1b[?25h"
_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


class Stopped(SystemExit):
    """A signal has ended the command.

    Not an `Exception`, so that nothing takes it for an error of its own; files and bars of the
    command are cleared up on its way.

    Attributes:
        number: The signal's.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    @property
    def word(self) -> str:
        """What has happened, for people."""
        return _WORDS.get(signal.Signals(self.number), "stopped")


def stop_signals() -> list[signal.Signals]:
    """List the signals that ask this process to stop."""
    wanted = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        wanted.append(signal.SIGHUP)
    return wanted


def warn_of_shell() -> None:
    """Warn where a shell keeps from us what asks to stop.

    As PID 1 of a container it has no handler, so that the kernel gives it no signal to pass on.
    """
    try:
        shell = Path("/proc/1/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return
    if os.getppid() == 1 and shell in _SHELLS:
        log.warning(
            "PID 1 of this container is %s, which passes no SIGTERM on, so that a stop kills: "
            "write `exec` before the command, or give the container an init (`docker run --init`)",
            shell,
        )


def on_stop(handler: Callable[[int, FrameType | None], None]) -> None:
    """Let a handler take them all."""
    for number in stop_signals():
        signal.signal(number, handler)


def end_on_stop() -> None:
    """End this command on the first of them by `Stopped`, on a second one at once.

    Clearing up gets `LEAVE_S`: a thread may wait for an answer that does not come.
    """
    told: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if told:
            _end_at_once(told[0])
        told.append(number)
        signal.signal(signal.SIGALRM, lambda _number, _frame: _end_at_once(told[0]))
        signal.alarm(LEAVE_S)
        raise Stopped(number)

    on_stop(on_signal)


def _end_at_once(number: int) -> None:
    # A bar or a live view may have hidden it, and nothing else is cleared up any more.
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), _SHOW_CURSOR)
    os._exit(128 + number)
