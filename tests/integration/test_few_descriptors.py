"""Few files may be open: what reads and writes many files does with few at a time."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from common.store import open_store
from tests.support.finished_run import RUN, FinishedRun
from tests.support.producer_cli import environment
from tests.support.redis_server import RedisServer

FILES = 150
FEW = 64
"""Fewer than any system gives, and fewer than there are files."""


def call(
    folder: Path, *arguments: str, soft: int = FEW, hard: int = FEW
) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [sys.executable, "-m", "producer", *arguments],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.mark.timeout(400)
def test_many_files_are_enqueued_verified_and_exported(
    tmp_path: Path, valkey: RedisServer
) -> None:
    run = FinishedRun(open_store(str(tmp_path / "done")), prompts=FILES, batch=1)
    names = [f"f{number:03}.jsonl" for number in range(FILES)]
    for number, name in enumerate(names):
        (tmp_path / name).write_text(json.dumps({"id": number, "prompt": "x"}) + "\n")
    redis = ("--redis", valkey.url)

    enqueued = call(
        tmp_path, "enqueue", *names, "--run", "many", "--output", "out", "--max-tokens", "5",
        *redis, "--json",
    )  # fmt: skip
    verified = call(tmp_path, "verify", RUN, "--output", run.store.url)
    exported = call(tmp_path, "export", RUN, "--output", run.store.url, "--to", "all.jsonl")

    assert enqueued.returncode == 0, enqueued.stderr
    assert json.loads(enqueued.stdout)["enqueued"] == FILES
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert exported.returncode == 0, exported.stderr
    assert len((tmp_path / "all.jsonl").read_text().splitlines()) == FILES


def test_none_left_is_a_line_and_not_a_traceback() -> None:
    script = (
        "import os, sys\n"
        "from common.last_words import run_program\n"
        "def call():\n"
        "    while True: os.open('/dev/null', os.O_RDONLY)\n"
        "sys.exit(run_program('producer', call))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, FEW)),
    )

    assert done.returncode == 4
    assert done.stderr.startswith("producer: ")
    assert "raise the limit, as in `ulimit -n 4096`" in done.stderr


def test_a_program_takes_as_many_as_it_may() -> None:
    script = (
        "import resource, sys\n"
        "from common.last_words import run_program\n"
        "print(run_program('producer', lambda: None))\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    most = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 4_096)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment(), "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, most)),
    )

    assert done.stdout.split() == ["0", str(most)]
