"""Formats, without a run: what decides about a line."""

from typing import Any

import msgspec
import pytest

from common.errors import StoreDamagedError
from common.models import Manifest, PartFile
from producer.export import _starts
from producer.formats import FORMATS, make_format
from producer.formats.base import ExportedRow, UnfitError, id_text, read_row
from producer.formats.conversation import conversations
from producer.formats.token_ids import token_lines
from producer.outfile import OutFile


def row(**members: Any) -> ExportedRow:
    asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    base = {"id": "a", "key": "k", "messages": asked, "choices": [{"index": 0, "content": "!"}]}
    return read_row(msgspec.json.encode({**base, **members}))


@pytest.mark.parametrize(
    ("raw", "text"), [(b'"1"', "1"), (b"1", "1"), (b"1.50", "1.50"), (b'"a\\u00e9"', "aé")]
)
def test_an_id_is_text_as_it_was_written(raw: bytes, text: str) -> None:
    assert id_text(msgspec.Raw(raw)) == text


def test_samples_and_choices_have_names_of_their_own() -> None:
    choices = [{"index": number, "content": "!"} for number in range(2)]

    found = conversations(row(sample=3, choices=choices))

    assert [one.id for one in found] == ["a-sample3", "a-sample3-choice1"]


def test_roles_become_those_that_trainers_know() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "function", "name": "f", "content": "r"},
        {"role": "assistant", "content": "!"},
    ]

    [found] = conversations(row(messages=messages))

    assert [turn.role for turn in found.turns] == ["system", "user", "tool", "assistant"]
    assert found.turns[1].content == "ab"


def test_arguments_of_calls_become_text() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": {"n": 1}}, "index": 0}

    [found] = conversations(row(choices=[{"content": None, "tool_calls": [call]}]))

    assert found.turns[-1].tool_calls == [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"n":1}'}}
    ]


@pytest.mark.parametrize(
    "members",
    [
        {"messages": None},
        {"messages": [{"role": "assistant", "content": "!"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, {}]},
        {"messages": [{"role": "user", "content": 7}, {}]},
        {"choices": [{"content": ""}]},
        {"choices": [{"content": "!", "tool_calls": ["odd"]}]},
    ],
)
def test_what_is_no_conversation_is_unfit(members: dict[str, Any]) -> None:
    with pytest.raises(UnfitError):
        conversations(row(**members))


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in {"jsonl", "parquet"}])
def test_a_row_that_is_none_is_damage(name: str) -> None:
    form, written = make_format(name), list[bytes]()

    with pytest.raises(StoreDamagedError, match="no completion"):
        form.write(OutFile(written.append), [b"[]"])


def test_each_generated_turn_has_its_own_tokens() -> None:
    turns = [
        {"at": 1, "token_ids": [1, 2], "loss_mask": [0, 1]},
        {"at": 3, "token_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 0, 1]},
        {"at": 5},
    ]
    last = {"content": "!", "token_ids": [7, 8, 9], "loss_mask": [0, 0, 1]}

    assert token_lines(row(turns=turns, choices=[last])) == [
        {"id": "a-turn0", "input_ids": [1, 2], "loss_mask": [0, 1]},
        {"id": "a-turn1", "input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 0, 1]},
        {"id": "a", "input_ids": [7, 8, 9], "loss_mask": [0, 0, 1]},
    ]


@pytest.mark.parametrize(
    ("choice", "made"),
    [
        ({"content": "!"}, None),
        ({"token_ids": [1, 2], "loss_mask": [1]}, None),
        ({"token_ids": [1, 2], "loss_mask": [0, 0]}, []),
    ],
)
def test_without_generated_tokens_there_is_no_line(choice: dict[str, Any], made: Any) -> None:
    assert token_lines(row(choices=[choice])) == made


def test_a_failure_that_is_none_is_damage() -> None:
    with pytest.raises(StoreDamagedError, match="no failure"):
        make_format("openai").failure(b"{}")


def test_shards_of_several_partitions_come_by_their_first_entries() -> None:
    def manifest(partition: int, seq: int, first: str, rows: int) -> Manifest:
        keys = PartFile(name="", rows=rows, bytes=0, sha256="") if rows else None
        return Manifest(uid="u", partition=partition, seq=seq, first=first, keys=keys)

    found = _starts(
        [
            manifest(0, 1, "100-0", 5),
            manifest(0, 2, "", 3),
            manifest(0, 3, "300-0", 2),
            manifest(1, 1, "50-0", 7),
            manifest(1, 2, "", 0),
            manifest(1, 3, "200-0", 4),
        ]
    )

    assert found == [7, 12, 19, 0, 7, 15]


def failure(**members: Any) -> bytes:
    base = {"id": 7, "sample": 0, "key": "k", "fingerprint": "f", "line": 1, "source": ""}
    ends = {"outcome": "failed", "reason": "timeout", "status": None, "message": "", "server": ""}
    last = {"try": 2, "attempts": 3, "failed_at": "", "request": {}}
    return msgspec.json.encode({**base, **ends, **last, **members})


@pytest.mark.parametrize(
    ("members", "error"),
    [
        ({}, {"code": "timeout", "message": "timeout"}),
        ({"message": "m"}, {"code": "timeout", "message": "m"}),
        # A 200 that was no completion is no HTTP error.
        ({"status": 200, "reason": "nan"}, {"code": "nan", "message": "nan"}),
        (
            {"outcome": "cancelled", "reason": "cancelled"},
            {"code": "batch_cancelled", "message": "cancelled"},
        ),
    ],
)
def test_a_failure_without_an_http_error_has_a_code(
    members: dict[str, Any], error: dict[str, str]
) -> None:
    line = msgspec.json.decode(make_format("openai").failure(failure(**members)))

    assert line == {"id": "batch_req_k", "custom_id": "7", "response": None, "error": error}


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (503, "server_error")]
)
def test_an_http_error_stands_in_the_response(status: int, kind: str) -> None:
    row = failure(status=status, message="m", reason="r")

    line = msgspec.json.decode(make_format("openai").failure(row))

    assert line["error"] is None
    assert line["response"] == {
        "status_code": status,
        "request_id": "k-2",
        "body": {"error": {"message": "m", "type": kind, "param": None, "code": "r"}},
    }
