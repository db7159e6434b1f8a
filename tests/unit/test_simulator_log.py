"""What the account says of a log."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from workers.simulator.log import Account, read_log


def write(path: Path, *lines: dict[str, Any], cut: bytes = b"") -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines) + cut)
    return path


def start(t: float, port: int = 1) -> dict[str, Any]:
    return {"e": "start", "port": port, "pid": 7, "t": t, "cap": 4}


def begin(t: float, n: int, digest: str = "", port: int = 1) -> dict[str, Any]:
    common = {"port": port, "rid": f"r{n}", "hash": digest or f"h{n}", "n": n}
    return {"e": "begin", **common, "t": t, "open": 1}


def end(t: float, n: int, outcome: str = "stop", port: int = 1) -> dict[str, Any]:
    return {"e": "end", "port": port, "rid": f"r{n}", "hash": "", "n": n, "t": t,
            "outcome": outcome}  # fmt: skip


def account(tmp_path: Path, *lines: dict[str, Any]) -> Account:
    return read_log(write(tmp_path / "log.jsonl", *lines))


def test_open_requests_are_counted_by_port(tmp_path: Path) -> None:
    read = account(
        tmp_path, start(0), begin(1, 1), begin(2, 2), begin(2, 3, port=2), end(3, 1), begin(4, 4)
    )

    assert read.max_open == {1: 2, 2: 1}
    assert read.requests == 4


def test_a_start_ends_what_was_open_at_its_port(tmp_path: Path) -> None:
    # The second process counts its requests from 1 again.
    read = account(tmp_path, start(0), begin(1, 1), start(5), begin(6, 1), end(7, 1))

    assert [(each.begin, each.end, each.outcome) for each in read.served] == [
        (1, 5, ""),
        (6, 7, "stop"),
    ]
    assert read.max_open == {1: 1}


def test_repeats_are_told_from_completions_that_repeat(tmp_path: Path) -> None:
    read = account(
        tmp_path,
        *(begin(n, n, digest=digest) for n, digest in enumerate("aabbc")),
        *(end(10, n, outcome) for n, outcome in enumerate(("died", "stop", "stop", "length", ""))),
    )

    assert read.by_hash == {"a": 2, "b": 2, "c": 1}
    assert read.repeated == ["a", "b"]
    assert read.completed_again == ["b"]
    assert read.outcomes == {"stop": 2, "length": 1, "died": 1, "": 1}


@pytest.mark.parametrize(
    ("window", "mean"),
    [({}, 1.5), ({"begin": 2, "end": 3}, 2), ({"begin": 3, "end": 13}, 0.1), ({"port": 2}, 0)],
)
def test_the_mean_open_is_over_a_window(
    tmp_path: Path, window: dict[str, Any], mean: float
) -> None:
    # One request of four seconds, another of two in its middle.
    read = account(tmp_path, begin(0, 1), begin(1, 2), end(3, 2), end(4, 1))

    assert read.mean_open(**window) == pytest.approx(mean)


def test_several_files_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    first = write(tmp_path / "a", begin(1, 1), end(4, 1))
    second = write(tmp_path / "b", begin(2, 2), end(3, 2))

    read = read_log([second, first])

    assert [each.rid for each in read.served] == ["r1", "r2"]
    assert read.max_open == {1: 2}


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a", begin(1, 1), cut=b'{"e":"end","por')

    assert read_log(str(path)).requests == 1
