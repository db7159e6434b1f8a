"""Die between two durable steps, on request: how tests prove that a kill anywhere is harmless.

`HEADRACE_CRASH_AT=name` kills the process with SIGKILL when it reaches the point `name`;
`name:3` at the third time. Without the variable nothing happens. Points have the form
`part.step`, and `grep -rn 'reached("'` lists them.
"""

import os
import signal
from collections.abc import Callable

VARIABLE = "HEADRACE_CRASH_AT"

_name, _, _count = os.environ.get(VARIABLE, "").partition(":")
_remaining = int(_count or 1)

watcher: Callable[[str], None] | None = None
"""Set by in-process tests, which cannot kill themselves: called at every point, may raise."""


def reached(name: str) -> None:
    """Say that the steps before this point are durable and those after it have not begun."""
    global _remaining  # noqa: PLW0603 - one countdown a process
    if watcher is not None:
        watcher(name)
    if name != _name:
        return
    _remaining -= 1
    if _remaining == 0:
        os.kill(os.getpid(), signal.SIGKILL)
