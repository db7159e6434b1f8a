"""Runs that keep token ids, from enqueue to verify, at simulated servers of several versions."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.fleet import Fleet
from tests.support.watching import QUICK_SINK, figures, of_prompts, timed, wait_state
from workers.simulator import text
from workers.simulator.launch import SimulatorProcess

pytestmark = pytest.mark.timeout(400)

RUN = "job"
CHAT: list[dict[str, Any]] = [
    {"id": "chat", "prompt": "say it"},
    {"id": "two", "prompt": "say it twice", "n": 2},
]
NATIVE: list[dict[str, Any]] = [
    {"id": "ids", "input_ids": [7, 8, 9]},
]
OTHERS: list[dict[str, Any]] = [
    {"id": "text", "text": "say it"},
    {"custom_id": "old", "url": "/v1/completions", "body": {"prompt": "say it"}},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return path


def status(fleet: Fleet) -> dict[str, Any]:
    told = json.loads(fleet.producer("status", RUN, "--json", check=False).stdout)
    assert isinstance(told, dict)
    return told


def check(row: dict[str, Any]) -> None:
    """Every choice holds what the simulator made for the request whose hash its text bears."""
    usage = row["usage"]
    for choice in row["choices"]:
        said = choice.get("reasoning_content") or choice["content"]
        [digest] = re.findall(r"^sim:([0-9a-f]{32}) ", said)
        per_choice = usage["completion_tokens"] // len(row["choices"])
        made = text.token_ids(digest, per_choice, choice=choice["index"])
        asked = text.token_ids(digest[4:], usage["prompt_tokens"])
        prompt = [7, 8, 9] if row["id"] == "ids" else json.loads(f"[{asked}]")
        assert choice["token_ids"] == prompt + json.loads(f"[{made}]")
        assert choice["loss_mask"] == [0] * usage["prompt_tokens"] + [1] * per_choice
        assert not choice.keys() & {"prompt_token_ids", "output_token_ids"}


@pytest.mark.parametrize("reasoning", [False, True])
def test_every_choice_of_every_route_holds_its_sequence_and_mask(
    tmp_path: Path, *, reasoning: bool
) -> None:
    prompts = write(tmp_path / "job.jsonl", CHAT + NATIVE + OTHERS)
    with Fleet(tmp_path, latency="0.01", answer_tokens="fixed:40", reasoning=reasoning) as fleet:
        fleet.enqueue(prompts, "--keep-token-ids")
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)

        counts = fleet.wait_done(RUN)

        rows: list[dict[str, Any]] = fleet.rows()
        assert (counts.completed, counts.retries) == (5, 0)
        assert {row["id"] for row in rows} == {"chat", "two", "ids", "text", "old"}
        for row in rows:
            check(row)
        [two] = [row for row in rows if row["id"] == "two"]
        first, second = (choice["token_ids"] for choice in two["choices"])
        assert first != second
        fleet.verify(RUN)
        to = tmp_path / "all.jsonl"
        fleet.producer("export", RUN, "--to", str(to))
        exported = [json.loads(line) for line in to.read_bytes().splitlines()]
        assert sorted(exported, key=lambda row: row["id"]) == sorted(
            rows, key=lambda row: row["id"]
        )


def test_a_version_without_them_gets_no_job_and_the_reason_names_it(tmp_path: Path) -> None:
    with Fleet(tmp_path, latency="0.01", sglang_version="0.5.12.post1") as fleet:
        fleet.enqueue(write(tmp_path / "job.jsonl", CHAT), "--keep-token-ids")
        fleet.start_group()

        wait_state(fleet, "wrong_model")

        assert "SGLang 0.5.12.post1 gives none at /v1/chat/completions" in (
            figures(fleet, "gpu0").detail
        )
        assert (of_prompts(fleet), fleet.counts(RUN).retries) == ([], 0)
        assert status(fleet)["status"] == "wrong_model"
        # It serves the runs that it can.
        fleet.output = str(tmp_path / "out-plain")
        fleet.enqueue(write(tmp_path / "plain.jsonl", CHAT))
        fleet.output = str(tmp_path / "out-ids")
        fleet.enqueue(write(tmp_path / "ids.jsonl", NATIVE), "--keep-token-ids")
        fleet.wait(lambda: fleet.counts("plain").completed == 2, "the plain run")
        fleet.wait(lambda: fleet.counts("ids").completed == 1, "the run of token ids")
        assert fleet.counts(RUN).queued == 2
        # And says so of the run that it leaves out, though it is at work for others.
        wait_state(fleet, "ready")
        told = status(fleet)
        assert told["status"] == "wrong_model"
        assert "gets no job of run job: it keeps token ids, and SGLang 0.5.12.post1" in (
            " ".join(told["warnings"])
        )
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait_done("ids")
        check(*fleet.rows())


def test_a_server_of_another_version_takes_what_the_old_one_left(tmp_path: Path) -> None:
    with (
        Fleet(tmp_path, latency="0.01", sglang_version="0.5.12.post1") as fleet,
        SimulatorProcess(servers=1, latency="0.01", answer_tokens="fixed:40") as newer,
    ):
        fleet.enqueue(write(tmp_path / "job.jsonl", CHAT + OTHERS), "--keep-token-ids")
        fleet.start_group()
        wait_state(fleet, "wrong_model")

        fleet.spawn(
            "gpu1", "workers", "start", "--gpu", "1", "--server", newer.urls[0], "--ramp", "10000"
        )
        fleet.start_sink("sink", *QUICK_SINK)
        counts = fleet.wait_done(RUN)

        assert (counts.completed, counts.retries) == (4, 0)
        for row in fleet.rows():
            check(row)


def test_each_turn_of_a_conversation_has_its_own_sequence(tmp_path: Path) -> None:
    turns = [{"from": "human" if at % 2 == 0 else "gpt", "value": f"word {at}"} for at in range(6)]
    rows = [{"id": "talk", "conversations": turns}]
    with Fleet(tmp_path, latency="0.01", answer_tokens="fixed:40") as fleet:
        fleet.enqueue(write(tmp_path / "job.jsonl", rows), "--keep-token-ids", "--turns", "all")
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)

        fleet.wait_done(RUN)

        row: Any = fleet.rows()[0]
        fleet.verify(RUN)
        [choice] = row["choices"]
        asked = [turn["usage"]["prompt_tokens"] for turn in row["turns"]]
        answers = [*row["turns"][:-1], choice]
        # Each turn's prompt holds the answers before it.
        assert asked == sorted(set(asked))
        for tokens, answer in zip(asked, answers, strict=True):
            assert answer["loss_mask"] == [0] * tokens + [1] * 40
            assert len(answer["token_ids"]) == tokens + 40


def test_a_server_that_comes_back_upgraded_gets_the_run(tmp_path: Path) -> None:
    # It looks often enough to see that the server was away.
    env = timed(load_every_s=0.1)
    with Fleet(tmp_path, latency="0.01", sglang_version="0.5.12.post1", env=env) as fleet:
        fleet.enqueue(write(tmp_path / "job.jsonl", CHAT), "--keep-token-ids")
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        wait_state(fleet, "wrong_model")

        fleet.simulator.kill()
        options = fleet.simulator._arguments
        options[options.index("--sglang-version") + 1] = "0.5.23"
        fleet.simulator.restart()
        counts = fleet.wait_done(RUN)

        assert (counts.completed, counts.retries) == (2, 0)
        for row in fleet.rows():
            assert row["server_version"] == "0.5.23"
            check(row)
