"""The `producer` command as a user runs it: another process, its exit code, its two outputs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import programs

LIMIT_S = 90.0


class Ended(NamedTuple):
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def told(self) -> dict[str, Any]:
        """The one object of `--json`."""
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """What the command gets: nothing of the settings of the person who runs the tests."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HEADRACE_", "RQ_"))
    }
    root = str(Path(__file__).parents[2])
    return {**kept, "PYTHONPATH": root, **(extra or {})}


@contextmanager
def running(
    *arguments: str | Path, cwd: Path, env: Mapping[str, str] | None = None
) -> "Iterator[subprocess.Popen[bytes]]":
    """Start it, and kill it at the end if it has not ended."""
    process = programs.start(
        [sys.executable, "-m", "producer", *map(str, arguments)],
        cwd=cwd,
        env=environment(env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def producer(
    *arguments: str | Path,
    cwd: Path,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
) -> Ended:
    """Run it to its end."""
    with running(*arguments, cwd=cwd, env=env) as process:
        out, err = process.communicate(stdin, timeout=LIMIT_S)
    return Ended(process.returncode, out.decode(), err.decode())
