"""The most memory of each command over a run of many rows, and over one of half of them.

`python -m bench.memory [ROWS]` prints the table; the default is 2 * 10^6 beside 10^6: what sorts
may hold in memory (64 MiB each) is full by then, and only what is kept of every row still grows.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from bench.stage import Row, verdict
from common.store import open_store
from tests.support import measured
from tests.support.finished_run import RUN, FinishedRun
from tests.support.producer_cli import environment
from tests.support.redis_server import RedisServer

ROWS = 2_000_000
SHARD_ROWS = 20_000
FAILED_SHARE = 100
"""One in so many failed, so that there is something to retry and to cancel."""

MOST_A_ROW = 30
"""Bytes for each row more, as design.md §8 asks of enqueue."""

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("verify", RUN, "--output", "OUT"),
    ("export", RUN, "--output", "OUT", "--to", "rows.jsonl"),
    ("resume", RUN, "--output", "OUT"),
    ("status", RUN, "--json"),
    ("retry", RUN),
    ("cancel", RUN, "--yes"),
    ("forget", RUN, "--yes", "--lose-results"),
)


def memory(*, rows: int = ROWS) -> list[Row]:
    """Measure every command that goes through a whole run, in the order of a run's life."""
    small, large = _peaks(rows // 2), _peaks(rows)
    return [
        Row(
            f"most memory of {name} over {rows // 2:,} and {rows:,} rows",
            f"{small[name] / 1e6:.0f} and {large[name] / 1e6:.0f} MB",
            verdict(
                met=large[name] - small[name] <= MOST_A_ROW * (rows - rows // 2),
                asked=f"≤ {MOST_A_ROW} B a row beyond",
            ),
        )
        for name in small
    ]


def _peaks(rows: int) -> dict[str, int]:
    """Run the commands over one run: peak in bytes by command."""
    with (
        tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder,
        RedisServer("valkey") as server,
    ):
        out = Path(folder) / "out"
        FinishedRun(
            open_store(str(out)),
            prompts=rows,
            batch=SHARD_ROWS,
            fails=range(0, rows, FAILED_SHARE),
        )
        found = {}
        for command in COMMANDS:
            arguments = [str(out) if word == "OUT" else word for word in command]
            found[command[0]] = _peak_bytes(arguments, Path(folder), server.url)
        return found


def _peak_bytes(arguments: list[str], folder: Path, url: str) -> int:
    done = subprocess.run(
        [sys.executable, measured.__file__, sys.executable, "-m", "producer", *arguments],
        cwd=folder,
        env=environment({"HEADRACE_REDIS": url}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    *said, cost = done.stderr.splitlines()
    # 1: not all is done, as it is after a retry.
    if done.returncode not in {0, 1}:
        sys.exit(f"{arguments[0]} ended with {done.returncode}: {said[-1:]}")
    return int(cost.split()[0]) * 1024


if __name__ == "__main__":
    for line in memory(rows=int(sys.argv[1]) if sys.argv[1:] else ROWS):
        print(f"{line.what:60} {line.figure:>20}   {line.target}")
