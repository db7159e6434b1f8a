"""A prompt of several turns in its slot: each on the one before, kept, charged by itself."""

import json
from typing import Any

import msgspec
import pytest

from common.models import CompletionRow, FailureRow, Params, Result, Usage
from tests.support.scripted_server import answer
from tests.unit.test_serve import (
    EMPTY,
    LATE,
    RESET,
    Charger,
    Server,
    Slots,
    Turns,
    failure,
    job,
    serve,
)
from workers.client.faults import ServerAnswer
from workers.client.requests import read_prompt
from workers.prompt import serving
from workers.prompt.outcomes import Returned
from workers.prompt.turns import Conversation

SYSTEM, A, B, C = (
    {"role": role, "content": text}
    for role, text in (("system", "S"), ("user", "a"), ("user", "b"), ("user", "c"))
)
ASKED: list[Any] = [SYSTEM, A, None, B, None, C, None]


def prompt(messages: list[Any] = ASKED, **own: Any) -> bytes:
    body = {"messages": messages}
    members = {"id": "x", "line": 1, "endpoint": "chat", "body": body, "turns": 3, **own}
    return json.dumps(members).encode()


def said(text: str, **own: Any) -> ServerAnswer:
    return ServerAnswer(status=200, body=answer(text, **own), latency_s=0.25)


def talk(**claim: Any) -> Any:
    return job(prompt=prompt(), **claim)


def row_of(result: Result | Returned) -> CompletionRow:
    assert isinstance(result, Result)
    assert result.outcome == "completed", result.row
    return msgspec.json.decode(result.row, type=CompletionRow)


def asked(server: Server) -> list[Any]:
    return [msgspec.json.decode(request.members["messages"]) for request in server.requests]


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def kept_after(*texts: str) -> bytes:
    """What is kept after these turns."""
    store, slots = Turns(), Slots(len(texts) - 1)
    await serve(Server(*(said(text) for text in texts)), talk(), turns=store, slots=slots)
    return store.kept[-1]


async def test_each_turn_is_asked_on_the_answers_before_it() -> None:
    server = Server(said("1"), said("2"), said("3"))

    row = row_of(await serve(server, talk()))

    assert asked(server) == [
        [SYSTEM, A],
        [SYSTEM, A, assistant("1"), B],
        [SYSTEM, A, assistant("1"), B, assistant("2"), C],
    ]
    assert row.messages == [*asked(server)[-1], assistant("3")]
    assert [choice.content for choice in row.choices] == ["3"]
    assert len({request.rid for request in server.requests}) == 3


async def test_the_row_tells_of_each_turn_and_adds_them_up() -> None:
    cut = said("2", finish_reason="length")

    result = await serve(Server(EMPTY, said("1"), cut, EMPTY, EMPTY, said("3")), talk())

    row = row_of(result)
    assert isinstance(result, Result)
    assert [(turn.at, turn.finish_reason, turn.attempts) for turn in row.turns] == [
        (2, "stop", 2),
        (4, "length", 1),
        (6, "stop", 3),
    ]
    assert row.attempts == 6
    assert (row.flags, row.turns[1].flags) == (["truncated"], ["truncated"])
    assert result.flags == ("truncated",)
    assert row.latency_s == 0.75
    each = row.turns[0].usage
    assert row.usage == Usage(
        prompt_tokens=3 * each.prompt_tokens, completion_tokens=3 * each.completion_tokens
    )
    assert (result.input_tokens, result.output_tokens) == (
        row.usage.prompt_tokens,
        row.usage.completion_tokens,
    )


async def test_a_finished_turn_is_kept_before_the_next_begins() -> None:
    server, store = Server(said("1"), said("2"), said("3")), Turns()
    kept: list[int] = []
    server.before = lambda: kept.append(len(store.kept))

    await serve(server, talk(), turns=store)

    assert kept == [0, 1, 2]
    # Each text goes on behind the one before: that is how Redis tells.
    assert store.kept[1].startswith(store.kept[0])


async def test_a_job_with_kept_turns_goes_on_behind_them() -> None:
    kept = await kept_after("1", "2")
    server = Server(said("3"))

    row = row_of(await serve(server, talk(turns=kept)))

    assert asked(server) == [[SYSTEM, A, assistant("1"), B, assistant("2"), C]]
    assert row.messages == [*asked(server)[0], assistant("3")]
    assert len(row.turns) == 3


async def test_what_is_kept_goes_on_byte_for_byte() -> None:
    both, one = await kept_after("1", "2"), await kept_after("1")
    store = Turns()

    await serve(Server(said("2")), talk(turns=one), turns=store, slots=Slots(0))

    assert one == store.kept[0][: len(one)]
    assert [line["message"] for line in map(json.loads, both.splitlines())] == [
        assistant("1"),
        assistant("2"),
    ]


async def test_attempts_are_counted_for_each_turn() -> None:
    server, charger = Server(EMPTY, EMPTY, said("1"), EMPTY, EMPTY, said("2"), EMPTY), Charger()

    result = await serve(server, talk(), charger)

    assert failure(result) == ("bad_response", 3)
    assert [before for _, before in charger.charged] == [0, 1, 0, 1, 0, 1, 2]
    assert isinstance(result, Result)
    assert msgspec.json.decode(result.row, type=FailureRow).turn == 3


async def test_a_failure_in_the_first_turn_says_so() -> None:
    result = await serve(Server(EMPTY), talk())

    assert isinstance(result, Result)
    row = msgspec.json.decode(result.row, type=FailureRow)
    assert row.turn == 1
    assert msgspec.json.decode(row.request)["body"]["messages"] == ASKED


@pytest.mark.parametrize("word", ["other", "stolen", "changed", "gone", "forgotten"])
async def test_a_prompt_that_another_one_serves_is_let_go(word: str) -> None:
    server = Server(said("1"))

    assert await serve(server, talk(), turns=Turns(word)) == Returned()

    assert len(server.requests) == 1


@pytest.mark.parametrize("word", ["away", "unknown", "untaught", "removed", "repeated"])
async def test_it_goes_on_while_redis_cannot_keep_its_turns(word: str) -> None:
    store = Turns(word)

    row_of(await serve(Server(said("1"), said("2"), said("3")), talk(), turns=store))

    assert [len(kept.splitlines()) for kept in store.kept] == [1, 2]


async def test_no_turn_begins_when_none_may() -> None:
    server, store = Server(said("1")), Turns()

    assert await serve(server, talk(), turns=store, slots=Slots(1)) == Returned()

    assert [len(kept.splitlines()) for kept in store.kept] == [1, 2]


async def test_a_turn_that_comes_while_the_job_is_leaving_is_kept() -> None:
    server, store, opened = Server(said("1")), Turns(), talk()
    server.before = lambda: setattr(opened, "leaving", True)

    assert await serve(server, opened, turns=store) == Returned()

    assert len(store.kept) == 1


async def test_a_server_death_in_a_later_turn_gives_back() -> None:
    store = Turns()

    assert await serve(Server(said("1"), RESET), talk(), turns=store) == Returned(
        died=True, fault="reset"
    )

    assert len(store.kept) == 1


async def test_a_time_limit_in_a_later_turn_is_that_turns() -> None:
    row = row_of(await serve(Server(said("1"), LATE, said("2"), said("3")), talk()))

    assert [turn.attempts for turn in row.turns] == [1, 2, 1]


async def test_a_conversation_too_long_for_a_row_fails_at_that_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "MAX_ROW_BYTES", 1000)
    server, store = Server(said("1"), said("x" * 1000)), Turns()

    assert failure(await serve(server, talk(), turns=store))[0] == "too_large"

    assert len(store.kept) == 1
    assert len(server.requests) == 2


async def test_reasoning_is_kept_and_sent_in_its_turn() -> None:
    message = {"role": "assistant", "content": "1", "reasoning_content": "why"}
    body = {
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    }
    first = ServerAnswer(status=200, body=json.dumps(body).encode(), latency_s=0.1)
    server = Server(first, said("2"), said("3"))

    row = row_of(await serve(server, talk()))

    assert row.messages is not None
    assert row.messages[2] == asked(server)[1][2] == message


async def test_the_context_left_is_found_for_each_turn() -> None:
    text = (
        "Requested token count exceeds the model's maximum context length of 100 tokens. You "
        "requested a total of 149 tokens: 50 tokens from the input messages and 99 tokens for "
        "the completion."
    )
    refused = ServerAnswer(status=400, body=json.dumps({"message": text}).encode(), latency_s=0.0)
    server = Server(refused, said("1"), refused, said("2"), refused, said("3"))

    row = row_of(await serve(server, talk(), params=Params(max_tokens="context")))

    assert [request.max_tokens for request in server.requests] == [999, 49] * 3
    assert row.flags == ["clamped"]


@pytest.mark.parametrize(
    "claim",
    [
        {"prompt": prompt([A, None, B])},
        {"prompt": prompt(turns=2)},
        {"prompt": prompt([])},
        {"turns": b"no JSON\n"},
        {"turns": b'{"message":{},"turn":{}}\n'},
    ],
)
async def test_turns_that_cannot_be_read_fail_their_prompt_alone(claim: dict[str, Any]) -> None:
    server = Server(said("1"))

    assert failure(await serve(server, job(**{"prompt": prompt(), **claim}))) == ("unreadable", 0)

    assert server.requests == []


async def test_more_kept_turns_than_there_are_are_not_believed() -> None:
    kept = await kept_after("1", "2")

    result = await serve(Server(said("1")), talk(turns=kept + kept.splitlines()[0] + b"\n"))

    assert failure(result) == ("unreadable", 0)


def test_messages_are_copied_as_they_were_written() -> None:
    raw = (
        rb'[{"role":"user","content":"\u00e9","n":1.0}, null ,{"role":"user","content":"b"},null]'
    )
    text = b'{"id":1,"line":1,"endpoint":"chat","turns":2,"body":{"messages":%b}}' % raw

    found = Conversation(read_prompt(text))

    assert found.messages == rb'[{"role":"user","content":"\u00e9","n":1.0}]'
