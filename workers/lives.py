"""Tell one process from a later one that got the same pid, and whether our parent lives."""

import asyncio
import os
from pathlib import Path

import psutil

_GONE = frozenset({"Z", "X", "x"})
"""States of a process that has ended and was not yet waited for."""

PARENT_POLL_S = 1.0

_STATE, _START = 0, 19
"""Fields of /proc/PID/stat after the command's name, which may hold anything."""


def process_start(pid: int) -> str:
    """Say when a process started, in a form that is equal only for the same process.

    Args:
        pid: On this host, as this process sees it.

    Returns:
        Clock ticks since the boot where the system tells them: the time of day, which is corrected
        now and then, would make one process look like two. Empty when no such process runs.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return "" if Path("/proc/self/stat").exists() else _start_by_clock(pid)
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[_STATE] in _GONE else fields[_START]


async def parent_gone(parent: int | None) -> None:
    """Wait until another process than this one is our parent; with None for ever."""
    if parent is None:
        await asyncio.Event().wait()
    while os.getppid() == parent:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(PARENT_POLL_S)


def _start_by_clock(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        return f"{process.create_time():.0f}"
    except psutil.Error:
        return ""
