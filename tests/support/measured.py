"""Run a command and tell what it cost: its memory at most, its CPU time.

A process' `ru_maxrss` counts from its fork, when it still was a copy of its parent, and a process
that runs tests may hold a gigabyte. So this file, run as a script, stands between as a small one.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple


class Measured(NamedTuple):
    """What a command cost, and what it said."""

    peak_bytes: int
    cpu_s: float
    out: bytes


def run(
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    stdin: BinaryIO | None = None,
) -> Measured:
    """Run a command to its end, which must be a good one."""
    done = subprocess.run(
        [sys.executable, __file__, *command],
        cwd=cwd,
        env=env,
        stdin=stdin or subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    peak_kib, cpu_s = done.stderr.splitlines()[-1].split()
    return Measured(int(peak_kib) * 1024, float(cpu_s), done.stdout)


def _main(command: list[str]) -> int:
    process = os.posix_spawnp(command[0], command, os.environ)
    _, status, usage = os.wait4(process, 0)
    sys.stderr.write(f"{usage.ru_maxrss} {usage.ru_utime + usage.ru_stime}\n")
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
