"""A process dies at the point that it was told, and leaves the last point that it passed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.crashpoints import TRACE_VARIABLE, VARIABLE, last_point
from tests.conftest import REPOSITORY

A, B = "sink.read", "sink.intent"
STEPS = f"from common.crashpoints import reached\nfor name in {[A, B, A, B]}: reached(name)"


def run(**env: str) -> int:
    """Pass the points A, B, A, B in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return subprocess.run(
        [sys.executable, "-c", STEPS], env={**kept, **env}, cwd=REPOSITORY, check=False, timeout=60
    ).returncode


@pytest.mark.parametrize(("at", "last"), [(A, A), (B, B), (f"{A}:2", A)])
def test_a_process_dies_at_the_named_point(tmp_path: Path, at: str, last: str) -> None:
    trace = tmp_path / "trace"

    assert run(**{VARIABLE: at, TRACE_VARIABLE: str(trace)}) == -signal.SIGKILL
    assert last_point(trace) == last


def test_without_a_point_it_passes_all_and_the_trace_tells_the_last(tmp_path: Path) -> None:
    assert run() == 0
    assert run(**{VARIABLE: f"{A}:3", TRACE_VARIABLE: str(tmp_path / "trace")}) == 0
    assert last_point(tmp_path / "trace") == B
    assert last_point(tmp_path / "none") == ""
