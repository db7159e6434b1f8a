"""The `workers sink` command as a user runs it: another process, killed where a test says."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from common.crashpoints import VARIABLE
from tests.support import programs

LIMIT_S = 150.0


class SinkProcess:
    """One sink process on a run; its log is in `log`.

    Args:
        url: Of Redis.
        folder: Its working directory.
        arguments: After `workers sink`.
        crash_at: Crash point, `name` or `name:n`.
        env: More of its environment.
        before: Command that runs it, such as `unshare`.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        *arguments: str,
        crash_at: str = "",
        env: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RQ_")}
        self.log = folder / f"sink-{crash_at or 'log'}.txt"
        with self.log.open("wb") as log:
            self.process = programs.start(
                [
                    *before,
                    *(sys.executable, "-m", "workers.cli", "sink", "--poll", "0.05"),
                    *arguments,
                ],
                cwd=folder,
                env={
                    **kept,
                    "PYTHONPATH": str(Path(__file__).parents[2]),
                    "HEADRACE_REDIS": url,
                    VARIABLE: crash_at,
                    **(env or {}),
                },
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Wait for its end: its exit code, negative after a signal."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"it goes on: {self.text()[-2000:]}") from error

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
