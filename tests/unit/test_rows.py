"""Rows read back as what they were made of, whatever an author or a model writes."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.models import (
    Choice,
    Claim,
    CompletionRow,
    Endpoint,
    FailureRow,
    Params,
    Usage,
)
from workers.client import rows
from workers.client.answers import Answer
from workers.client.requests import build_request, params_hash, read_prompt
from workers.client.rows import (
    Completion,
    Failure,
    Origin,
    RowTooLargeError,
    appended,
    completion_row,
    failure_row,
)

ORIGIN = Origin(server="http://127.0.0.1:30000", model="served", server_version="0.5.23")
NOW = "2026-11-30T07:00:00.000+00:00"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def claim_of(prompt: bytes, **own: Any) -> Claim:
    values: dict[str, Any] = {
        "run": "pile",
        "uid": "0" * 32,
        "key": bytes(range(16)),
        "fingerprint": bytes(range(8)),
        "try_": 2,
        "attempts": 1,
        "deaths": 0,
        "lost": 0,
        "prompt": prompt,
    }
    return Claim(**(values | own))


def prompt_json(body: dict[str, Any], endpoint: Endpoint = "chat", **own: Any) -> bytes:
    values = {"id": "row-1", "line": 7, "source": "prompts.jsonl", "sample": 3}
    return json.dumps({**values, "endpoint": endpoint, "body": body, **own}).encode()


def answer_of(*contents: str | None, **own: Any) -> Answer:
    choices = [
        Choice(index=index, content=content, finish_reason="stop", **own)
        for index, content in enumerate(contents)
    ]
    return Answer(
        choices=choices,
        usage=Usage(prompt_tokens=3, completion_tokens=5),
        empty=False,
        truncated=False,
        reasoning_cut=False,
    )


def row_of(
    prompt: bytes,
    answer: Answer | None = None,
    *,
    messages: bytes | None = None,
    usage: Usage | None = None,
    flags: tuple[str, ...] = ("truncated",),
) -> bytes:
    raw = read_prompt(prompt)
    request = build_request(
        raw,
        Params(max_tokens=64, sampling={"temperature": 0.7, "seed": 1}),
        model="served",
        rid="epoch-0001",
        context_length=None,
    )
    done = Completion(
        request=request,
        answer=answer or answer_of("hi"),
        origin=ORIGIN,
        flags=flags,
        latency_s=1.25,
        completed_at=NOW,
        messages=messages,
        usage=usage,
    )
    return completion_row(claim_of(prompt), raw, done)


def read(row: bytes) -> CompletionRow:
    assert b"\n" not in row
    return msgspec.json.decode(row, type=CompletionRow)


def test_a_chat_row_is_the_conversation_with_the_answer_in_its_place() -> None:
    row = read(row_of(prompt_json({"messages": MESSAGES}, extra={"topic": "a"})))

    assert row.messages == [*MESSAGES, {"role": "assistant", "content": "hi"}]
    assert row.prompt is None
    assert (bytes(row.id), row.sample, row.line) == (b'"row-1"', 3, 7)
    assert (row.key, row.fingerprint) == (bytes(range(16)).hex(), bytes(range(8)).hex())
    assert (row.source, row.extra) == ("prompts.jsonl", {"topic": "a"})
    assert (row.try_, row.attempts, row.latency_s) == (2, 2, 1.25)
    assert (row.model, row.server_version) == ("served", "0.5.23")
    assert (row.server, row.completed_at) == ("http://127.0.0.1:30000", NOW)
    assert row.flags == ["truncated"]
    assert row.usage == Usage(prompt_tokens=3, completion_tokens=5)
    assert row.tools is None


def test_a_row_carries_its_parameters_as_sent_and_their_hash() -> None:
    row = read(row_of(prompt_json({"messages": MESSAGES, "temperature": 0})))

    assert row.params == {"temperature": 0, "seed": 4, "max_tokens": 64, "model": "served"}
    assert row.params_hash == params_hash(row.params)


def test_rows_with_other_parameters_have_other_hashes() -> None:
    hashes = {
        read(row_of(prompt_json({"messages": MESSAGES, "temperature": value}))).params_hash
        for value in (0, 0.5, 1)
    }

    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("endpoint", "body", "prompt"),
    [
        ("completions", {"prompt": "once"}, "once"),
        ("completions", {"prompt": [1, 2]}, [1, 2]),
        ("generate", {"text": "once"}, "once"),
        ("generate", {"input_ids": [1, 2, 3]}, [1, 2, 3]),
    ],
)
def test_other_rows_have_their_prompt_and_no_messages(
    endpoint: Endpoint, body: dict[str, Any], prompt: object
) -> None:
    row = read(row_of(prompt_json(body, endpoint)))

    assert row.messages is None
    assert row.prompt == prompt
    assert row.choices[0].content == "hi"


def test_a_chat_of_token_ids_alone_is_the_answer() -> None:
    row = read(row_of(prompt_json({"input_ids": [1, 2]})))

    assert row.messages == [{"role": "assistant", "content": "hi"}]


def test_every_choice_is_kept_and_the_first_goes_on() -> None:
    row = read(row_of(prompt_json({"messages": MESSAGES, "n": 2}), answer_of("one", "two")))

    assert [(each.index, each.content) for each in row.choices] == [(0, "one"), (1, "two")]
    assert row.messages is not None
    assert row.messages[-1]["content"] == "one"


def test_reasoning_and_tool_calls_stand_in_the_message() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = answer_of(None, reasoning_content="so", tool_calls=[call])
    row = read(row_of(prompt_json({"messages": MESSAGES}), answer))

    assert row.messages is not None
    assert row.messages[-1] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "so",
        "tool_calls": [call],
    }


def test_tools_are_kept_beside_the_messages() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = read(row_of(prompt_json({"messages": MESSAGES, "tools": tools})))

    assert row.tools == tools
    assert "tools" not in row.params


def test_earlier_turns_and_their_usage_take_the_prompts_place() -> None:
    turns = [*MESSAGES, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    row = read(
        row_of(
            prompt_json({"messages": MESSAGES}),
            messages=json.dumps(turns).encode(),
            usage=Usage(prompt_tokens=9, completion_tokens=8),
        )
    )

    assert row.messages == [*turns, {"role": "assistant", "content": "hi"}]
    assert row.usage.completion_tokens == 8


@pytest.mark.parametrize(
    "id_text", [b'"a"', b"1", b"1.0", b"1e3", b"-0", b"12345678901234567890123", b'"\\u00e9\\/"']
)
def test_an_id_is_spelled_as_given(id_text: bytes) -> None:
    prompt = b'{"id":%b,"line":1,"endpoint":"chat","body":{"messages":[]}}' % id_text

    assert row_of(prompt).startswith(b'{"id":%b,' % id_text)
    assert failure_row(claim_of(prompt), failure()).startswith(b'{"id":%b,' % id_text)


def test_content_keeps_its_bytes() -> None:
    messages = rb'[{"content":"\u00e9\/\u2028","n":1.0,"big":12345678901234567890123,"x":null}]'
    prompt = b'{"id":1,"line":1,"endpoint":"chat","body":{"messages":%b}}' % messages

    assert messages[:-1] in row_of(prompt)


conversations = st.lists(st.dictionaries(st.text(), json_values, max_size=3), max_size=4)
prompts = st.fixed_dictionaries(
    {
        "id": st.text() | st.integers(),
        "line": st.just(1),
        "source": st.text(),
        "endpoint": st.just("chat"),
        "extra": st.dictionaries(st.text(), json_values, max_size=3),
        "body": st.fixed_dictionaries({"messages": conversations}),
    }
)
answers = st.lists(st.text() | st.none(), min_size=1, max_size=3).flatmap(
    lambda contents: st.builds(
        lambda reasoning: answer_of(*contents, reasoning_content=reasoning), st.text() | st.none()
    )
)


@given(prompt=prompts, answer=answers, indent=st.sampled_from([None, 1]))
def test_a_row_reads_back_as_what_it_was_made_of(
    prompt: dict[str, Any], answer: Answer, indent: int | None
) -> None:
    row = row_of(json.dumps(prompt, indent=indent).encode(), answer)

    found = read(row)
    assert msgspec.json.decode(found.id) == prompt["id"]
    assert found.messages is not None
    assert found.messages[:-1] == prompt["body"]["messages"]
    assert found.messages[-1]["content"] == answer.choices[0].content
    assert found.extra == prompt["extra"]
    assert found.source == prompt["source"]
    assert found.choices == answer.choices
    # Readers that are not ours see the same.
    assert json.loads(row)["messages"] == found.messages


@given(
    values=st.lists(json_values, max_size=3), last=json_values, indent=st.sampled_from([None, 2])
)
def test_appending_is_what_a_reader_would_do(
    values: list[Any], last: Any, indent: int | None
) -> None:
    joined = appended(json.dumps(values, indent=indent).encode(), json.dumps(last).encode())

    assert json.loads(joined) == [*values, last]


def test_a_row_over_the_limit_is_refused() -> None:
    limit = rows.MAX_ROW_BYTES
    row_of(prompt_json({"messages": []}), answer_of("x" * (limit // 2 - 1000)))

    # The answer stands in its choice and in its message.
    with pytest.raises(RowTooLargeError) as refused:
        row_of(prompt_json({"messages": []}), answer_of("x" * (limit // 2)))
    assert refused.value.size_bytes > limit


# --- Failures ------------------------------------------------------------------------------------


def failure(**own: Any) -> Failure:
    values: dict[str, Any] = {
        "reason": "bad_request",
        "status": 400,
        "message": "no",
        "server": ORIGIN.server,
        "attempts": 2,
        "failed_at": NOW,
    }
    return Failure(**(values | own))


def read_failure(row: bytes) -> FailureRow:
    assert b"\n" not in row
    return msgspec.json.decode(row, type=FailureRow)


def test_a_failure_holds_the_whole_request_and_the_reason() -> None:
    prompt = prompt_json({"messages": MESSAGES})
    row = read_failure(failure_row(claim_of(prompt), failure()))

    assert json.loads(bytes(row.request)) == json.loads(prompt)
    assert (row.outcome, row.reason, row.status, row.message) == (
        "failed",
        "bad_request",
        400,
        "no",
    )
    assert (row.try_, row.attempts, row.failed_at) == (2, 2, NOW)
    assert (row.line, row.source, row.sample) == (7, "prompts.jsonl", 3)


def test_a_long_message_is_cut() -> None:
    row = failure_row(claim_of(prompt_json({"messages": []})), failure(message="é" * 5000))

    assert read_failure(row).message == "é" * 2000


@given(prompt=st.binary(max_size=200), message=st.text(), reason=st.text())
def test_a_prompt_that_cannot_be_read_still_has_its_failure(
    prompt: bytes, message: str, reason: str
) -> None:
    row = failure_row(claim_of(prompt), failure(message=message, reason=reason))

    found = read_failure(row)
    assert (bytes(found.id), found.line) == (b"null", 0)
    assert (found.message, found.reason) == (message[:2000], reason)
    assert msgspec.json.decode(found.request) == prompt.decode("utf-8", "replace")
