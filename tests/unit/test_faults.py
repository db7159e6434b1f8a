"""Whose fault it is: the table of protocol.md §4, over recorded and made-up answers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.models import Endpoint, Params
from tests.support.scripted_server import answer
from workers.client.answers import BadAnswerError, read_answer
from workers.client.clamp import clamped_request
from workers.client.faults import (
    AnswerTooLargeError,
    AttemptTimeoutError,
    Kind,
    ServerAnswer,
    ServerGoneError,
    Verdict,
    after_probe,
    classify,
    wait_s,
)
from workers.client.requests import Request, build_request, read_prompt
from workers.client.tolerant import error_text

RECORDED = Path(__file__).parents[1] / "data" / "sglang_errors"
ERRORS = json.loads((RECORDED / "errors.json").read_text())
ANSWERS = {each["name"]: each for each in json.loads((RECORDED / "answers.json").read_text())}

# What a recorded refusal is, where it is not the prompt's plain fault.
SPECIAL = {
    "chat_too_long": (Kind.PROMPT, "context_overflow"),
    "completions_too_long": (Kind.PROMPT, "context_overflow"),
    "generate_too_long": (Kind.PROMPT, "context_overflow"),
    "chat_maxtokens_over_context": (Kind.PROMPT, "context_overflow"),
    "generate_maxtokens_over_context": (Kind.PROMPT, "context_overflow"),
    "chat_over_pool": (Kind.PROMPT, "context_overflow"),
    "generate_over_pool": (Kind.PROMPT, "context_overflow"),
    "retrieve_unknown_model": (Kind.CONFIG, "wrong_model"),
    "unknown_route": (Kind.CONFIG, "not_found"),
    "no_api_key": (Kind.CONFIG, "unauthorized"),
    "wrong_api_key": (Kind.CONFIG, "unauthorized"),
    "queue_full_chat": (Kind.LOAD, "server_full"),
    "queue_full_generate": (Kind.LOAD, "server_full"),
    "duplicate_rid": (Kind.NEW_RID, "duplicate_rid"),
}


def request(endpoint: Endpoint = "chat", **own: Any) -> Request:
    body = {"messages": [], **own} if endpoint == "chat" else {"text": "a", **own}
    prompt = json.dumps({"id": 1, "line": 1, "endpoint": endpoint, "body": body}).encode()
    return build_request(
        read_prompt(prompt), Params(max_tokens=8), model="m", rid="r" * 20, context_length=100
    )


def came(
    status: int, body: bytes = b"", *, headers: Mapping[str, str] | None = None
) -> ServerAnswer:
    return ServerAnswer(status=status, body=body, latency_s=1.0, headers=headers or {})


def verdict_of(status: int, body: bytes | str = b"", **headers: str) -> Verdict:
    raw = body.encode() if isinstance(body, str) else body
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return classify(request(), came(status, raw, headers=names))


@pytest.mark.parametrize("recorded", ERRORS, ids=lambda each: f"{each['name']}@{each['version']}")
def test_each_recorded_error_has_its_verdict(recorded: dict[str, Any]) -> None:
    verdict = verdict_of(recorded["status"], recorded["body"])

    plain = (
        (Kind.PROMPT, "bad_request") if recorded["status"] == 400 else (Kind.PROBE, "server_error")
    )
    assert (verdict.kind, verdict.reason) == SPECIAL.get(recorded["name"], plain)
    assert verdict.status == recorded["status"]
    assert verdict.message


@pytest.mark.parametrize(
    ("status", "body", "kind", "reason"),
    [
        (413, "too big", Kind.PROMPT, "too_large"),
        (422, '{"detail":[{"msg":"no"}]}', Kind.PROMPT, "bad_request"),
        (408, "", Kind.LOAD, "server_timeout"),
        (429, "", Kind.LOAD, "rate_limited"),
        (503, "", Kind.LOAD, "server_full"),
        (503, '{"message":"Request waiting timeout reached."}', Kind.LOAD, "server_full"),
        (503, '{"message":"Request running timeout reached."}', Kind.ANSWER, "server_timeout"),
        (403, '{"error":"Forbidden"}', Kind.CONFIG, "forbidden"),
        (405, '{"detail":"Method Not Allowed"}', Kind.CONFIG, "unexpected_status"),
        (307, "", Kind.CONFIG, "unexpected_status"),
        (402, "pay first", Kind.CONFIG, "unexpected_status"),
        (500, "Internal Server Error", Kind.PROBE, "server_error"),
        (502, "<html>bad gateway</html>", Kind.PROBE, "server_error"),
    ],
)
def test_each_status_has_its_verdict(status: int, body: str, kind: Kind, reason: str) -> None:
    verdict = verdict_of(status, body)

    assert (verdict.kind, verdict.reason) == (kind, reason)


def test_a_question_is_settled_by_a_probe() -> None:
    asked = verdict_of(500, "Out of memory even after retracting all other requests")
    late = classify(request(), AttemptTimeoutError("no answer within 600 s"))

    assert after_probe(asked, alive=True).kind is Kind.ANSWER
    assert after_probe(asked, alive=False).kind is Kind.SERVER
    assert late.kind is Kind.PROBE
    assert after_probe(late, alive=True).reason == "timeout"


def test_errors_without_an_answer() -> None:
    gone = classify(request(), ServerGoneError("reset"))
    refused = classify(request(), ServerGoneError("refused", reached=False))
    too_large = classify(request(), AnswerTooLargeError("64 MiB"))

    assert (gone.kind, gone.reason) == (Kind.SERVER, "server_gone")
    assert (refused.kind, refused.reason) == (Kind.SERVER, "refused")
    assert (too_large.kind, too_large.reason) == (Kind.ANSWER, "too_large")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error":{"message":"a"}}', "a"),
        (b'{"error":"b"}', "b"),
        (b'{"object":"error","message":"c","code":400}', "c"),
        (b'{"detail":"d"}', "d"),
        (b'{"detail":[{"msg":"e"}]}', '[{"msg":"e"}]'),
        (b'{"error":{"code":7}}', '{"code":7}'),
        (b"plain text\n", "plain text"),
        (b"<html>f</html>", "<html>f</html>"),
        (b'{"error":{"message":"cut', '{"error":{"message":"cut'),
        (b'{"error":"\\ud800"}', "\ufffd"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"", ""),
        (b"[]", "[]"),
    ],
)
def test_the_servers_words_are_found_in_any_shape(body: bytes, text: str) -> None:
    assert error_text(body) == text


@given(body=st.binary())
def test_any_body_gives_a_text_that_can_be_written(body: bytes) -> None:
    text = error_text(body)

    assert len(text.encode()) <= 4 * 2000


def test_a_long_text_is_cut() -> None:
    long = json.dumps({"error": {"message": "x" * 100_000}})

    assert len(verdict_of(400, long).message) == 2000


@pytest.mark.parametrize("depth", [10_000, 200_000])
def test_a_body_nested_too_deeply_is_text(depth: int) -> None:
    assert verdict_of(400, b"[" * depth).kind is Kind.PROMPT
    assert verdict_of(200, b"[" * depth).reason == "bad_response"


# --- 200 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("chat_0.5.23", ("truncated",)),
        ("chat_0.5.12", ("truncated",)),
        ("generate_0.5.23", ("truncated",)),
        ("generate_0.5.12", ("truncated",)),
        ("completions_0.5.23", ("truncated",)),
        ("n2_logprobs", ("truncated",)),
        ("stop_eos", ("empty",)),
        ("stop_string", ()),
        ("batch", ("truncated",)),
    ],
)
def test_each_recorded_answer_is_a_completion(name: str, flags: tuple[str, ...]) -> None:
    recorded = ANSWERS[name]
    verdict = classify(request(recorded["endpoint"]), came(200, recorded["body"].encode()))

    assert (verdict.kind, verdict.flags) == (Kind.COMPLETED, flags)


@pytest.mark.parametrize("name", ["chat_aborted", "generate_aborted"])
def test_an_aborted_answer_is_charged_not_stored(name: str) -> None:
    recorded = ANSWERS[name]
    verdict = classify(request(recorded["endpoint"]), came(200, recorded["body"].encode()))

    assert (verdict.kind, verdict.reason, verdict.answer) == (Kind.ANSWER, "aborted", None)


def test_two_choices_stay_two_and_their_tokens_are_counted_once() -> None:
    found = read_answer("chat", ANSWERS["n2_logprobs"]["body"].encode())

    assert [each.index for each in found.choices] == [0, 1]
    assert found.choices[0].logprobs["content"]
    assert found.usage.completion_tokens == 6
    assert found.usage.prompt_tokens == 13


def test_a_generate_list_sums_its_answers_and_counts_the_prompt_once() -> None:
    found = read_answer("generate", ANSWERS["batch"]["body"].encode(), output_ids=True)

    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (3, 8)
    assert found.choices[1].content == "IS NNTPORT27"
    assert found.choices[1].output_token_ids == [777, 3051, 1818, 3687]


def test_token_ids_of_generate_are_kept_only_when_asked_for() -> None:
    body = came(200, ANSWERS["generate_0.5.23"]["body"].encode())
    plain = classify(request("generate"), body).answer
    asked = classify(request("generate", return_token_ids=True), body).answer

    assert plain is not None
    assert plain.choices[0].output_token_ids is None
    assert asked is not None
    assert asked.choices[0].output_token_ids == [2010, 2896, 2101, 213, 1629, 2804, 1228, 1069]


def test_cached_tokens_are_counted() -> None:
    found = read_answer("chat", ANSWERS["cached"]["body"].encode())

    assert found.usage.cached_tokens == 14


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "bad_response"),
        (b"{}", "bad_response"),
        (b"null", "bad_response"),
        (b'{"choices":[]}', "bad_response"),
        (b'{"choices":null}', "bad_response"),
        (b'{"choices":[{"index":0}]}', "bad_response"),
        (b'{"choices":[{"index":0,"text":"completion"}]}', "bad_response"),
        (b'{"choices":[{"message":{"content":["parts"]}}]}', "bad_response"),
        (b'{"error":{"message":"x"}}', "bad_response"),
        (b'{"object":"error","message":"x"}', "bad_response"),
        (b"<!doctype html><title>login</title>", "bad_response"),
        (answer("half")[:-10], "bad_response"),
        (answer("x", finish_reason="abort"), "aborted"),
        (answer("x").replace(b'"matched_stop": null', b'"matched_stop": "NaN happened"'), "nan"),
        (answer("", tokens=0, finish_reason="length"), "empty_output"),
        (answer(None, tokens=0), "empty_output"),
    ],
)
def test_what_only_looks_like_an_answer_is_charged(body: bytes, reason: str) -> None:
    verdict = verdict_of(200, body)

    assert (verdict.kind, verdict.reason) == (Kind.ANSWER, reason)


@pytest.mark.parametrize("body", [b"{}", b'{"text":"x"}', b'{"error":"x"}', b"[]"])
def test_a_generate_answer_without_its_account_is_charged(body: bytes) -> None:
    verdict = classify(request("generate"), came(200, body))

    assert (verdict.kind, verdict.reason) == (Kind.ANSWER, "bad_response")


def test_nan_in_generate_is_charged() -> None:
    body = ANSWERS["generate_0.5.23"]["body"].replace(
        '{"type":"length","length":8}', '{"type":"stop","matched":"NaN happened"}'
    )
    verdict = classify(request("generate"), came(200, body.encode()))

    assert (verdict.kind, verdict.reason) == (Kind.ANSWER, "nan")


def test_thinking_cut_by_its_length_is_a_completion_that_says_so() -> None:
    body = answer(None, finish_reason="length", tokens=64, reasoning_content="so far")
    verdict = verdict_of(200, body)

    assert (verdict.kind, verdict.flags) == (Kind.COMPLETED, ("truncated", "reasoning_cut"))
    assert verdict.answer is not None
    assert verdict.answer.choices[0].content is None
    assert verdict.answer.choices[0].reasoning_content == "so far"


def test_a_tool_call_without_text_is_a_completion_and_not_empty() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    verdict = verdict_of(200, answer(None, finish_reason="tool_calls", tool_calls=[call]))

    assert (verdict.kind, verdict.flags) == (Kind.COMPLETED, ())
    assert verdict.answer is not None
    assert verdict.answer.choices[0].tool_calls == [call]


def test_a_model_that_ends_at_once_is_empty_but_complete() -> None:
    verdict = verdict_of(200, answer("", tokens=1))

    assert (verdict.kind, verdict.flags) == (Kind.COMPLETED, ("empty",))


def test_no_token_is_what_a_row_gets_that_asks_for_none() -> None:
    body = ANSWERS["zero_tokens"]["body"].encode()

    assert classify(request(), came(200, body)).reason == "empty_output"
    asked = classify(request(max_tokens=0), came(200, body))
    assert (asked.kind, asked.flags) == (Kind.COMPLETED, ("empty", "truncated"))


def test_a_clamped_request_says_so() -> None:
    prompt = b'{"id":1,"line":1,"endpoint":"chat","body":{"messages":[]}}'
    first = build_request(
        read_prompt(prompt),
        Params(max_tokens="context"),
        model="m",
        rid="r" * 20,
        context_length=100,
    )
    told = "maximum context length of 100 tokens. … 10 tokens from the input messages"
    second = clamped_request(first, 400, told.encode(), rid="s" * 20)

    assert second is not None
    assert classify(second, came(200, answer("x"))).flags == ("clamped",)


@pytest.mark.parametrize(
    ("body", "content"),
    [
        (answer("a PLACE b").replace(b"PLACE", b"\\ud800"), "a \ufffd b"),
        (answer("a PLACE").replace(b"PLACE", b"\\udfff"), "a \ufffd"),
        (answer("a PLACE b").replace(b"PLACE", b"\xed\xa0\x80"), "a \ufffd\ufffd\ufffd b"),
        (answer("a PLACE b").replace(b"PLACE", b"\xff"), "a \ufffd b"),
        (answer("a PLACE b").replace(b"PLACE", b"\\ud83d\\ude00"), "a 😀 b"),
        (answer("a b").replace(b'"id": "x"', b'"id": NaN'), "a b"),
    ],
)
def test_text_that_is_no_unicode_is_kept_with_replacement_characters(
    body: bytes, content: str
) -> None:
    found = read_answer("chat", body)

    assert found.choices[0].content == content


@given(body=st.binary() | st.text().map(str.encode))
def test_any_other_body_is_a_bad_answer(body: bytes) -> None:
    endpoints: tuple[Endpoint, ...] = ("chat", "completions", "generate")
    for endpoint in endpoints:
        with pytest.raises(BadAnswerError, match="bad_response"):
            read_answer(endpoint, body)


@given(status=st.integers(100, 999), body=st.binary(max_size=100), header=st.text(max_size=10))
def test_every_answer_has_a_verdict(status: int, body: bytes, header: str) -> None:
    verdict = classify(request(), came(status, body, headers={"retry-after": header}))

    assert verdict.kind is not Kind.COMPLETED
    assert verdict.reason


# --- Waiting -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "at_least_s", "at_most_s"),
    [("2", 2.0, 2.5), ("0", 0.5, 0.625), ("-3", 0.5, 0.625), ("99999", 300.0, 375.0)],
)
def test_retry_after_is_kept_to(header: str, at_least_s: float, at_most_s: float) -> None:
    verdict = verdict_of(503, "", retry_after=header)

    for jitter in (0.0, 0.5, 0.999):
        assert at_least_s <= wait_s(verdict, refusals=1, jitter=jitter) <= at_most_s


@pytest.mark.parametrize("header", ["", "soon", "nan", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_a_retry_after_that_is_no_number_is_left_aside(header: str) -> None:
    assert verdict_of(503, "", retry_after=header).retry_after_s is None


def test_waits_grow_with_each_refusal_up_to_half_a_minute() -> None:
    waits = [wait_s(verdict_of(503), refusals=n, jitter=1.0) for n in range(1, 60)]

    assert waits[:4] == [0.5, 1.0, 2.0, 4.0]
    assert waits == sorted(waits)
    assert max(waits) == 30.0


def test_waits_are_spread() -> None:
    assert wait_s(verdict_of(503), refusals=3, jitter=0.0) == 1.0
    assert wait_s(verdict_of(503), refusals=3, jitter=1.0) == 2.0
