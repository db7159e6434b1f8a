"""A server's log is turned over without a line lost, and never holds the server up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.supervisor import log_writer
from workers.supervisor.log_writer import Log
from workers.supervisor.server_log import heading, since_start

SCRIPT = Path(log_writer.__file__)


def lines_of(folder: Path) -> list[bytes]:
    """All lines, the oldest first."""
    files = sorted(
        folder.glob("server.log*"),
        key=lambda path: -int(path.suffix[1:] or 0) if path.suffix != ".log" else 0,
    )
    return [line for path in files for line in path.read_bytes().splitlines()]


def test_no_line_is_lost_or_cut_when_the_log_is_turned_over(tmp_path: Path) -> None:
    log = Log(tmp_path / "server.log", most_bytes=1000, files=100)
    text = b"".join(b"line %05d %s\n" % (n, b"x" * (n % 40)) for n in range(1000))
    for start in range(0, len(text), 77):
        log.take(text[start : start + 77])
    log.flush()
    assert lines_of(tmp_path) == text.splitlines()
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) > 20
    assert max(sizes) <= 1000


def test_only_so_many_older_files_are_kept(tmp_path: Path) -> None:
    log = Log(tmp_path / "server.log", most_bytes=100, files=2)
    for n in range(100):
        log.take(b"line %05d\n" % n)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "server.log",
        "server.log.1",
        "server.log.2",
    ]
    found = lines_of(tmp_path)
    assert found[-1] == b"line 00099"
    assert found == [b"line %05d" % n for n in range(100 - len(found), 100)]


def test_a_log_that_was_there_is_added_to(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(b"before\n")
    log = Log(path, most_bytes=1000, files=1)
    log.take(b"after\n")
    assert path.read_bytes() == b"before\nafter\n"
    path.unlink()
    log.take(b"anew\n")
    assert path.read_bytes() == b"anew\n"


def test_what_a_full_disk_does_not_take_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "server.log"
    log = Log(path, most_bytes=1000, files=1)
    log.take(b"one\n")
    write = os.write
    monkeypatch.setattr(os, "write", full)
    log.take(b"two\n")
    log.take(b"three\n")
    monkeypatch.setattr(os, "write", write)
    log.take(b"four\n")
    told = b"[headrace] 10 bytes of this log are lost: no room\n"
    assert path.read_bytes() == b"one\n" + told + b"four\n"


def full(_descriptor: int, _data: bytes) -> int:
    raise OSError(28, "No space left on device")


def test_a_key_is_not_written_wherever_it_comes(tmp_path: Path) -> None:
    log = Log(tmp_path / "server.log", most_bytes=10_000, files=1, secret=b"made-up-key")
    text = b"server_args=(api_key='made-up-key', port=1)\n"
    for start in range(0, len(text), 5):
        log.take(text[start : start + 5])
    assert (tmp_path / "server.log").read_text() == "server_args=(api_key='…', port=1)\n"


def test_it_writes_until_the_last_writer_has_gone_and_no_signal_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "server.log"
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", SCRIPT, path, "1000000", "1"],
        stdin=subprocess.PIPE,
        env={"HEADRACE_API_KEY": "made-up-key"},
    )
    with process:
        assert process.stdin is not None
        process.stdin.write(b"first made-up-key\n")
        process.stdin.flush()
        while not path.exists():
            assert process.poll() is None
        process.terminate()
        process.stdin.write(b"second, without an end")
    assert process.returncode == 0
    assert path.read_text() == "first …\nsecond, without an end"


def test_what_a_start_wrote_is_told_from_what_was_before(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    first, second = heading(["a"], "0.5.9"), heading(["b"], "0.5.23")
    assert since_start(path) == ""
    path.write_text(f"{first}\nold\n{second}\nnew\nnewer\n")
    assert since_start(path) == "new\nnewer\n"
    path.rename(tmp_path / "server.log.1")
    path.write_text("newest\n")
    assert since_start(path) == "new\nnewer\nnewest\n"
