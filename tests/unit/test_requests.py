"""What is sent: the row's own values first, every content byte as it was given."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import ServerUnusableError
from common.models import Endpoint, Params, Prompt
from workers.client.clamp import clamped_request
from workers.client.requests import Request, build_request, params_hash, read_prompt

CONTENT: dict[Endpoint, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hello"}]},
    "completions": {"prompt": "hello"},
    "generate": {"text": "hello"},
}
OVER_CONTEXT = (
    "Requested token count exceeds the model's maximum context length of 4096 tokens. You "
    "requested a total of 5415 tokens: 1320 tokens from the input messages and 4095 tokens for "
    "the completion. Please reduce the number of tokens in the input messages or the completion "
    "to fit within the limit."
)
CHAT_REFUSAL = json.dumps(
    {"object": "error", "message": OVER_CONTEXT, "type": "BadRequestError", "code": 400}
).encode()
GENERATE_REFUSAL = json.dumps({"error": {"message": OVER_CONTEXT}}).encode()


def build(
    body: dict[str, Any] | bytes,
    params: Params | None = None,
    *,
    endpoint: Endpoint = "chat",
    sample: int = 0,
    context_length: int | None = 4096,
) -> Request:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    prompt = b'{"id":"a","line":1,"endpoint":"%b","sample":%d,"body":%b}' % (
        endpoint.encode(),
        sample,
        raw,
    )
    return build_request(
        read_prompt(prompt),
        params or Params(max_tokens=100),
        model="served",
        rid="epoch-0001",
        context_length=context_length,
    )


def sent(request: Request) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(request.content)
    return found


def test_a_chat_request_gets_a_limit_a_model_an_id_and_no_stream() -> None:
    request = build(CONTENT["chat"])

    assert request.path == "/v1/chat/completions"
    assert sent(request) == {
        **CONTENT["chat"],
        "max_tokens": 100,
        "model": "served",
        "rid": "epoch-0001",
        "stream": False,
    }
    assert request.max_tokens == 100


def test_a_generate_request_gets_its_limit_in_the_sampling_params() -> None:
    request = build(CONTENT["generate"], endpoint="generate")

    assert request.path == "/generate"
    assert sent(request) == {
        "text": "hello",
        "sampling_params": {"max_new_tokens": 100},
        "rid": "epoch-0001",
        "stream": False,
    }


@pytest.mark.parametrize(
    ("name", "own", "flag"),
    [
        ("temperature", 0, 0.7),
        ("top_p", 0.0, 0.9),
        ("ignore_eos", False, True),
        ("stop", [], ["x"]),
        ("stop", None, ["x"]),
        ("seed", 0, 42),
        ("max_tokens", 0, 100),
        ("max_tokens", 7, 100),
    ],
)
def test_the_rows_value_wins_zero_and_false_included(name: str, own: Any, flag: Any) -> None:
    sampling = {} if name == "max_tokens" else {name: flag}
    request = build({**CONTENT["chat"], name: own}, Params(max_tokens=100, sampling=sampling))

    assert sent(request)[name] == own
    assert type(sent(request)[name]) is type(own)


def test_a_null_limit_is_no_limit() -> None:
    assert sent(build({**CONTENT["chat"], "max_tokens": None}))["max_tokens"] == 100


def test_the_newer_name_of_the_limit_is_respected() -> None:
    request = build({**CONTENT["chat"], "max_completion_tokens": 5})

    assert sent(request)["max_completion_tokens"] == 5
    assert "max_tokens" not in sent(request)
    assert request.max_tokens == 5


def test_flags_are_translated_for_generate() -> None:
    sampling = {
        "temperature": 0.5,
        "seed": 3,
        "min_tokens": 2,
        "stop": ["x"],
        "logprobs": True,
        "priority": 1,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    request = build(
        CONTENT["generate"], Params(max_tokens=9, sampling=sampling), endpoint="generate"
    )

    assert sent(request)["sampling_params"] == {
        "temperature": 0.5,
        "sampling_seed": 3,
        "min_new_tokens": 2,
        "stop": ["x"],
        "max_new_tokens": 9,
    }
    assert sent(request)["return_logprob"] is True
    assert sent(request)["priority"] == 1
    assert "chat_template_kwargs" not in sent(request)


def test_a_generate_rows_sampling_params_win_by_their_own_names() -> None:
    own = {"max_new_tokens": 3, "sampling_seed": 0, "temperature": 0}
    params = Params(max_tokens=9, sampling={"seed": 5, "temperature": 1.0, "top_k": 4})
    request = build({"text": "a", "sampling_params": own}, params, endpoint="generate")

    assert sent(request)["sampling_params"] == {**own, "top_k": 4}
    assert request.max_tokens == 3


def test_sampling_params_that_are_no_object_are_a_fault_of_the_row() -> None:
    with pytest.raises(ValueError, match="Expected `object`"):
        build({"text": "a", "sampling_params": [{}]}, endpoint="generate")


@pytest.mark.parametrize(("seed", "sample", "expected"), [(7, 0, 7), (7, 3, 10), (0, 1, 1)])
def test_a_sample_sends_the_seed_plus_its_number(seed: int, sample: int, expected: int) -> None:
    by_flag = build(CONTENT["chat"], Params(max_tokens=1, sampling={"seed": seed}), sample=sample)
    by_row = build({**CONTENT["chat"], "seed": seed}, sample=sample)
    generate = build(
        {"text": "a", "sampling_params": {"sampling_seed": seed}},
        endpoint="generate",
        sample=sample,
    )

    assert sent(by_flag)["seed"] == expected
    assert sent(by_row)["seed"] == expected
    assert sent(generate)["sampling_params"]["sampling_seed"] == expected


def test_a_sample_without_a_seed_sends_none() -> None:
    assert "seed" not in sent(build(CONTENT["chat"], sample=2))


def test_stream_options_go_with_the_stream_that_is_switched_off() -> None:
    request = build({**CONTENT["chat"], "stream": True, "stream_options": {"include_usage": True}})

    assert sent(request)["stream"] is False
    assert "stream_options" not in sent(request)


@pytest.mark.parametrize(
    "messages",
    [
        rb'[{"role":"user","content":null}]',
        rb'[{"content":"\u00e9\/","role":"user","n":1.0,"m":1e2,"k":12345678901234567890123}]',
        rb'[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:x"}}]}]',
        b'[{"role":"assistant","content":null,"tool_calls":[{"id":"1"}]},{"role":"tool"}]',
    ],
)
def test_content_is_passed_on_byte_for_byte(messages: bytes) -> None:
    tools = b'[{"type":"function","function":{"name":"f","parameters":{}}}]'
    request = build(b'{"messages":%b,"tools":%b}' % (messages, tools))

    assert messages in request.content
    assert tools in request.content
    assert "tools" not in request.params
    assert "messages" not in request.params


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    extra=st.dictionaries(st.text(), json_values, max_size=5),
    endpoint=st.sampled_from(["chat", "completions", "generate"]),
)
@example(extra={"rid": 1, "stream": True, "model": None}, endpoint="chat")
def test_whatever_a_row_has_arrives_but_for_what_is_ours(
    extra: dict[str, Any], endpoint: Endpoint
) -> None:
    for limit in ("sampling_params", "max_tokens", "max_completion_tokens"):
        extra.pop(limit, None)
    body = CONTENT[endpoint] | {k: v for k, v in extra.items() if k not in CONTENT[endpoint]}
    found = sent(build(body, endpoint=endpoint))

    ours = {"rid", "stream", "stream_options", "model"}
    assert {k: v for k, v in found.items() if k in body and k not in ours} == {
        k: v for k, v in body.items() if k not in ours
    }
    assert found["rid"] == "epoch-0001"
    assert found["stream"] is False


def test_what_is_recorded_as_sent_is_what_is_sent() -> None:
    request = build(
        {**CONTENT["chat"], "temperature": 0, "seed": 1}, Params(max_tokens=5, sampling={"n": 2})
    )
    params = json.loads(msgspec.json.encode(request.params))

    assert params == {
        "temperature": 0,
        "seed": 1,
        "n": 2,
        "max_tokens": 5,
        "model": "served",
    }


def test_equal_parameters_have_equal_hashes_whatever_their_order() -> None:
    assert params_hash({"a": 1, "b": {"c": 2, "d": 3}}) == params_hash(
        {"b": {"d": 3, "c": 2}, "a": 1}
    )
    assert params_hash({"a": 1}) != params_hash({"a": 2})
    assert len(params_hash({})) == 16


def test_an_accepted_prompt_can_be_read() -> None:
    prompt = Prompt(
        id=msgspec.Raw(b'"a"'), line=3, endpoint="chat", body=CONTENT["chat"], sample=2
    )
    found = read_prompt(msgspec.json.encode(prompt))

    assert (bytes(found.id), found.line, found.sample) == (b'"a"', 3, 2)


@pytest.mark.parametrize("damaged", [b"", b"{", b"[]", b'{"id":1}', b"\xff"])
def test_a_damaged_prompt_is_a_value_error(damaged: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - any of msgspec's
        read_prompt(damaged)


# --- What the context leaves ---------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["chat", "completions", "generate"])
def test_a_run_that_asks_for_the_context_gets_what_it_leaves_by_one_second_request(
    endpoint: Endpoint,
) -> None:
    refusal = GENERATE_REFUSAL if endpoint == "generate" else CHAT_REFUSAL
    first = build(CONTENT[endpoint], Params(max_tokens="context"), endpoint=endpoint)

    second = clamped_request(first, 400, refusal, rid="epoch-0002")

    assert first.max_tokens == 4095
    assert second is not None
    # One token stays free: a server before 0.5.12 refuses the context filled exactly.
    assert second.max_tokens == 4096 - 1320 - 1
    assert second.clamped
    assert second.rid == sent(second)["rid"] == "epoch-0002"
    limit = sent(second).get("max_tokens") or sent(second)["sampling_params"]["max_new_tokens"]
    assert limit == second.max_tokens
    assert clamped_request(second, 400, refusal, rid="epoch-0003") is None


def test_a_rows_own_limit_is_never_clamped() -> None:
    by_row = build({**CONTENT["chat"], "max_tokens": 3000}, Params(max_tokens="context"))
    by_run = build(CONTENT["chat"], Params(max_tokens=3000))

    assert clamped_request(by_row, 400, CHAT_REFUSAL, rid="epoch-0002") is None
    assert clamped_request(by_run, 400, CHAT_REFUSAL, rid="epoch-0002") is None


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (500, OVER_CONTEXT),
        (400, "temperature must be non-negative, got -1.0."),
        (400, "The input (10511 tokens) is longer than the model's context length (2048 tokens)."),
        (400, OVER_CONTEXT.replace("1320 tokens from", "4095 tokens from")),
    ],
)
def test_other_refusals_are_final(status: int, message: str) -> None:
    first = build(CONTENT["chat"], Params(max_tokens="context"))
    body = json.dumps({"object": "error", "message": message}).encode()

    assert clamped_request(first, status, body, rid="epoch-0002") is None


def test_the_context_of_a_server_that_does_not_tell_it_cannot_be_asked_for() -> None:
    with pytest.raises(ServerUnusableError, match="--max-tokens N"):
        build(CONTENT["chat"], Params(max_tokens="context"), context_length=None)


def test_a_prompt_without_any_limit_never_meets_the_servers_own() -> None:
    assert sent(build(CONTENT["chat"], Params()))["max_tokens"] == 4095
