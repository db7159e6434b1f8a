"""`producer enqueue` of many short prompts: rate, memory, and the same again when all is there."""

import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.stage import Row, verdict
from tests.support.fleet import write_prompts
from tests.support.redis_server import RedisServer

SETTINGS = {"hash-max-listpack-value": "65536"}


def enqueue(*, prompts: int = 1_000_000) -> list[Row]:
    """Enqueue short prompts twice, by the real command, against a real Valkey."""
    with (
        TemporaryDirectory(prefix="headrace-bench-") as folder,
        RedisServer("valkey", appendonly=True, settings=SETTINGS) as server,
    ):
        path = write_prompts(Path(folder) / "many.jsonl", prompts)
        first_s, first_mb = _call(path, server)
        again_s, _ = _call(path, server)
    return [
        Row(
            f"enqueue of {prompts:,} short prompts, checks included, one process",
            f"{prompts / first_s:,.0f} prompts/s, {first_mb:.0f} MB at most",
            verdict(met=prompts / first_s >= 40_000, asked="≥ 40,000/s")
            + "; "
            + verdict(met=first_mb <= 300, asked="≤ 300 MB"),
        ),
        # All is still queued here, so each job is checked and sent again; when all is done nothing
        # is sent (case B55: `HEADRACE_CASES_ROWS=1000000 make cases ARGS="-k b55"`).
        Row("the same again, all still queued", f"{again_s:.1f} s"),
    ]


def _call(path: Path, server: RedisServer) -> tuple[float, float]:
    """Run the command; seconds and the peak of its memory in MB."""
    arguments = ["enqueue", str(path), "--output", str(path.parent / "out"), "--max-tokens", "64"]
    began_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "producer", *arguments, "--redis", server.url],
        stderr=subprocess.DEVNULL,
    )
    usage = _wait4(process)
    if process.returncode:
        sys.exit(f"enqueue ended with {process.returncode}")
    return time.monotonic() - began_s, usage / 1024


def _wait4(process: "subprocess.Popen[bytes]") -> int:
    import os  # noqa: PLC0415

    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss
