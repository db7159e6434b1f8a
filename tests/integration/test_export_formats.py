"""`producer export --format F`: what readers find in the file, and what is said of the rest."""

import fcntl
import gzip
import json
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from common.store.directory import DirectoryStore
from producer.formats import FORMATS
from tests.support.finished_run import RUN, FinishedRun
from tests.support.odd_run import CALL, ODD, TOOLS, Case, OddRun, odd_cases, said
from tests.support.producer_cli import Ended, environment, producer, running
from tests.support.server_process import wait_until

Export = Callable[..., Ended]
CONVERSATIONS = ("specforge", "speculators", "sharegpt")


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "out")


def export(folder: Path, to: str, *flags: str) -> Ended:
    return producer("export", RUN, "--output", "out", "--to", to, *flags, cwd=folder)


def lines(path: Path) -> list[dict[str, Any]]:
    """Its lines, cut at line feeds alone."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def by_id(rows: list[dict[str, Any]], name: str = "id") -> dict[str, dict[str, Any]]:
    found = {row[name]: row for row in rows}
    assert len(found) == len(rows)
    return found


# --- openai --------------------------------------------------------------------------------------


def test_openai_lines_have_the_documented_shape(store: DirectoryStore, tmp_path: Path) -> None:
    OddRun(store)

    ended = export(tmp_path, "a.jsonl", "--format", "openai")

    assert ended.code == 0, ended
    rows = lines(tmp_path / "a.jsonl")
    assert [row["custom_id"] for row in rows] == [str(json.loads(case.id)) for case in odd_cases()]
    for row in rows:
        assert list(row) == ["id", "custom_id", "response", "error"]
        assert row["error"] is None
        assert row["response"]["status_code"] == 200
        body = row["response"]["body"]
        assert body["object"] == "chat.completion"
        assert type(body["created"]) is int
        assert body["usage"]["total_tokens"] == (
            body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
        )
        assert {choice["message"]["role"] for choice in body["choices"]} == {"assistant"}
    assert len({row["id"] for row in rows}) == len(rows)
    contents = {
        row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"]
        for row in rows
    }
    assert {name: contents[name] for name in ODD} == ODD
    assert "samples of a prompt have one custom_id" in ended.err
    assert 'ids 1 and "1"' in ended.err


def test_openai_answers_keep_tool_calls_reasoning_and_every_choice(
    store: DirectoryStore, tmp_path: Path
) -> None:
    wanted = ('"called"', '"thought"', '"two"')
    OddRun(store, [case for case in odd_cases() if case.id in wanted])

    export(tmp_path, "a.jsonl", "--format", "openai")

    found = by_id(lines(tmp_path / "a.jsonl"), "custom_id")
    choices = {name: row["response"]["body"]["choices"] for name, row in found.items()}
    assert choices["called"][0]["message"]["tool_calls"] == [CALL]
    assert choices["called"][0]["message"]["content"] is None
    assert choices["thought"][0]["message"]["reasoning_content"] == "hm"
    assert [choice["message"]["content"] for choice in choices["two"]] == ["first", "second"]
    assert [choice["index"] for choice in choices["two"]] == [0, 1]


def test_openai_completions_are_text_completions(store: DirectoryStore, tmp_path: Path) -> None:
    OddRun(
        store,
        [
            Case(id='"c"', question="go on", endpoint="completions", choices=[said(" and on")]),
            Case(id='"g"', question="go on", endpoint="generate", choices=[said(" and off")]),
        ],
    )

    assert export(tmp_path, "a.jsonl", "--format", "openai").code == 0

    bodies = [row["response"]["body"] for row in lines(tmp_path / "a.jsonl")]
    assert [body["object"] for body in bodies] == ["text_completion"] * 2
    assert [body["choices"][0]["text"] for body in bodies] == [" and on", " and off"]


def test_openai_failures_are_its_error_file(store: DirectoryStore, tmp_path: Path) -> None:
    run = FinishedRun(store, fails=[4, 20])
    run.tamper(
        next(m.seq for m in run.manifests() if m.failures),
        "failures",
        lambda rows: [row.replace(b'"status":400', b'"status":null') for row in rows],
        mend=True,
    )

    ended = export(tmp_path, "a.jsonl", "--format", "openai", "--failures", "e.jsonl")

    assert ended.code == 1
    rows = lines(tmp_path / "e.jsonl")
    assert {row["custom_id"] for row in rows} == {"4", "20"}
    assert all(list(row) == ["id", "custom_id", "response", "error"] for row in rows)
    told = [row for row in rows if row["response"] is None]
    asked = [row for row in rows if row["response"] is not None]
    assert [row["error"] for row in told] == [{"code": "bad_request", "message": "no"}]
    assert [row["response"]["status_code"] for row in asked] == [400]
    assert asked[0]["response"]["body"]["error"]["message"] == "no"
    assert asked[0]["error"] is None
    assert len(lines(tmp_path / "a.jsonl")) == 28


# --- Training files ------------------------------------------------------------------------------


def check_turns(turns: list[dict[str, Any]], *, role: str = "role") -> None:
    """Hold turns against what SpecForge's parser takes: else it drops or cuts the conversation."""
    speakers = [turn[role] for turn in turns]
    if speakers[0] == "system":
        speakers = speakers[1:]
    assert speakers[0] in {"user", "human"}
    answers = {"assistant", "gpt"}
    for last, this in pairwise(speakers):
        assert this not in answers or last in {"user", "human", "tool"}, speakers
        assert this != "tool" or last in answers | {"tool"}, speakers
    assert speakers[-1] in answers


@pytest.mark.parametrize("form", ["specforge", "speculators"])
def test_training_lines_have_what_the_loaders_take_and_no_more(
    store: DirectoryStore, tmp_path: Path, form: str
) -> None:
    OddRun(store)

    ended = export(tmp_path, "a.jsonl", "--format", form)

    assert ended.code == 0, ended
    assert "as 17 lines" in ended.err
    rows = lines(tmp_path / "a.jsonl")
    # SpecForge hands every other member of a line to the chat template.
    assert {tuple(row) for row in rows} == {("id", "conversations", "tools")}
    every = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id")
    members = {tuple(turn) for row in rows for turn in row["conversations"]}
    if form == "speculators":
        assert members == {every, (*every[:3], *every[4:])}
    else:
        assert members == {every}
    for row in rows:
        check_turns(row["conversations"])
        assert all(type(turn["content"]) is str for turn in row["conversations"])
        assert type(row["id"]) is str
    texts = {row["id"]: row["conversations"][-1]["content"] for row in rows}
    assert {name: texts[name] for name in ODD} == ODD
    assert [texts[name] for name in ("two", "two-choice1", "again", "again-sample1")] == [
        "first",
        "second",
        "sample 0",
        "sample 1",
    ]


def test_specforge_gets_reasoning_beside_the_text_and_calls_as_json_text(
    store: DirectoryStore, tmp_path: Path
) -> None:
    OddRun(store)

    export(tmp_path, "a.jsonl", "--format", "specforge")

    rows = {row["id"]: row for row in lines(tmp_path / "a.jsonl")}
    thought = rows["thought"]["conversations"][-1]
    assert (thought["content"], thought["reasoning_content"]) == ("so", "hm")
    assert thought["tool_calls"] == ""
    called = rows["called"]
    assert json.loads(called["conversations"][-1]["tool_calls"]) == [CALL]
    assert called["tools"] == json.dumps(TOOLS, separators=(",", ":"))
    assert rows["thought"]["tools"] == ""
    assert rows["went on"]["conversations"][2]["tool_call_id"] == "c1"


def test_speculators_gets_calls_as_lists(store: DirectoryStore, tmp_path: Path) -> None:
    OddRun(store)

    export(tmp_path, "a.jsonl", "--format", "speculators")

    rows = {row["id"]: row for row in lines(tmp_path / "a.jsonl")}
    assert rows["called"]["conversations"][-1]["tool_calls"] == [CALL]
    assert rows["thought"]["conversations"][-1]["tool_calls"] == []
    assert json.loads(rows["called"]["tools"]) == TOOLS


@pytest.mark.parametrize("form", ["specforge", "speculators"])
def test_a_plain_run_has_plain_lines(store: DirectoryStore, tmp_path: Path, form: str) -> None:
    FinishedRun(store)

    assert export(tmp_path, "a.jsonl", "--format", form).code == 0

    first = lines(tmp_path / "a.jsonl")[0]
    assert first == {
        "id": "0",
        "conversations": [
            {"role": "user", "content": "prompt 0 é"},
            {"role": "assistant", "content": "answer 0 "},
        ],
    }


def test_sharegpt_puts_reasoning_and_calls_into_the_text(
    store: DirectoryStore, tmp_path: Path
) -> None:
    OddRun(store)

    assert export(tmp_path, "a.jsonl", "--format", "sharegpt").code == 0

    rows = by_id([row for row in lines(tmp_path / "a.jsonl") if row["id"] != "1"])
    for row in rows.values():
        assert all(list(turn) == ["from", "value"] for turn in row["conversations"])
        check_turns(row["conversations"], role="from")
    last = {name: row["conversations"][-1]["value"] for name, row in rows.items()}
    assert {name: last[name] for name in ODD} == ODD
    assert last["thought"] == "<think>\nhm\n</think>\n\nso"
    assert last["called"] == ('<tool_call>\n{"name":"look","arguments":{"n": 1.50}}\n</tool_call>')
    assert [turn["from"] for turn in rows["went on"]["conversations"]] == [
        "human",
        "gpt",
        "tool",
        "human",
        "gpt",
    ]


@pytest.mark.parametrize("form", ["specforge", "speculators"])
def test_token_ids_take_the_place_of_conversations_in_a_run_that_keeps_them(
    store: DirectoryStore, tmp_path: Path, form: str
) -> None:
    run = FinishedRun(store, token_ids=True)

    assert export(tmp_path, "a.jsonl", "--format", form).code == 0
    assert export(tmp_path, "b.jsonl", "--format", form, "--no-token-ids").code == 0

    rows = lines(tmp_path / "a.jsonl")
    assert rows[1] == {
        "id": "row-1",
        "input_ids": list(range(9)),
        "loss_mask": [0, 0, 0, 1, 1, 1, 1, 1, 1],
    }
    assert len(rows) == run.prompts
    assert {tuple(row) for row in lines(tmp_path / "b.jsonl")} == {("id", "conversations")}


def test_token_ids_are_left_out_where_some_completions_lack_them(
    store: DirectoryStore, tmp_path: Path
) -> None:
    run = FinishedRun(store, token_ids=True)
    run.tamper(1, "shard", lambda rows: [without_ids(rows[0]), *rows[1:]], mend=True)

    ended = export(tmp_path, "a.jsonl", "--format", "specforge")

    assert ended.code == 0
    assert "1 completions have no token ids" in ended.err
    assert {tuple(row) for row in lines(tmp_path / "a.jsonl")} == {("id", "conversations")}


def without_ids(row: bytes) -> bytes:
    found = json.loads(row)
    del found["choices"][0]["token_ids"]
    return json.dumps(found).encode()


def test_text_to_complete_is_training_text_once_it_has_token_ids(
    store: DirectoryStore, tmp_path: Path
) -> None:
    FinishedRun(store, endpoint="generate", token_ids=True)

    assert export(tmp_path, "a.jsonl", "--format", "speculators").code == 0
    assert len(lines(tmp_path / "a.jsonl")) == 30


# --- What a format cannot hold -------------------------------------------------------------------


@pytest.mark.parametrize("form", CONVERSATIONS)
def test_what_is_no_conversation_is_left_out_and_counted(
    store: DirectoryStore, tmp_path: Path, form: str
) -> None:
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    OddRun(
        store,
        [
            Case(id='"a"', choices=[said("fine")]),
            Case(id='"parts"', question=[{"type": "text", "text": "x"}], choices=[said("fine")]),
            Case(id='"b"', question="go on", endpoint="completions", choices=[said("on")]),
            Case(id='"c"', question="go on", endpoint="generate", choices=[said("on")]),
            Case(id='"d"', question=image, choices=[said("a cat")]),
            Case(id='"e"', choices=[said("")]),
            Case(id='"f"', choices=[said(None, reasoning_content="hm, cut")]),
            Case(id='"g"', choices=[said(""), said("the second", 1)]),
        ],
    )

    ended = export(tmp_path, "a.jsonl", "--format", form)

    assert ended.code == 1
    assert "wrote 3 completions" in ended.err
    assert "2 have no conversation" in ended.err
    assert "1 hold content that is no text" in ended.err
    assert "2 have an answer without text" in ended.err
    assert "1 choices without text are left out" in ended.err
    assert [row["id"] for row in lines(tmp_path / "a.jsonl")] == ["a", "parts", "g-choice1"]
    assert export(tmp_path, "a.jsonl", "--format", form, "--partial").code == 0


@pytest.mark.parametrize("form", CONVERSATIONS)
def test_a_run_without_conversations_is_refused_and_gives_no_file(
    store: DirectoryStore, tmp_path: Path, form: str
) -> None:
    FinishedRun(store, endpoint="generate")

    ended = export(tmp_path, "a.jsonl", "--format", form)

    assert ended.code == 2
    assert "holds none of this run's 30 completions" in ended.err
    assert "--format jsonl" in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_every_format_has_an_example_in_the_help(tmp_path: Path) -> None:
    told = producer("export", "--help", cwd=tmp_path).out

    for form in FORMATS[1:]:
        assert f"--format {form} --to" in told


# --- Order, and files that are whole or not there ------------------------------------------------


def test_completion_order_is_that_of_the_result_streams(
    store: DirectoryStore, tmp_path: Path
) -> None:
    run = FinishedRun(store, fails=[3])

    export(tmp_path, "a.jsonl", "--order", "completed", "--failures", "f.jsonl")

    stored = [row for manifest in run.manifests() for row in run.rows(manifest.shard)]
    assert (tmp_path / "a.jsonl").read_bytes().splitlines() == stored
    assert len(stored) == 29


def test_stdout_takes_every_format(store: DirectoryStore, tmp_path: Path) -> None:
    FinishedRun(store)

    for form in FORMATS[:-1]:
        assert len(export(tmp_path, "-", "--format", form).out.splitlines()) == 30


def test_compression_goes_by_name_for_lines_and_is_refused_for_parquet(
    store: DirectoryStore, tmp_path: Path
) -> None:
    FinishedRun(store)

    assert export(tmp_path, "a.jsonl.gz", "--format", "sharegpt").code == 0
    refused = export(tmp_path, "a.parquet.gz", "--format", "parquet")

    assert len(gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes()).splitlines()) == 30
    assert refused.code == 2
    assert "ends in .parquet" in refused.err


def test_another_place_than_this_machine_is_refused_with_a_way_there(
    store: DirectoryStore, tmp_path: Path
) -> None:
    FinishedRun(store)

    ended = export(tmp_path, "s3://bucket/a.jsonl")

    assert ended.code == 2
    assert "--to -" in ended.err


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_full_disk_is_told_and_leaves_the_file_as_it_was(
    store: DirectoryStore, tmp_path: Path, form: str
) -> None:
    OddRun(store)
    to = tmp_path / "a.parquet"
    to.write_text("as before")

    # A limit on file sizes stands in for a disk: it needs no right to mount one. It cuts off the
    # interpreter's own caches as well, which every later process would stumble over.
    env = environment({"PYTHONDONTWRITEBYTECODE": "1"})
    done = subprocess.run(
        [
            *(sys.executable, "-m", "producer", "export", RUN),
            *("--output", "out", "--to", to.name, "--format", form),
        ],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900)),
    )

    assert done.returncode == 4, done
    assert "a.parquet cannot be written: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert to.read_text() == "as before"
    assert [path.name for path in tmp_path.glob(".*.part")] == []


def test_a_pipe_stays_one_and_a_link_leads_to_its_file(
    store: DirectoryStore, tmp_path: Path
) -> None:
    FinishedRun(store)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("a.jsonl")

    with running("export", RUN, "--output", "out", "--to", "pipe", cwd=tmp_path) as process:
        assert len((tmp_path / "pipe").read_bytes().splitlines()) == 30
        assert process.wait(30) == 0
    assert export(tmp_path, "link").code == 0

    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()
    assert len(lines(tmp_path / "a.jsonl")) == 30


def test_a_killed_export_leaves_no_file_under_the_name_and_the_next_clears_up(
    store: DirectoryStore, tmp_path: Path
) -> None:
    # Random text, so that gzip takes its time over it.
    texts = [random.Random(n).randbytes(250_000).hex() for n in range(16)]
    OddRun(store, [Case(id=str(n), choices=[said(text)]) for n, text in enumerate(texts)])
    arguments = ("export", RUN, "--output", "out", "--to", "a.jsonl.gz")

    def parts() -> list[Path]:
        return sorted(tmp_path.glob(".a.jsonl.gz.*.part"))

    # The part of a process that is at work: this one holds it.
    (held := tmp_path / ".a.jsonl.gz.1.part").touch()
    with held.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with running(*arguments, cwd=tmp_path) as process:
            wait_until(lambda: len(parts()) > 1, "a part file")
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert not (tmp_path / "a.jsonl.gz").exists()
        assert len(parts()) == 2

        assert export(tmp_path, "a.jsonl.gz").code == 0
        assert parts() == [held]
