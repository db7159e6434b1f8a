"""The end of a log that grows, turns over, is cut off, is missing, or is no log at all."""

import os
import shutil
import time
from pathlib import Path

import pytest

from workers.readings.log_lines import Batch, Event, MambaPool, Started
from workers.servers.log_tail import (
    FIRST_READ_BYTES,
    MOST_READ_BYTES,
    SEARCH_BYTES,
    START_BEFORE_BYTES,
    LogTail,
    Noted,
)

START = (
    "[2026-01-01 09:00:00] server_args={'mamba_radix_cache_strategy': 'no_buffer'}",
    "[2026-01-01 09:00:01] Mamba Cache is allocated. max_mamba_cache_size: 216, conv_state",
    "[2026-01-01 09:00:02] max_total_num_tokens=450000, max_running_requests=72, context_len=9",
)
ACCESS = '[2026-01-01 10:00:00] INFO:     127.0.0.1:1 - "POST /generate HTTP/1.1" 200 OK'


def decode(running: int, at: str = "10:00:00") -> str:
    return f"[2026-01-01 {at}] Decode batch, #running-req: {running}, #queue-req: 0"


def add(path: Path, *lines: str, end: str = "\n") -> None:
    with path.open("a") as file:
        file.write("".join(f"{line}\n" for line in lines[:-1]) + lines[-1] + end)


def running(noted: list[Noted]) -> list[int | None]:
    return [each.line.running for each in noted if isinstance(each.line, Batch)]


def starts(noted: list[Noted]) -> list[tuple[str, int]]:
    """The starts that were found further back."""
    return [
        ("cap", each.line.cap or 0)
        for each in noted
        if each.at_s is None and isinstance(each.line, Started)
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sglang_gpu0.log"


@pytest.fixture
def tail(path: Path) -> LogTail:
    return LogTail(lambda: path)


def test_each_look_gives_what_was_added_since_the_last(path: Path, tail: LogTail) -> None:
    add(path, *START, decode(1))
    first = tail.read()
    assert running(first) == [1]
    assert [type(each.line) for each in first] == [Event, MambaPool, Started, Batch]
    assert tail.read() == []

    add(path, decode(2), decode(3))
    add(path, decode(4)[:-9], end="")
    assert running(tail.read()) == [2, 3]
    add(path, decode(4)[-9:], decode(5))
    assert running(tail.read()) == [4, 5]


def test_a_log_that_comes_later_is_read_from_its_beginning_on(path: Path, tail: LogTail) -> None:
    assert tail.read() == []
    add(path, decode(1))

    assert running(tail.read()) == [1]


def test_after_a_rotation_both_ends_are_read(path: Path, tail: LogTail) -> None:
    add(path, decode(1))
    tail.read()
    add(path, decode(2))
    path.rename(path.with_suffix(".1"))
    assert running(tail.read()) == [2]
    assert tail.read() == []

    add(path, decode(3))
    assert running(tail.read()) == [3]

    add(path, decode(4))
    path.rename(path.with_suffix(".2"))
    add(path, decode(5))
    assert running(tail.read()) == [4, 5]


def test_a_log_that_was_cut_off_is_read_from_its_beginning(path: Path, tail: LogTail) -> None:
    add(path, decode(1), decode(2))
    tail.read()
    os.truncate(path, 0)
    add(path, decode(3))

    assert running(tail.read()) == [3]


def test_a_log_that_was_out_of_sight_goes_on_where_it_was(path: Path, tmp_path: Path) -> None:
    away = [False]
    tail = LogTail(lambda: tmp_path / "gone" if away[0] else path)
    add(path, decode(1))
    tail.read()
    away[0] = True
    assert tail.read() == []
    away[0] = False
    add(path, decode(2))

    assert running(tail.read()) == [2]


def test_of_much_at_once_the_end_is_read_and_memory_is_bounded(path: Path, tail: LogTail) -> None:
    add(path, decode(1))
    tail.read()
    lines = [decode(n) for n in range(70_000)]
    add(path, *lines)
    found = running(tail.read())

    assert sum(map(len, lines)) > 4 * MOST_READ_BYTES
    assert found[-1] == 69_999
    assert len(found) * len(lines[0]) <= MOST_READ_BYTES


def test_a_line_without_an_end_costs_no_memory_and_hides_nothing(
    path: Path, tail: LogTail
) -> None:
    add(path, decode(1))
    tail.read()
    for _ in range(5):
        add(path, "x" * MOST_READ_BYTES, end="")
        assert tail.read() == []
        held = tail._file._rest if tail._file else b""
        assert len(held) < MOST_READ_BYTES
    add(path, "", decode(2))

    assert running(tail.read()) == [2]


def test_the_first_look_reads_the_end_and_finds_the_last_start(path: Path, tail: LogTail) -> None:
    # A day's log: its start is farther back than one look goes.
    add(path, *START, START[2].replace("72", "40"))
    count = (3 * SEARCH_BYTES) // len(ACCESS)
    with path.open("a") as file:
        file.write(f"{ACCESS}\n" * count)
    add(path, decode(7))

    looks = [tail.read() for _ in range(6)]

    assert running(looks[0]) == [7]
    assert [starts(each) for each in looks[:2]] == [[], []]
    assert [each for look in looks for each in starts(look)] == [("cap", 72), ("cap", 40)]
    assert sum(len(look) for look in looks) == 5
    assert path.stat().st_size > 3 * SEARCH_BYTES > FIRST_READ_BYTES


def test_a_text_that_only_looks_like_a_start_does_not_end_the_search(
    path: Path, tail: LogTail
) -> None:
    add(path, *START)
    add(path, *[ACCESS] * (2 * START_BEFORE_BYTES // len(ACCESS)))
    add(path, f"{ACCESS} max_total_num_tokens=7, max_running_requests=3, context_len=1")
    add(path, *[ACCESS] * (FIRST_READ_BYTES // len(ACCESS)))

    assert [each for _ in range(4) for each in starts(tail.read())] == [("cap", 72)]


def test_lines_are_dated_by_the_file_and_by_their_distance_from_its_end(
    path: Path, tail: LogTail
) -> None:
    # Hours of access lines after the last batch: it must not pass for one of now.
    add(path, decode(1, "07:00:00"), decode(2, "08:59:00"), ACCESS, "no stamp at all")
    os.utime(path, (time.time() - 40, time.time() - 40))
    now_s = time.monotonic()
    ages = [now_s - (each.at_s or 0.0) for each in tail.read()]

    assert ages == [pytest.approx(3 * 3600 + 40, abs=30), pytest.approx(3660 + 40, abs=30)]


def test_a_clock_that_is_set_back_makes_no_line_younger_than_one_after_it(
    path: Path, tail: LogTail
) -> None:
    add(path, decode(1, "02:59:58"), decode(2, "02:59:59"), decode(3, "02:00:01"))
    found = [each.at_s or 0.0 for each in tail.read()]

    assert found == sorted(found)
    assert found[-1] - found[0] < 60


@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "dangling", "loop"])
def test_what_is_no_file_of_its_own_is_no_log(path: Path, tail: LogTail, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "dangling": "nowhere"}.get(kind, path.name))
    assert tail.read() == []
    assert tail._file is None

    path.rmdir() if kind == "directory" else path.unlink()
    add(path, decode(1))
    assert running(tail.read()) == [1]


def test_a_log_behind_a_link_is_followed_to_where_the_link_leads_now(
    path: Path, tail: LogTail, tmp_path: Path
) -> None:
    for n in (1, 2):
        add(tmp_path / f"run{n}.log", decode(n))
    path.symlink_to("run1.log")
    assert running(tail.read()) == [1]
    path.unlink()
    path.symlink_to("run2.log")

    assert running(tail.read()) == [2]


def test_no_file_stays_open_when_a_log_turns_over(path: Path, tail: LogTail) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    add(path, decode(1))
    tail.read()
    before = open_files()
    for n in range(20):
        path.rename(path.with_suffix(f".{n}"))
        add(path, decode(n))
        tail.read()

    assert open_files() == before
    shutil.rmtree(path.parent)
    tail.read()
    assert open_files() == before - 1
