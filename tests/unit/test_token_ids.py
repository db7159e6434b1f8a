"""Token ids of recorded answers become whole sequences with a mask, or the answer is none."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.models import Choice, Endpoint, Params
from workers.client.clamp import clamped_request
from workers.client.faults import Kind, ServerAnswer, Verdict, classify
from workers.client.requests import Request, build_request, read_prompt
from workers.client.token_ids import lacking

RECORDED = Path(__file__).parents[1] / "data" / "sglang" / "0.5.23"
BODIES: dict[Endpoint, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "one"},
    "generate": {"text": "one"},
}
PROMPT = {"chat": [1, 1505, 201, 1785, 2, 201, 1, 3401, 632, 849, 201], "completions": [340],
          "generate": [340]}  # fmt: skip
GENERATED = {
    "chat": [2686, 2980, 3607, 2201, 1100, 1136, 1181, 1675],
    "completions": [1320, 3610, 3565, 200, 2883, 1821, 3932, 2347],
    "generate": [1001, 3147, 1409, 3559, 3388, 3427, 400, 803],
}


def request(endpoint: Endpoint, *, keep: bool = True, **own: Any) -> Request:
    prompt = read_prompt(prompt_json(endpoint, own or BODIES[endpoint]))
    params = Params(max_tokens=8, keep_token_ids=keep)
    return build_request(prompt, params, model="tiny", rid="r" * 20, context_length=2048)


def prompt_json(endpoint: Endpoint, body: dict[str, Any]) -> bytes:
    return json.dumps({"id": 1, "line": 1, "endpoint": endpoint, "body": body}).encode()


def asking(endpoint: Endpoint) -> str:
    return "return_prompt_token_ids" if endpoint == "generate" else "return_token_ids"


def recorded(name: str) -> Any:
    return json.loads((RECORDED / name).read_bytes())


def judged(asked: Request, body: Any) -> Verdict:
    return classify(asked, ServerAnswer(status=200, body=json.dumps(body).encode(), latency_s=1))


def choices_of(verdict: Verdict) -> list[Choice]:
    assert verdict.kind is Kind.COMPLETED, verdict
    assert verdict.answer is not None
    return verdict.answer.choices


@pytest.mark.parametrize("endpoint", ["chat", "completions", "generate"])
def test_a_recorded_answer_becomes_one_sequence_with_its_mask(endpoint: Endpoint) -> None:
    first = choices_of(judged(request(endpoint), recorded(f"{endpoint}_token_ids.json")))[0]

    prompt, generated = PROMPT[endpoint], GENERATED[endpoint]
    assert first.token_ids == prompt + generated
    assert first.loss_mask == [0] * len(prompt) + [1] * len(generated)
    assert (first.prompt_token_ids, first.output_token_ids) == (None, None)


def test_each_choice_has_its_own_sequence_of_the_same_prompt() -> None:
    first, second = choices_of(judged(request("chat"), recorded("chat_token_ids.json")))

    assert second.token_ids == PROMPT["chat"] + [3346, 1999, 1955, 1679, 808, 2182, 1200, 2355]
    assert second.loss_mask == first.loss_mask


@pytest.mark.parametrize("endpoint", ["completions", "generate"])
def test_a_batch_line_has_the_ids_of_each_of_its_prompts(endpoint: Endpoint) -> None:
    member = "prompt" if endpoint == "completions" else "text"
    batch: dict[str, Any] = {member: ["one", "one two three"]}
    asked = request(endpoint, **batch)

    found = choices_of(judged(asked, recorded(f"{endpoint}_batch_token_ids.json")))

    prompts = [[340], [340], [340, 1410, 377, 1264], [340, 1410, 377, 1264]]
    assert [(each.token_ids or [])[:-2] for each in found] == prompts
    assert [each.loss_mask for each in found] == [[0] * len(ids) + [1, 1] for ids in prompts]


def test_a_version_that_names_the_ids_of_a_chat_otherwise_is_read_too() -> None:
    body = recorded("chat_token_ids.json")
    for choice in body["choices"]:
        choice["token_ids"] = choice.pop("response_token_ids")

    assert choices_of(judged(request("chat"), body))[0].token_ids == (
        PROMPT["chat"] + GENERATED["chat"]
    )


@pytest.mark.parametrize("endpoint", ["chat", "completions", "generate"])
def test_only_a_run_that_keeps_ids_asks_for_them(endpoint: Endpoint) -> None:
    assert bytes(request(endpoint).members[asking(endpoint)]) == b"true"
    assert asking(endpoint) not in request(endpoint, keep=False).members


def test_the_run_asks_also_where_a_row_says_no() -> None:
    body = {**BODIES["chat"], "return_token_ids": False}

    assert bytes(request("chat", **body).members["return_token_ids"]) == b"true"


def without_prompt_ids(body: Any) -> None:
    for choice in body["choices"]:
        del choice["prompt_token_ids"]


def without_output_ids(body: Any) -> None:
    del body["choices"][1]["response_token_ids"]


def one_output_id_less(body: Any) -> None:
    body["choices"][0]["response_token_ids"].pop()


def one_prompt_id_more(body: Any) -> None:
    for choice in body["choices"]:
        choice["prompt_token_ids"].append(1)


def another_prompt(body: Any) -> None:
    body["choices"][1]["prompt_token_ids"].append(1)


def without_usage(body: Any) -> None:
    del body["usage"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_prompt_ids, "choice 0 has no token ids of its prompt"),
        (without_output_ids, "choice 1 has no token ids of its answer"),
        (one_output_id_less, "the answer has 15 generated token ids, and its usage says 16"),
        (one_prompt_id_more, "the answer has 12 prompt token ids, and its usage says 11"),
        (another_prompt, "choices of one prompt have different prompt token ids"),
        (without_usage, "the answer has 11 prompt token ids, and its usage says 0"),
    ],
)
def test_ids_that_cannot_be_trusted_are_a_charged_attempt(spoil: Any, message: str) -> None:
    body = recorded("chat_token_ids.json")
    spoil(body)

    verdict = judged(request("chat"), body)

    assert (verdict.kind, verdict.reason, verdict.message) == (Kind.ANSWER, "token_ids", message)
    # Where nobody keeps them, nothing is wrong with it.
    assert judged(request("chat", keep=False), body).kind is Kind.COMPLETED


def test_nothing_generated_is_still_called_that() -> None:
    body = recorded("generate_token_ids.json")
    body |= {"text": "", "output_ids": []}
    body["meta_info"]["completion_tokens"] = 0

    assert judged(request("generate"), body).reason == "empty_output"


def test_a_prompt_of_ids_needs_no_prompt_ids_in_the_answer() -> None:
    body = recorded("generate_token_ids.json")
    del body["prompt_token_ids"]

    found = choices_of(judged(request("generate", input_ids=[340]), body))

    assert found[0].token_ids == [340, *GENERATED["generate"]]


@pytest.mark.parametrize("endpoint", ["chat", "completions", "generate"])
def test_the_second_request_for_what_the_context_leaves_asks_for_them_too(
    endpoint: Endpoint,
) -> None:
    first = build_request(
        read_prompt(prompt_json(endpoint, BODIES[endpoint])),
        Params(max_tokens="context", keep_token_ids=True),
        model="tiny",
        rid="r" * 20,
        context_length=2048,
    )
    told = {
        "message": "maximum context length of 2048 tokens. You requested 2060: 13 tokens from the "
        "input messages and 2047 for the completion."
    }

    second = clamped_request(first, 400, json.dumps({"error": told}).encode(), rid="s" * 20)

    assert second is not None
    assert second.keeps_token_ids
    assert bytes(second.members[asking(endpoint)]) == b"true"
    assert (second.clamped, second.max_tokens) == (True, 2034)


@pytest.mark.parametrize(
    ("endpoint", "version", "lacks"),
    [
        ("chat", "0.5.7", True),
        ("chat", "0.5.12.post1", True),
        ("chat", "0.5.16", True),
        ("chat", "0.5.17", False),
        ("chat", "0.5.23", False),
        ("chat", "0.6.0", False),
        ("chat", "", False),
        ("chat", "main", False),
        ("completions", "0.5.16", True),
        ("completions", "0.5.17", False),
        ("generate", "0.5.12.post1", True),
        ("generate", "0.5.13.post1", False),
    ],
)
def test_a_version_that_cannot_give_ids_is_known(
    endpoint: Endpoint, version: str, *, lacks: bool
) -> None:
    why = lacking(request(endpoint), version)

    assert bool(why) is lacks
    if lacks:
        assert f"SGLang {version} gives none at {request(endpoint).path}" in why
    assert not lacking(request(endpoint, keep=False), version)


def test_a_prompt_of_ids_is_served_by_any_version() -> None:
    assert not lacking(request("generate", input_ids=[1, 2]), "0.5.7")
    assert lacking(request("generate", input_ids=[[1, 2], [3]]), "0.5.7")
