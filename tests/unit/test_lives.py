"""A process is told from a later one with its pid, and from one that has ended."""

import os
import subprocess
import sys

from tests.support.server_process import wait_until
from workers.lives import process_start


def test_a_process_has_one_start_and_another_has_another() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert process_start(os.getpid()) == process_start(os.getpid()) != ""
        assert process_start(other.pid) not in {"", process_start(os.getpid())}
        other.kill()


def test_a_process_that_has_ended_has_none() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as other:
        # Nobody has waited for it yet: it still stands in the table of processes.
        wait_until(lambda: process_start(other.pid) == "", "its end to be seen")
        assert other.returncode is None
    assert process_start(other.pid) == ""
