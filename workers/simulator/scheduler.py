"""The scheduler process of a simulated server: it only lives, so that a test can end or stop it.

The real server's scheduler is a child process, named `sglang::scheduler`. This one does nothing,
and its state is the server's: killed, the server ends as the real one does; stopped, it hangs.
"""

import subprocess
import sys

import psutil

# Signals of a terminal or a unit reach the whole group; the server itself ends this one.
_PROGRAM = (
    "import signal, sys\n"
    "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):\n"
    "    signal.signal(number, signal.SIG_IGN)\n"
    "sys.stdin.read()\n"
)


class Scheduler:
    """The child; it ends when its parent does, however that ends."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own one line
            [sys.executable, "-I", "-S", "-c", _PROGRAM, "sglang::scheduler"],
            stdin=subprocess.PIPE,
        )

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def ended(self) -> int | None:
        """Give its exit code, None while it lives."""
        return self._process.poll()

    def stopped(self) -> bool:
        """Whether it stands still, by SIGSTOP or a debugger."""
        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        except psutil.NoSuchProcess:
            return False

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
