"""Cases of input files that need servers, a store or many rows; the others are judged dry."""

import importlib
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.support import measured
from tests.support.fleet import Fleet
from tests.support.producer_cli import environment, producer
from tests.support.redis_server import RedisServer
from tests.support.s3 import S3Server
from tests.support.watching import QUICK_SINK

pytestmark = pytest.mark.timeout(400)

INPUTS = REPOSITORY / "tests" / "data" / "inputs"
MANY = int(os.environ.get("HEADRACE_CASES_ROWS", "30000"))
"""Rows of the big files; the case asks for a million."""

MEMORY_MB = 300


def told(fleet: Fleet, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(fleet.producer(*arguments, "--json", check=False).stdout)
    return found


def test_b14_odd_ids_name_no_object_and_come_back_as_given(tmp_path: Path) -> None:
    file = INPUTS / "B14_id_chars.jsonl"
    given = [json.loads(line)["custom_id"] for line in file.read_bytes().splitlines()]
    with S3Server("moto") as moto:
        bucket = moto.new_bucket()
        env = {**moto.environment(), "AWS_ENDPOINT_URL_S3": moto.url}

        def names() -> list[str]:
            found = moto.client().list_objects_v2(Bucket=bucket).get("Contents", [])
            return [str(each["Key"]) for each in found]

        with Fleet(tmp_path, output=f"s3://{bucket}/odd", latency="0.01", env=env) as fleet:
            fleet.enqueue(file, "--run", "odd")
            fleet.start_group()
            fleet.start_sink("sink", *QUICK_SINK)
            fleet.wait(lambda: "odd/_SUCCESS" in names(), "the run to end")
            fleet.producer("export", "odd", "--to", "answers.jsonl")
            made = names()

    answers = (tmp_path / "answers.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["id"] for line in answers] == given
    for name in made:
        assert name.startswith("odd/")
        assert ".." not in name
        assert name.isascii()
        assert name.isprintable()
        assert len(name) < 200


def test_b15_an_inserted_row_is_one_new_request_after_the_run_has_ended(tmp_path: Path) -> None:
    with Fleet(tmp_path, latency="0.01") as fleet:
        fleet.enqueue(INPUTS / "B15_noid_v1.jsonl", "--run", "r")
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait_done("r")
        before = fleet.prompt_requests()

        again = told(fleet, *fleet.enqueue_arguments(INPUTS / "B15_noid_v2.jsonl"), "--run", "r")
        fleet.wait(lambda: fleet.counts("r").completed == 4, "the new row")
        fleet.wait_done("r")

        assert (again["enqueued"], again["already_done"]) == (1, 3)
        assert (before, fleet.prompt_requests()) == (3, 4)
        texts = Counter(str(row["messages"][0]["content"]) for row in fleet.rows())  # type: ignore[index]
        assert texts["Inserted first?"] == 1
        assert max(texts.values()) == 1


def test_b20_broken_tool_calls_fail_once_with_the_servers_words(tmp_path: Path) -> None:
    faults = tuple(
        f"bad_params:match={text}" for text in ('"arguments":"null"', '"arguments":"[]"', "{bad")
    )
    with Fleet(tmp_path, latency="0.01", faults=faults) as fleet:
        fleet.enqueue(INPUTS / "B20_tools.jsonl", "--run", "tools")
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        counts = fleet.wait_done("tools")

        assert (counts.completed, counts.failed) == (2, 3)
        failures = fleet.rows("failures")
        assert {each["id"] for each in failures} == {"w3", "w4", "w5"}
        assert {(each["attempts"], each["status"]) for each in failures} == {(1, 400)}
        assert all(each["message"] for each in failures)
        assert fleet.prompt_requests() == 5


def test_b21_an_image_that_is_too_large_for_the_server_fails_once(tmp_path: Path) -> None:
    image = "data:image/png;base64," + "QUFB" * (5 * 2**20 // 4)
    part = {"type": "image_url", "image_url": {"url": image}}
    row = {"id": "big", "messages": [{"role": "user", "content": [part]}]}
    file = tmp_path / "images.jsonl"
    file.write_text(json.dumps(row) + "\n" + '{"id":"small","prompt":"x"}\n')
    with Fleet(tmp_path, latency="0.01", faults=("status:status=413,match=QUFBQUFB",)) as fleet:
        fleet.enqueue(file)
        group = fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        counts = fleet.wait_done("images")

        assert (counts.completed, counts.failed) == (1, 1)
        [failure] = fleet.rows("failures")
        assert (failure["id"], failure["status"], failure["attempts"]) == ("big", 413, 1)
        assert "QUFBQUFB" not in group.tail()
        assert fleet.prompt_requests() == 2


# --- B22 -----------------------------------------------------------------------------------------


def peak_mb(*arguments: str | Path, cwd: Path, stdin: Path | None = None) -> tuple[int, Any]:
    """Run a producer command; its memory at most, and what it told."""
    with (stdin or Path(os.devnull)).open("rb") as source:
        command = [sys.executable, "-m", "producer", *map(str, arguments)]
        cost = measured.run(command, cwd=cwd, env=environment(), stdin=source)
    return cost.peak_bytes >> 20, json.loads(cost.out)


def many_rows(path: Path, form: str) -> Path:
    """The rows of the case, `count to 5` and the like, as JSON lines or as Parquet."""
    if form == "parquet":
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
        schema = arrow.schema([("id", arrow.string()), ("prompt", arrow.string())])
        with parquet.ParquetWriter(path, schema) as writer:
            # Some at a time: what this process holds counts as its child's.
            for first in range(0, MANY, 10_000):
                numbers = range(first, min(first + 10_000, MANY))
                columns = [
                    [f"m{number}" for number in numbers],
                    [f"count to {number % 97}" for number in numbers],
                ]
                writer.write_table(arrow.table(columns, schema=schema))
        return path
    with path.open("w") as file:
        for number in range(MANY):
            file.write(f'{{"id":"m{number}","prompt":"count to {number % 97}"}}\n')
    return path


@pytest.mark.parametrize("form", ["file", "pipe", "parquet"])
def test_b22_many_rows_take_bounded_memory(tmp_path: Path, form: str) -> None:
    path = many_rows(tmp_path / "many", form)
    source, stdin = ("-", path) if form == "pipe" else (path, None)
    with RedisServer("valkey") as server:
        used_mb, what = peak_mb(
            *("enqueue", source, "--run", "many", "--output", "out", "--max-tokens", "8"),
            *("--json", "--redis", server.url),
            cwd=tmp_path,
            stdin=stdin,
        )

    assert (what["ok"], what["total"]) == (MANY, MANY)
    assert used_mb < MEMORY_MB


@pytest.mark.parametrize("form", ["lines", "parquet"])
def test_b22_a_row_of_eight_mebibytes_is_accepted_in_bounded_memory(
    tmp_path: Path, form: str
) -> None:
    texts = ["small before", "word " * (8 * 2**20 // 5), "small after"]
    path = tmp_path / "long"
    if form == "parquet":
        arrow: Any = importlib.import_module("pyarrow")
        table = arrow.table({"id": ["big0", "big1", "big2"], "prompt": texts})
        importlib.import_module("pyarrow.parquet").write_table(table, path)
    else:
        rows = [{"id": f"big{number}", "prompt": text} for number, text in enumerate(texts)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    used_mb, what = peak_mb(
        *("enqueue", path, "--dry-run", "--max-tokens", "8", "--json"), cwd=tmp_path
    )

    assert (what["ok"], what["rejected"]) == (3, 0)
    # The interpreter, pyarrow, and the row a few times over.
    assert used_mb < MEMORY_MB


def test_b26_a_finished_run_has_nothing_left_to_queue(tmp_path: Path) -> None:
    file = INPUTS / "B15_noid_v1.jsonl"
    with Fleet(tmp_path, latency="0.01") as fleet:
        fleet.enqueue(file, "--run", "r")
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait_done("r")

        again = told(fleet, *fleet.enqueue_arguments(file), "--run", "r")

        assert (again["enqueued"], again["already_done"], again["total"]) == (0, 3, 3)
        assert fleet.prompt_requests() == 3


def test_b26_nothing_to_do_is_told_and_makes_no_run(tmp_path: Path) -> None:
    sources = [
        (INPUTS / "B26_empty.jsonl", 3, "no prompts"),
        (Path("-"), 3, "no prompts"),
        (Path("missing.jsonl"), 2, "missing.jsonl"),
        (tmp_path, 2, str(tmp_path)),
    ]
    with RedisServer("valkey") as server:
        for source, code, word in sources:
            ended = producer(
                *("enqueue", source, "--run", "r", "--output", "out", "--max-tokens", "8"),
                *("--redis", server.url),
                cwd=tmp_path,
            )
            assert (ended.code, ended.out) == (code, "")
            assert word in ended.err
        client = server.client()
        assert client.dbsize() == 0
        client.close()
