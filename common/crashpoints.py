"""Die between two durable steps, on request: how tests prove that a kill anywhere is harmless.

`HEADRACE_CRASH_AT=name` kills the process with SIGKILL when it reaches the point `name`;
`name:3` at the third time. `HEADRACE_CRASH_TRACE=file` keeps the name of the last point that the
process has passed in that file, so that whoever kills it at some other moment can say where it
was. Without the variables nothing happens. Points have the form `part.step`, and
`grep -rn 'reached("'` lists them.
"""

import mmap
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

VARIABLE = "HEADRACE_CRASH_AT"
TRACE_VARIABLE = "HEADRACE_CRASH_TRACE"
TRACE_BYTES = 64

_name = ""
_remaining = 1
_trace: mmap.mmap | None = None


def _open_trace(path: str) -> mmap.mmap | None:
    """Map the file of the last point: what stands there outlives the process, however it dies."""
    if not path:
        return None
    with Path(path).open("w+b") as file:
        file.truncate(TRACE_BYTES)
        return mmap.mmap(file.fileno(), TRACE_BYTES)


def arm(environment: Mapping[str, str]) -> None:
    """Read the variables; done at import, and again by a forked process that has its own."""
    global _name, _remaining, _trace  # noqa: PLW0603 - one countdown and one trace a process
    _name, _, count = environment.get(VARIABLE, "").partition(":")
    _remaining = int(count or 1)
    _trace = _open_trace(environment.get(TRACE_VARIABLE, ""))


arm(os.environ)

watcher: Callable[[str], None] | None = None
"""Set by in-process tests, which cannot kill themselves: called at every point, may raise."""


def reached(name: str) -> None:
    """Say that the steps before this point are durable and those after it have not begun."""
    global _remaining  # noqa: PLW0603 - one countdown a process
    if _trace is not None:
        _trace[:] = name.encode().ljust(TRACE_BYTES)[:TRACE_BYTES]
    if watcher is not None:
        watcher(name)
    if name != _name:
        return
    _remaining -= 1
    if _remaining == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def last_point(path: Path) -> str:
    """Read the last point that a process with this trace has passed; empty before the first."""
    return path.read_bytes().decode().strip(" \0") if path.exists() else ""
