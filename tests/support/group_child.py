"""A worker group as `workers start` runs it, in a process that is there at once.

It is forked from a process that has imported everything and does nothing else, so that a test may
start dozens. It is a process all the same: its own loop, signals, threads and sockets, and SIGKILL
ends it at a crash point.
"""

import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.programs import die_with_parent
from tests.support.server_process import wait_until

LIMIT_S = 90.0

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["workers.cli", "workers.commands.start", "common.crashpoints"])


class GroupChild:
    """One worker group; it is killed at the end of the block if it lives.

    Args:
        url: Of Redis.
        server: Of its SGLang server.
        log: What it says goes there.
        crash_at: Crash point, `name` or `name:n`.
        arguments: More of `workers start`.
        env: Of its environment.
    """

    def __init__(
        self,
        url: str,
        server: str,
        log: Path,
        *arguments: str,
        crash_at: str = "",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        command = ["start", "--gpu", "0", "--server", server, "--ramp", "10000", *arguments]
        changed = {"HEADRACE_REDIS": url, **(env or {})}
        self.process = _processes.Process(
            target=_live, args=(command, changed, str(log), crash_at), daemon=True
        )
        self.process.start()

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Wait for its end: its exit code, negative after a signal."""
        wait_until(lambda: not self.process.is_alive(), f"its end: {self.tail()}", limit_s)
        code = self.process.exitcode
        assert code is not None
        return code

    def terminate(self) -> None:
        """SIGTERM, without waiting."""
        self.process.terminate()

    def tail(self) -> str:
        """The end of what it has said."""
        return self.log.read_text(errors="replace")[-1500:] if self.log.exists() else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(LIMIT_S)
        self.process.close()


def _live(command: list[str], env: dict[str, str], log: str, crash_at: str) -> None:
    # A killed pytest ends the process that this one is forked from, and that one this.
    die_with_parent()
    from common import crashpoints
    from workers import cli

    with Path(log).open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update({**env, crashpoints.VARIABLE: crash_at})
    crashpoints.arm(os.environ)
    sys.argv = ["workers", *command]
    cli.main()
