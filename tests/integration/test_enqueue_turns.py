"""`producer enqueue --turns all`: what is accepted, what contradicts the run, what repeats."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.models import InputRow, Prompt
from common.store.frames import decompress
from tests.support.producer_cli import Ended, producer
from tests.support.redis_server import RedisServer

Enqueue = Callable[..., Ended]

CHAT = {
    "id": "c",
    "conversations": [
        {"from": who, "value": f"{who} {turn}"} for turn in (1, 2) for who in ("human", "gpt")
    ],
}
CASES = Path(__file__).parents[1] / "data" / "inputs"


@pytest.fixture
def enqueue(tmp_path: Path, valkey: RedisServer) -> Enqueue:
    """Enqueue rows, or a file, to run r with output `out`."""

    def call(rows: list[dict[str, Any]] | Path, *flags: str) -> Ended:
        file = rows if isinstance(rows, Path) else tmp_path / "p.jsonl"
        if isinstance(rows, list):
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return producer(
            *("enqueue", file, "--run", "r", "--output", "out", "--json"),
            *("--max-tokens", "8", "--redis", valkey.url, *flags),
            cwd=tmp_path,
        )

    return call


def accepted(folder: Path) -> list[Prompt]:
    rows = [
        msgspec.json.decode(line, type=InputRow)
        for path in sorted((folder / "out" / "inputs").glob("*.zst"))
        for line in decompress(path.read_bytes()).splitlines()
    ]
    return [msgspec.json.decode(row.prompt, type=Prompt) for row in rows]


def test_a_conversation_is_one_prompt_with_a_place_for_each_answer(
    enqueue: Enqueue, tmp_path: Path
) -> None:
    ended = enqueue([CHAT, {"id": "s", "prompt": "one"}], "--turns", "all")

    assert (ended.code, ended.told["enqueued"]) == (0, 2), ended.err
    chat, single = accepted(tmp_path)
    assert (chat.turns, single.turns) == (2, 0)
    assert chat.body["messages"] == [
        {"role": "user", "content": "human 1"},
        None,
        {"role": "user", "content": "human 2"},
        None,
    ]


def test_the_same_call_again_adds_nothing_and_another_choice_of_turns_conflicts(
    enqueue: Enqueue,
) -> None:
    enqueue([CHAT], "--turns", "all")

    again = enqueue([CHAT], "--turns", "all")
    last = enqueue([CHAT], "--turns", "last")

    assert (again.code, again.told["already_queued"]) == (0, 1)
    assert last.code == 5


def test_each_sample_has_all_its_turns(enqueue: Enqueue, tmp_path: Path) -> None:
    ended = enqueue([CHAT], "--turns", "all", "--samples", "2")

    assert ended.code == 0, ended.err
    assert [(prompt.sample, prompt.turns) for prompt in accepted(tmp_path)] == [(0, 2), (1, 2)]


def test_several_choices_are_refused_as_a_flag(enqueue: Enqueue) -> None:
    ended = enqueue([CHAT], "--turns", "all", "--param", "n=2")

    assert ended.code == 2
    assert "n is not 1" in ended.err


def test_several_choices_are_refused_where_the_run_has_them(enqueue: Enqueue) -> None:
    assert enqueue([{"id": 1, "prompt": "x"}], "--param", "n=2").code == 0

    ended = enqueue([CHAT], "--turns", "all")

    assert ended.code == 5
    assert "n is not 1" in ended.err


@pytest.mark.parametrize(
    ("case", "ok", "rejected"),
    [
        ("B17_sharegpt.jsonl", 3, {"g3", "g4", "g5", "g6", "g8"}),
        ("B18_specforge.jsonl", 3, {"f2", "f5", "f6"}),
    ],
)
def test_odd_conversations_are_rejected_as_with_the_last_turn_alone(
    enqueue: Enqueue, case: str, ok: int, rejected: set[str]
) -> None:
    told = enqueue(CASES / case, "--turns", "all", "--dry-run").told

    assert told["ok"] == ok
    assert {reject["id"] for reject in told["rejects"]} == rejected
