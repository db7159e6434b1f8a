"""What `workers up` is made of: what a node consists of, logs, lives, record, table."""

import signal
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import click
import msgspec
import pytest
from rich.console import Console

from common import flags
from common.errors import ConflictError, UsageError
from common.group_figures import GroupFigures
from tests.support.server_process import wait_until
from workers.node import processes
from workers.node.node_record import NodeRecord, Row, only_one, read_node, write_node
from workers.node.part_log import PartLog
from workers.node.plan import Part, Told, plan
from workers.node.processes import PASSING_CODES, Child, own_command
from workers.node.rows import of_group, of_server, row_of
from workers.node.table import duration, page
from workers.supervisor.records import Process, ServerRecord

HOST = "h"


def words(part: Part) -> str:
    return " ".join(part.arguments)


def planned(**told: object) -> list[Part]:
    return plan(Told(**told), HOST)  # type: ignore[arg-type]


# --- what a node consists of ---------------------------------------------------------------------


def test_servers_to_start_have_a_worker_group_each_and_one_sink() -> None:
    parts = planned(gpu="0-1", model="/m", strategy="best", sglang=("--x", "1"), runs=("r",))

    assert [part.name for part in parts] == [
        "server gpu0", "server gpu1", "worker group gpu0", "worker group gpu1", "sink",
    ]  # fmt: skip
    assert [part.unit for part in parts] == ["gpu0@h", "gpu1@h", "gpu0@h", "gpu1@h", ""]
    assert words(parts[1]) == (
        "serve --gpu 1 --tp 1 --port 30001 --model /m --strategy best -- --x 1"
    )
    assert words(parts[3]) == "start --gpu 1 --tp 1 --server http://127.0.0.1:30001 --run r"
    assert words(parts[4]) == "sink r"


def test_a_server_over_several_gpus_is_one_part() -> None:
    parts = planned(gpu="4-7", tp=2, model="/m", first_port=31_000, sink=False)

    assert [part.name for part in parts] == [
        "server gpu4-5", "server gpu6-7", "worker group gpu4-5", "worker group gpu6-7",
    ]  # fmt: skip
    assert words(parts[1]) == "serve --gpu 6,7 --tp 2 --port 31002 --model /m"
    assert words(parts[3]) == "start --gpu 6,7 --tp 2 --server http://127.0.0.1:31002"


@pytest.mark.parametrize(
    ("attach", "gpu", "names", "urls"),
    [
        ("30000-30002", None, "gpu0 gpu1 gpu2", "30000 30001 30002"),
        ("30004,30006", None, "gpu4 gpu6", "30004 30006"),
        ("9000,9001", None, "gpu0 gpu1", "9000 9001"),
        ("9000, 9001", "6-7", "gpu6 gpu7", "9000 9001"),
        ("http://127.0.0.1:900{gpu}", "2,4", "gpu2 gpu4", "9002 9004"),
    ],
)
def test_attached_servers_are_named_by_ports_or_by_gpus(
    attach: str, gpu: str | None, names: str, urls: str
) -> None:
    parts = planned(attach=attach, gpu=gpu, sink=False)

    assert [part.name.removeprefix("worker group ") for part in parts] == names.split()
    assert [part.arguments[-1] for part in parts] == [
        f"http://127.0.0.1:{port}" for port in urls.split()
    ]


def test_a_name_of_another_machine_is_attached_as_it_is_written() -> None:
    [part] = planned(attach="https://gpu-box:8443/llm/", sink=False)

    assert part.arguments[-1] == "https://gpu-box:8443/llm"


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({}, "which servers?"),
        ({"gpu": "0"}, "which servers?"),
        ({"model": "/m"}, "--gpu"),
        ({"attach": "30000", "simulate": 1}, "exclude each other"),
        ({"attach": "30000", "model": "/m"}, "--model and --attach exclude each other"),
        ({"attach": "30000", "sglang": ("-x",)}, "arguments of SGLang and --attach"),
        ({"attach": "30000-29999"}, "ranges upwards"),
        ({"attach": "30000,30000"}, "each server once"),
        ({"attach": ","}, "each server once"),
        ({"attach": "0"}, "from 1 to 65535"),
        ({"attach": "70000"}, "from 1 to 65535"),
        ({"attach": "gpu-box"}, "http://HOST:PORT"),
        ({"attach": "30000", "gpu": "0-1"}, "--attach names 1 servers and --gpu 0-1 2"),
        ({"attach": "30005,9000,http://x:1"}, None),
        ({"attach": "9000,30000"}, "give --gpu too"),
        ({"attach": "http://h:3000{gpu}"}, "needs --gpu"),
        ({"gpu": "0-9", "model": "/m", "first_port": 65_530}, "would get port 65536"),
        ({"simulate": 2, "gpu": "0-2"}, "does not fit"),
        ({"simulate": 2, "until_done": True}, "--until-done needs --run"),
        ({"simulate": 2, "until_done": True, "runs": ("r",), "sink": False}, "a sink here"),
    ],
)
def test_what_does_not_go_together_is_refused_in_words(
    told: dict[str, object], says: str | None
) -> None:
    if says is None:
        assert len(planned(**told)) == 4
        return
    with pytest.raises(UsageError, match=says):
        planned(**told)


# --- logs ----------------------------------------------------------------------------------------


def test_a_part_log_is_cut_in_place_while_its_process_writes(tmp_path: Path) -> None:
    log = PartLog(tmp_path / "logs" / "x.log", most_bytes=100)
    with log.opened() as file:
        file.write(b"a" * 150 + b"\nolder\n")
        file.flush()
        log.bound()
        file.write(b"2026-11-30 10:00:00 INFO newest \x1b[2J\n\n")
        file.flush()

    assert log.path.read_bytes() == b"2026-11-30 10:00:00 INFO newest \x1b[2J\n\n"
    assert (tmp_path / "logs" / "x.log.1").read_bytes().endswith(b"older\n")
    assert log.last_line() == "newest \\x1b[2J"


def test_what_an_earlier_process_said_is_over(tmp_path: Path) -> None:
    log = PartLog(tmp_path / "x.log")
    with log.opened() as file:
        file.write(b"workers: no such model\n")
    assert log.last_line() == "no such model"

    log.opened().close()

    assert log.last_line() == ""
    assert PartLog(tmp_path / "none.log").last_line() == ""


# --- lives ---------------------------------------------------------------------------------------


def child(tmp_path: Path, program: str, **options: frozenset[int]) -> Child:
    command = [sys.executable, "-c", program]
    return Child("part", command, env={}, log=PartLog(tmp_path / "x.log"), **options)


def look_until(part: Child, holds: Callable[[], bool], what: str) -> None:
    def look() -> bool:
        part.look(time.monotonic())
        return holds()

    wait_until(look, what, 60)


def test_a_child_that_cannot_run_is_said_once_and_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part = child(tmp_path, "print('workers: no such flag'); exit(2)", passing=PASSING_CODES)

    look_until(part, lambda: part.failed is not None, "its failure")

    assert (part.failed, part.standing, part.lives) == (2, "failed", 1)
    assert caplog.messages == ["part cannot run (exit 2): no such flag"]


def test_a_child_whose_fault_may_pass_is_tried_again_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "FIRST_BACKOFF_S", 0.01)
    part = child(tmp_path, "print('Redis is away'); exit(4)", passing=PASSING_CODES)

    look_until(part, lambda: part.lives >= 3, "three lives")

    part.send(signal.SIGKILL)
    wait_until(lambda: not part.alive, "its end", 60)
    assert part.failed is None
    assert len([text for text in caplog.messages if "Redis is away" in text]) == 1


def test_a_child_that_has_done_its_work_is_not_started_again(tmp_path: Path) -> None:
    part = child(tmp_path, "exit(1)", final=frozenset({0, 1}))

    look_until(part, lambda: part.ended is not None, "its end")
    part.look(time.monotonic() + 1_000)

    assert (part.ended, part.standing, part.lives) == (1, "ended", 1)


def test_a_child_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "FIRST_BACKOFF_S", 0.01)
    part = Child("part", [str(tmp_path / "none")], env={}, log=PartLog(tmp_path / "x.log"))

    part.look(time.monotonic())

    assert (part.standing, part.failed) == ("restarting", None)


def test_of_a_killed_part_the_signal_is_told_and_not_what_it_said_last(tmp_path: Path) -> None:
    part = child(tmp_path, "import time; print('98% were cut off', flush=True); time.sleep(60)")
    part.look(time.monotonic())
    log = PartLog(tmp_path / "x.log")
    wait_until(lambda: "cut off" in log.last_line(), "its words", 60)

    part.send(signal.SIGKILL)
    wait_until(lambda: not part.alive, "its end", 60)
    part.look(time.monotonic())

    what = Part(kind="worker group", name="worker group gpu0", arguments=(), log="x.log")
    row = row_of(what, part, log, server=None, figures=None)
    assert (row.state, row.says) == ("restarting", "killed by SIGKILL")


def test_the_file_of_a_command_goes_to_its_children_and_not_to_sglang() -> None:
    with click.Context(click.Command("up")) as called:
        called.params[flags.CONFIG] = "node.toml"
        line = own_command("serve", "--gpu", "0", "--", "--max-running-requests", "96")

    ours, sglang = line[: line.index("--")], line[line.index("--") + 1 :]
    assert ours[ours.index(f"--{flags.CONFIG}") + 1] == "node.toml"
    assert sglang == ["--max-running-requests", "96"]


# --- its record, its table -----------------------------------------------------------------------


def record(**changes: object) -> NodeRecord:
    rows = [
        Row(name="redis", state="ready", since=time.time() - 65, says="redis://h"),
        Row(name="worker group gpu0", pid=7, state="down", restarts=2, says="\x1b]0;x\x07" * 90),
    ]
    now_s = time.time()
    made = NodeRecord(
        pid=1, started="1", host=HOST, since=now_s - 7300, at=now_s, state="running",
        redis="redis://h", rows=rows,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_node(tmp_path, HOST) is None
    written = record()
    write_node(tmp_path, written)
    assert read_node(tmp_path, HOST) == written
    assert not record(started="").alive


@pytest.mark.parametrize("width", [60, 100, 140])
def test_the_table_shows_each_part_in_one_line(width: int) -> None:
    out = StringIO()
    Console(file=out, width=width).print(page(record(), last="a word"))
    lines = out.getvalue().splitlines()

    assert lines[0].startswith("h: running for 2h01m")
    assert len(lines) == 6, "a head, a heading with its line, a line a part, the last word"
    assert "1m05s" in lines[3]
    assert lines[4].split()[:5] == ["worker", "group", "gpu0", "7", "down"]
    assert "\x1b" not in out.getvalue()
    assert max(map(len, lines)) <= width


def test_an_old_record_says_how_old_it_is() -> None:
    out = StringIO()
    Console(file=out, width=120).print(page(record(at=time.time() - 200)))
    assert "as it was 3m20s ago" in out.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0s"), (59, "59s"), (61, "1m01s"), (3_700, "1h01m"), (180_000, "2d02h")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_worker_group_says_what_it_does_or_waits_for() -> None:
    figures = GroupFigures(
        group="g", epoch="e", host=HOST, pid=1, server="s", state="ready", in_flight=3, bound=79,
        gen_tokens_per_s=1180.4, completed=12_345,
    )  # fmt: skip
    assert of_group(figures) == "3 of 79 open, 1,180 tok/s, 12,345 done"
    waiting = GroupFigures(
        group="g", epoch="e", host=HOST, pid=1, server="s", state="waiting", detail="refused"
    )
    assert of_group(waiting) == "refused"
    drained = msgspec.structs.replace(
        figures, state="drained", in_flight=0, bound=0, detail="for X"
    )
    assert of_group(drained) == "for X, 12,345 done", "its server is away"


def test_a_worker_group_that_has_not_begun_says_what_its_log_does(tmp_path: Path) -> None:
    part = planned(attach="30000", sink=False)[0]
    running = child(
        tmp_path, "import time; print('INFO Redis is new', flush=True); time.sleep(99)"
    )
    log = PartLog(tmp_path / "x.log")
    idle = GroupFigures(
        group="g", epoch="e", host=HOST, pid=1, server="s", state="ready", bound=79
    )
    look_until(running, lambda: log.last_line() != "", "its first line")

    said = [
        row_of(part, running, log, server=None, figures=each).says
        for each in (idle, msgspec.structs.replace(idle, in_flight=3))
    ]
    running.send(signal.SIGKILL)
    wait_until(lambda: not running.alive, "its end", 60)

    assert said == ["0 of 79 open, 0 done; INFO Redis is new", "3 of 79 open, 0 done"]


@pytest.mark.parametrize(
    ("restarts", "said"), [(0, "v"), (1, "v, restarted once"), (2, "v, restarted 2 times")]
)
def test_a_server_says_how_often_it_was_restarted(restarts: int, said: str) -> None:
    record = ServerRecord(
        name="gpu0@h", gpus=(0,), url="http://127.0.0.1:30000", port=30000,
        supervisor=Process(pid=1, started="never"), state="ready", strategy="v", restarts=restarts,
    )  # fmt: skip

    assert of_server(record) == said


def test_there_is_one_node_a_directory_and_a_gpu(tmp_path: Path) -> None:
    unit = f"gpu0@{tmp_path.name}"
    with only_one(tmp_path / "a", HOST, [unit]):
        for folder, gpu in (("a", "gpu9@x"), ("b", unit)):
            with (
                pytest.raises(ConflictError, match=r"\(pid \d+\) already runs"),
                only_one(tmp_path / folder, HOST, [gpu]),
            ):
                pass
    with only_one(tmp_path / "b", HOST, [unit]):
        pass
