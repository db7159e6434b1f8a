"""However a program ends: one line that says what and what to do, an exit code, no secret."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from common import last_words
from common.last_words import run_program
from tests.support.producer_cli import environment

ENQUEUE = ("enqueue", "p.jsonl", "--dry-run", "--max-tokens", "5")


def call(
    folder: Path,
    command: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    limits: Callable[[], None] | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Run `producer` in a shell command, where PRODUCER stands for it."""
    (folder / "p.jsonl").write_text('{"id":"a","prompt":"hello"}\n')
    shell = command.replace("PRODUCER", f'"{sys.executable}" -m producer "$@"')
    return subprocess.run(
        ["/bin/sh", "-c", shell, "sh", *arguments],
        cwd=folder,
        env=environment({"PYTHONDONTWRITEBYTECODE": "1", **(env or {})}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=limits,
    )


@pytest.mark.parametrize("where", [">/dev/full", ">&-"])
@pytest.mark.parametrize(
    "arguments", [(*ENQUEUE, "--json"), ("enqueue", "--help"), ("--version",)]
)
def test_a_stdout_that_takes_nothing_is_told_in_a_line(
    tmp_path: Path, arguments: tuple[str, ...], where: str
) -> None:
    done = call(tmp_path, f"PRODUCER {where}", *arguments)

    assert done.returncode == 4, done
    assert done.stderr.splitlines()[-1].startswith("producer: stdout cannot be written (")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-"])
def test_a_stderr_that_takes_nothing_ends_nothing(tmp_path: Path, where: str) -> None:
    done = call(tmp_path, f"PRODUCER {where}", *ENQUEUE, "--json")

    assert (done.returncode, done.stderr) == (0, "")
    assert '"ok":1' in done.stdout


def test_a_file_never_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """What prints to stdout would write into whatever was opened in its place."""
    done = call(tmp_path, "PRODUCER <&- >&- 2>&-", *ENQUEUE)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "p.jsonl").read_text() == '{"id":"a","prompt":"hello"}\n'


def test_a_temporary_folder_that_takes_nothing_is_told_in_a_line(tmp_path: Path) -> None:
    def no_file_may_grow() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    done = call(tmp_path, "PRODUCER", *ENQUEUE, limits=no_file_may_grow)

    assert done.returncode == 4, done
    assert "TMPDIR" in done.stderr
    assert "Traceback" not in done.stderr


def refused(number: int, path: str | None = None) -> Callable[[], None]:
    def call() -> None:
        raise OSError(number, os.strerror(number), path)

    return call


def no_memory() -> None:
    raise MemoryError


def several() -> None:
    raise ExceptionGroup("tasks", [OSError(errno.EMFILE, os.strerror(errno.EMFILE))])


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (refused(errno.ENOSPC, "/x/y"), "/x/y: No space left on device: make room"),
        (refused(errno.EDQUOT, "/x/y"), "/x/y: Disk quota exceeded: make room"),
        (refused(errno.EMFILE), "Too many open files: raise the limit"),
        (refused(errno.EROFS, "/x"), "/x: Read-only file system: choose"),
        (refused(errno.EIO, "/x"), "/x: Input/output error"),
        (no_memory, "no memory left"),
        (several, "Too many open files: raise the limit"),
    ],
)
def test_what_the_system_refuses_is_a_line_with_its_place_and_what_to_do(
    end: Callable[[], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program("producer", end) == 4

    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"producer: {said}")


def test_the_traceback_of_a_bug_holds_no_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "c4nary-of-the-server")

    def bug() -> None:
        raise KeyError("c4nary-of-the-server at redis://c4nary-pass@h/0 \x1b[2J")

    assert run_program("producer", bug) == last_words.BUG

    said = capsys.readouterr().err
    assert "KeyError" in said
    assert "c4nary" not in said
    assert "\x1b" not in said
