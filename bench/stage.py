"""What the benchmarks share: a stage of real processes, and the CPU that each of them used."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import psutil

from tests.support.fleet import Fleet


class Row(msgspec.Struct, frozen=True):
    """One figure of the table.

    Attributes:
        what: What was measured, and how.
        figure: The value, with its unit.
        target: What design.md §8 asks, and whether it was met; empty for a peer.
    """

    what: str
    figure: str
    target: str = ""


@contextmanager
def fleet(*, servers: int = 1, **simulator: Any) -> Iterator[Fleet]:
    """Make a fleet in a folder that is removed afterwards."""
    with (
        TemporaryDirectory(prefix="headrace-bench-") as folder,
        Fleet(Path(folder), servers=servers, **simulator) as made,
    ):
        yield made


def cpu_s(*pids: int) -> float:
    """Add up the CPU seconds that these processes have used, user and system."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def wait(condition: Callable[[], bool], limit_s: float) -> None:
    """Wait for a condition, looking every 20 ms."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError("the benchmark did not end in time")
        time.sleep(0.02)


def verdict(*, met: bool, asked: str) -> str:
    """Say what was asked and whether it was met."""
    return f"{asked}: {'met' if met else 'NOT met'}"


def run_python(
    module: str, *args: str, env: dict[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a module of ours in a process of its own, silent."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *args],
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
