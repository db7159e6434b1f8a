"""What a newcomer gets wrong, or has to be told: files, addresses, names, what to type next."""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
import redis

from common.queue.sinkview import SinkState, complain, sink_state
from common.store.directory import DirectoryStore
from tests.support.producer_cli import Ended, environment, producer
from tests.support.redis_server import RedisServer
from tests.support.run_world import RUN, World
from tests.support.server_process import wait_until
from tests.support.sink_process import SinkProcess
from tests.support.sinks import drain, run_sink
from tests.support.skips import skip_cannot_run
from workers.engine.eligible import Eligible

Ask = Callable[..., Ended]


@pytest.fixture
def ask(valkey: RedisServer, tmp_path: Path) -> Ask:
    def call(*arguments: str) -> Ended:
        return producer(*arguments, cwd=tmp_path, env={"HEADRACE_REDIS": valkey.tcp_url})

    return call


@pytest.fixture
def world(redis_client: "redis.Redis", tmp_path: Path) -> World:
    return World(redis_client, DirectoryStore(tmp_path / "out"), prompts=10)


def queue_one(ask: Ask, folder: Path, *flags: str, text: str = '{"prompt":"a"}\n') -> Ended:
    (folder / "p.jsonl").write_text(text)
    return ask("enqueue", "p.jsonl", "--max-tokens", "5", *flags)


# --- Addresses -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("redis_client")
@pytest.mark.parametrize("form", ["out/", "./out", "{cwd}/out", "file://{cwd}/out/", "link"])
@pytest.mark.parametrize("there", [True, False])
def test_an_output_is_the_same_however_it_is_written(
    ask: Ask, tmp_path: Path, form: str, *, there: bool
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "out")
    assert queue_one(ask, tmp_path, "--output", "out").code == 0
    if not there:
        (tmp_path / "out").rename(tmp_path / "away")

    ended = queue_one(ask, tmp_path, "--output", form.format(cwd=tmp_path))

    assert ended.code == 0, ended.err
    assert queue_one(ask, tmp_path, "--output", "out2").code == 5


@pytest.mark.usefixtures("redis_client")
@pytest.mark.parametrize("output", ["s3:/bucket/prefix", "s3:bucket", "gs:x", "S3:/b", "hdfs:/x"])
def test_half_an_address_does_not_become_a_directory(
    ask: Ask, tmp_path: Path, output: str
) -> None:
    ended = queue_one(ask, tmp_path, "--output", output)

    assert ended.code == 2
    assert "s3://BUCKET/PREFIX" in ended.err
    assert {path.name for path in tmp_path.iterdir()} == {"p.jsonl"}


@pytest.mark.usefixtures("redis_client")
def test_a_colon_within_a_path_is_allowed(ask: Ask, tmp_path: Path) -> None:
    assert queue_one(ask, tmp_path, "--output", "./run:1").code == 0
    assert (tmp_path / "run:1" / "run.json").exists()


# --- Files and rows ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["*.jsonl", "nothere.jsonl", "a b.jsonl"])
def test_a_file_that_is_not_there_is_said_to_be_so(ask: Ask, name: str) -> None:
    ended = ask("enqueue", name, "--dry-run", "--max-tokens", "5")

    assert ended.code == 2
    assert "cannot name a run" not in ended.err
    assert re.search(r"no such file|No such file", ended.err)
    assert name in ended.err


def test_a_rejected_row_is_named_by_its_id(ask: Ask, tmp_path: Path) -> None:
    ended = queue_one(ask, tmp_path, "--dry-run", text='{"id":"q7","prompt":""}\n')

    assert ended.code == 3
    assert "line 1 (id q7): prompt is empty" in ended.err


def test_members_that_are_not_sent_are_told(ask: Ask, tmp_path: Path) -> None:
    text = '{"prompt":"a","temprature":0.1,"tag":1}\n{"prompt":"b","tag":2,"seed":1}\n'

    ended = queue_one(ask, tmp_path, "--dry-run", "--json", text=text)

    assert ended.code == 0
    assert "kept with the prompt but not sent: tag (2 rows), temprature (1 row)\n" in ended.err
    assert ended.told["unsent"] == {"tag": 2, "temprature": 1}


def test_many_members_that_are_not_sent_are_told_in_one_line(ask: Ask, tmp_path: Path) -> None:
    row = ",".join(f'"m{number}":1' for number in range(300))

    ended = queue_one(ask, tmp_path, "--dry-run", "--json", text=f'{{"prompt":"a",{row}}}\n')

    [line] = [line for line in ended.err.splitlines() if "not sent" in line]
    assert line.count("(1 row)") == 5
    assert line.endswith("…")
    assert len(ended.told["unsent"]) == 100


def test_members_of_batch_lines_are_nobodys_typing_error(ask: Ask, tmp_path: Path) -> None:
    body = '{"custom_id":"1","extra":1,"body":{"messages":[{"role":"user","content":"a"}]},'
    text = body + '"method":"POST","url":"/v1/chat/completions"}\n'

    ended = queue_one(ask, tmp_path, "--dry-run", text=text)

    assert ended.code == 0, ended.err
    assert "not sent" not in ended.err


# --- What to type next ---------------------------------------------------------------------------


@pytest.mark.usefixtures("redis_client")
def test_the_next_lines_name_all_that_a_run_needs(
    ask: Ask, tmp_path: Path, valkey: RedisServer
) -> None:
    ended = queue_one(ask, tmp_path, "--output", "out")

    lines = ended.err.split("next:\n")[1].splitlines()
    words = [shlex.split(line)[:2] for line in lines]
    assert words == [
        ["workers", "up"],
        ["producer", "status"],
        ["rq", "info"],
    ]
    assert shlex.split(lines[2]) == ["rq", "info", "-u", valkey.tcp_url, "p"]
    shown = shlex.split(lines[1])
    assert producer(*shown[1:], cwd=tmp_path).code == 0


def test_where_all_is_done_no_server_is_to_be_started(
    world: World, ask: Ask, tmp_path: Path
) -> None:
    rows = [{"id": n, **world.body(n)} for n in range(world.accepted)]
    (tmp_path / "p.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
    again = ("enqueue", "p.jsonl", "--run", RUN, "--max-tokens", "16")
    assert "workers up" in ask(*again).err
    world.finish(range(world.accepted))
    drain(run_sink(world))

    ended = ask(*again)

    lines = [shlex.split(line) for line in ended.err.split("next:\n")[1].splitlines()]
    assert [line[:3] for line in lines] == [
        ["producer", verb, RUN] for verb in ("status", "verify", "export")
    ]
    # What is in this store was never made by a server, which verify is right to find.
    assert 2 not in {producer(*line[1:], cwd=tmp_path).code for line in lines}


def test_an_embedded_redis_can_be_stopped_by_the_line_that_is_told(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt":"a"}\n')
    home = tmp_path / "redis"

    ended = producer(
        *("enqueue", "p.jsonl", "--max-tokens", "5", "--output", "out"),
        *("--redis", f"embedded:{home}"),
        cwd=tmp_path,
    )

    assert "or --simulate 2 without any" in ended.err
    [line] = [line for line in ended.err.splitlines() if "common.embedded" in line]
    words = shlex.split(line, comments=True)
    assert words[0] == "python"
    stopped = [
        subprocess.run(
            [sys.executable, *words[1:]],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        for _ in range(2)
    ]
    assert [each.returncode for each in stopped] == [0, 0]
    assert "is stopped; its data stays" in stopped[0].stderr
    assert "does not run" in stopped[1].stderr
    # Whatever became of the lines above: nothing of this test goes on.
    subprocess.run(
        [sys.executable, "-m", "common.embedded", "stop", home], env=environment(), check=True
    )


def test_stop_needs_a_directory() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "common.embedded", "start"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert "stop DIR" in ended.stderr


# --- Runs that are not there ---------------------------------------------------------------------

UNKNOWN = "waiting for run 'nothere', which Redis does not know (`producer runs` lists them)"


def test_a_sink_says_that_it_waits_for_a_run_that_is_not_there(
    world: World, valkey: RedisServer, tmp_path: Path
) -> None:
    with SinkProcess(valkey.url, tmp_path, "--until-done", RUN, "nothere") as sink:
        wait_until(lambda: "serving" in sink.text(), "a sink at work")
        wait_until(lambda: sink_state(world.client, world.record).sinks == 1, "its presence")
        assert sink.text().count(UNKNOWN) == 1


def test_a_worker_group_says_so_too_and_once_a_minute(
    redis_client: "redis.Redis", caplog: pytest.LogCaptureFixture
) -> None:
    eligible = Eligible(redis_client, only=("nothere",))
    for _ in range(3):
        eligible.refresh()
    assert [record.getMessage() for record in caplog.records] == [UNKNOWN]


# --- The sink, for status ------------------------------------------------------------------------


def test_without_a_sink_status_says_so_from_the_first_minute(world: World, ask: Ask) -> None:
    assert sink_state(world.client, world.record) == SinkState()

    told = ask("status", RUN, "--json").told

    assert any("no sink is running" in line for line in told["warnings"])


def test_a_healthy_sink_that_waits_for_its_batch_limits_nothing(world: World, ask: Ask) -> None:
    run_sink(world, rows=100).step()
    world.finish(range(10))

    state = sink_state(world.client, world.record)
    told = ask("status", RUN, "--json").told

    assert state.sinks == 1
    first = world.entries()[0][0].decode().partition("-")[0]
    assert state.next_due_ms == int(first) + 60_000
    assert told["limited_by"] is None
    assert not any("sink" in line for line in told["warnings"])


def test_why_a_sink_cannot_write_is_shown_until_it_can(world: World, ask: Ask) -> None:
    complain(world.client, world.record, "PutObject denied in bucket b")

    ended = ask("status", RUN, "--json")

    assert (ended.told["status"], ended.code) == ("s3_error", 4)
    assert "sink cannot write: PutObject denied in bucket b" in ended.told["warnings"]
    complain(world.client, world.record, "")
    assert sink_state(world.client, world.record).error is None


def test_a_complaint_that_nobody_repeats_is_over(world: World) -> None:
    complain(world.client, world.record, "PutObject denied in bucket b")
    state = sink_state(world.client, world.record)
    world.client.hincrby(f"headrace:run:{RUN}", "sink_error_ms", -200_000)

    assert state.error_at_ms > 0
    assert sink_state(world.client, world.record).error is None


# --- Parquet -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("redis_client")
def test_parquet_is_refused_where_it_cannot_be_written(ask: Ask, tmp_path: Path) -> None:
    if find_spec("pyarrow") is not None:
        skip_cannot_run("pyarrow is installed here")
    ended = queue_one(ask, tmp_path, "--output", "out", "--format", "parquet")

    assert ended.code == 2
    assert "pip install pyarrow" in ended.err
    assert not (tmp_path / "out").exists()
