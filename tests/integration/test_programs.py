"""A program that is forked is what one started anew is: arguments, streams, end, parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import programs
from tests.support.producer_cli import environment
from tests.support.server_process import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks them")

NOWHERE = {"HEADRACE_REDIS": "redis://127.0.0.1:1/0"}


@pytest.fixture(params=["forked", "anew"])
def forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "anew":
        monkeypatch.setenv(programs.ALWAYS_EXEC, "1")
    return bool(request.param == "forked")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "producer", *arguments]


def both(monkeypatch: pytest.MonkeyPatch, *arguments: str, **options: Any) -> list[object]:
    """What a command comes to, forked and started anew."""
    ends: list[object] = []
    for anew in ("", "1"):
        monkeypatch.setenv(programs.ALWAYS_EXEC, anew)
        done = programs.run(command(*arguments), capture_output=True, **options)
        ends.append((done.returncode, done.stdout, done.stderr))
    return ends


def test_it_ends_and_says_as_the_other_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "headrace.toml").write_text('redis = "redis://127.0.0.1:1/3"\n')

    for arguments in (["--help"], ["stat"], ["config"], ["status", "none"], []):
        forked, anew = both(monkeypatch, *arguments, cwd=tmp_path, env=environment())
        assert forked == anew
    forked, anew = both(monkeypatch, "runs", cwd=tmp_path, env=environment(NOWHERE))
    assert forked == anew


def test_it_reads_its_own_input_and_is_our_child(forked: bool, tmp_path: Path) -> None:  # noqa: FBT001
    with programs.start(
        command("enqueue", "-", "--run", "r", "--output", "out", "--dry-run", "--max-tokens", "4"),
        cwd=tmp_path,
        env=environment(NOWHERE),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert psutil.Process(process.pid).ppid() == os.getpid()
        named = " ".join(psutil.Process(process.pid).cmdline())
        out, err = process.communicate(b'{"id":"a","prompt":"say a"}\n', timeout=60)

    assert ("nursery" in named) == forked
    assert process.returncode == 0, err
    assert b"1 prompt" in out + err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_ends_it(forked: bool, tmp_path: Path, number: signal.Signals) -> None:  # noqa: FBT001
    with programs.start(
        command("enqueue", "-", "--run", "r", "--output", "out", "--max-tokens", "4"),
        cwd=tmp_path,
        env=environment(NOWHERE),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        # It has a session of its own once it is itself.
        wait_until(lambda: os.getsid(process.pid) == process.pid, f"itself, {forked}")
        process.send_signal(number)
        code = process.wait(60)

    assert code in {-number, 128 + number}


def test_leases_are_read_at_import_so_each_length_has_a_process_that_forks() -> None:
    usual, short = environment(), environment({"HEADRACE_LEASES": '{"slots_ms": 3000}'})

    nurseries = {id(programs._Nursery.of(each)) for each in (usual, short, usual, short)}

    assert len(nurseries) == 2
    assert all(programs._Nursery.of(each).knows(each) for each in (usual, short))


def test_what_only_an_interpreter_reads_gets_one(tmp_path: Path) -> None:
    for env in ({"PYTHONPATH": str(tmp_path)}, {"TZ": "Asia/Tokyo"}):
        with programs.start(
            command("--version"), cwd=tmp_path, env=environment(env), stdout=subprocess.PIPE
        ) as process:
            process.communicate(timeout=60)
        assert type(process) is subprocess.Popen
