"""The records of servers on the node's own disk: what is asked, for how long it holds."""

import os
from pathlib import Path

import pytest

from common.errors import BackendError, UsageError
from workers.lives import process_start
from workers.supervisor.records import (
    Process,
    ServerRecord,
    ask,
    read_record,
    read_records,
    read_wanted,
    record_path,
    wanted_path,
    write_record,
)

US = Process(os.getpid(), process_start(os.getpid()))


def record(
    name: str = "gpu0@node1", *, gpus: tuple[int, ...] = (0,), **fields: object
) -> ServerRecord:
    told = {"url": "http://127.0.0.1:30000", "port": 30_000, "supervisor": US, **fields}
    return ServerRecord(name=name, gpus=gpus, **told)  # type: ignore[arg-type]


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = record(state="ready", cap=72, flags="f", serial=3, server=Process(7, "1"))
    write_record(tmp_path, written)
    assert read_record(tmp_path, "gpu0@node1") == written
    assert [path.name for path in (tmp_path / "servers").iterdir()] == ["gpu0@node1.json"]


def test_records_are_those_of_one_host_by_gpu_and_orders_are_none(tmp_path: Path) -> None:
    for number in (10, 2, 0):
        write_record(tmp_path, record(f"gpu{number}@node1", gpus=(number,)))
    write_record(tmp_path, record("gpu1@node2", gpus=(1,)))
    ask(tmp_path, "gpu2@node1")
    found = read_records(tmp_path, "node1")
    assert [each.name for each in found] == ["gpu0@node1", "gpu2@node1", "gpu10@node1"]
    assert read_records(tmp_path / "nowhere", "node1") == []


def test_an_order_outnumbers_whatever_was_carried_out(tmp_path: Path) -> None:
    write_record(tmp_path, record(flags="f", serial=4))
    assert ask(tmp_path, "gpu0@node1", strategy="no_radix").serial == 5
    second = ask(tmp_path, "gpu0@node1")
    assert second.serial == 6
    assert read_wanted(tmp_path, "gpu0@node1") == second


def test_an_order_keeps_what_an_earlier_one_set_until_the_flags_change(tmp_path: Path) -> None:
    write_record(tmp_path, record(flags="f"))
    ask(tmp_path, "gpu0@node1", strategy="no_radix")
    second = ask(tmp_path, "gpu0@node1", arguments=["--max-running-requests", "64"])
    assert (second.strategy, second.arguments) == ("no_radix", ("--max-running-requests", "64"))
    assert ask(tmp_path, "gpu0@node1", arguments=[]).arguments == ()
    write_record(tmp_path, record(flags="others"))
    third = ask(tmp_path, "gpu0@node1")
    assert (third.strategy, third.arguments, third.over) == (None, None, "others")


def test_nothing_can_be_asked_where_no_supervisor_was(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--state-dir"):
        ask(tmp_path, "gpu0@node1")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"name":"gpu0@node1"}', b"\xff\xfe"])
def test_a_file_that_is_no_record_is_named(tmp_path: Path, data: bytes) -> None:
    path = record_path(tmp_path, "gpu0@node1")
    path.parent.mkdir()
    path.write_bytes(data)
    with pytest.raises(BackendError, match=r"gpu0@node1\.json is no record"):
        read_record(tmp_path, "gpu0@node1")
    path.unlink()
    write_record(tmp_path, record())
    wanted_path(tmp_path, "gpu0@node1").write_bytes(data)
    with pytest.raises(BackendError, match=r"gpu0@node1\.wanted\.json is no record"):
        ask(tmp_path, "gpu0@node1")


def test_a_process_is_alive_only_as_itself() -> None:
    assert US.alive
    assert not Process(US.pid, "1").alive
    assert not Process(US.pid, "").alive
