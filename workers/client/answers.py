"""Read the bodies of SGLang's answers: what is a completion, and what only looks like one. Pure.

Three shapes (chat, completions, generate) become one `Answer`. Foreign JSON is read into private
structs with just the members that are used. A body that strict JSON refuses (a lone surrogate, a
NaN among log-probabilities, bytes that are no UTF-8) is read a second time by a tolerant reader,
because the text in it was paid for: what cannot be written as UTF-8 becomes U+FFFD.
"""

from typing import Any, Literal, TypeVar

import msgspec

from common.models import Choice, Endpoint, Usage
from workers.client.oddities import repeating, unparsed_reasoning
from workers.client.tolerant import MESSAGE_CHARS, error_text, read_tolerantly

NAN_STOP = "NaN happened"
"""`matched_stop` of an answer whose sampler met an impossible token: HTTP 200, text broken."""

_THINKING_BEGINS, _THINKING_ENDS = "<think>", "</think>"

T = TypeVar("T")

BadReason = Literal["bad_response", "aborted", "nan", "empty_output", "token_ids"]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A completion as the server gave it.

    Attributes:
        choices: N >= 1 in the server's order; none is aborted.
        usage: Of the whole request; prompt tokens are counted once for all choices.
        empty: Whether no choice has any text, reasoning or tool call.
        truncated: Whether any choice ended because of its length.
        reasoning_cut: Whether any choice used up its length before it began to answer.
        repeating, unparsed_reasoning: See `workers.client.oddities`.
    """

    choices: list[Choice]
    usage: Usage
    empty: bool
    truncated: bool
    reasoning_cut: bool
    repeating: bool = False
    unparsed_reasoning: bool = False


class BadAnswerError(ValueError):
    """A 200 that is no completion.

    Attributes:
        reason: bad_response, aborted, nan, empty_output or token_ids.
        detail: What was found instead, at most `MESSAGE_CHARS`.
    """

    def __init__(self, reason: BadReason, detail: str) -> None:
        super().__init__(f"{reason}: no completion in the server's answer")
        self.reason: BadReason = reason
        self.detail = detail[:MESSAGE_CHARS]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _OpenAIUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _OpenAIChoice(msgspec.Struct):
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None
    matched_stop: Any = None
    logprobs: Any = None
    token_ids: list[int] | None = None
    response_token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _OpenAIAnswer(msgspec.Struct):
    choices: list[_OpenAIChoice] | None = None
    usage: _OpenAIUsage | None = None
    error: Any = None


class _Finish(msgspec.Struct):
    type: str | None = None
    matched: Any = None
    message: str | None = None


class _MetaInfo(msgspec.Struct):
    finish_reason: _Finish | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    cached_tokens: int | None = None
    output_token_logprobs: Any = None
    prompt_token_ids: list[int] | None = None


class _GenerateAnswer(msgspec.Struct):
    text: str | None = None
    output_ids: list[int] | None = None
    meta_info: _MetaInfo | None = None
    prompt_token_ids: list[int] | None = None
    error: Any = None


_openai_decoder = msgspec.json.Decoder(_OpenAIAnswer)
_generate_decoder = msgspec.json.Decoder(_GenerateAnswer | list[_GenerateAnswer])


def read_answer(endpoint: Endpoint, body: bytes, *, output_ids: bool = False) -> Answer:
    """Read the body of a 200.

    Args:
        endpoint: Which route it came from.
        body: The whole body.
        output_ids: Keep the generated token ids that /generate sends unasked.

    Raises:
        BadAnswerError: If it holds no completion: an error object, an abort, NaN, no choices,
            no message, nothing generated, no JSON.
    """
    if endpoint == "generate":
        items = _decode(_generate_decoder, body)
        answers = items if isinstance(items, list) else [items]
        choices = [
            _generate_choice(index, each, body=body, output_ids=output_ids)
            for index, each in enumerate(answers)
        ]
        return _judged(choices, _generate_usage(answers), body)
    answer = _decode(_openai_decoder, body)
    if answer.error is not None:
        raise BadAnswerError("bad_response", error_text(body))
    choices = [
        _openai_choice(index, each, endpoint=endpoint)
        for index, each in enumerate(answer.choices or ())
    ]
    return _judged(choices, _openai_usage(answer.usage), body)


def _decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError):
        pass
    try:
        converted: T = msgspec.convert(read_tolerantly(body), decoder.type)
    except (ValueError, RecursionError):
        raise BadAnswerError("bad_response", error_text(body)) from None
    return converted


def _openai_choice(index: int, found: _OpenAIChoice, *, endpoint: Endpoint) -> Choice:
    message = found.message
    if message is None:
        if endpoint == "chat" or found.text is None:
            raise BadAnswerError("bad_response", f"choice {index} has no message")
        message = _Message(content=found.text)
    return Choice(
        index=index,
        content=message.content,
        finish_reason=found.finish_reason,
        reasoning_content=message.reasoning_content,
        tool_calls=message.tool_calls or None,
        matched_stop=found.matched_stop,
        logprobs=found.logprobs,
        prompt_token_ids=found.prompt_token_ids,
        output_token_ids=(
            found.response_token_ids if found.token_ids is None else found.token_ids
        ),
    )


def _generate_choice(
    index: int, found: _GenerateAnswer, *, body: bytes, output_ids: bool
) -> Choice:
    if found.error is not None or found.meta_info is None or found.text is None:
        raise BadAnswerError("bad_response", error_text(body))
    meta = found.meta_info
    finish = meta.finish_reason or _Finish()
    return Choice(
        index=index,
        content=found.text,
        finish_reason=finish.type,
        matched_stop=finish.matched,
        logprobs=meta.output_token_logprobs,
        prompt_token_ids=(
            meta.prompt_token_ids if found.prompt_token_ids is None else found.prompt_token_ids
        ),
        output_token_ids=found.output_ids if output_ids else None,
    )


def _openai_usage(found: _OpenAIUsage | None) -> Usage:
    if found is None:
        return Usage(prompt_tokens=0, completion_tokens=0)
    details = found.prompt_tokens_details
    return Usage(
        prompt_tokens=_count(found.prompt_tokens),
        completion_tokens=_count(found.completion_tokens),
        reasoning_tokens=_count(found.reasoning_tokens),
        cached_tokens=_count(details.cached_tokens if details else 0),
    )


def _generate_usage(answers: list[_GenerateAnswer]) -> Usage:
    metas = [each.meta_info or _MetaInfo() for each in answers]
    return Usage(
        # The choices of one request share their prompt.
        prompt_tokens=max((_count(meta.prompt_tokens) for meta in metas), default=0),
        completion_tokens=sum(_count(meta.completion_tokens) for meta in metas),
        reasoning_tokens=sum(_count(meta.reasoning_tokens) for meta in metas),
        cached_tokens=max((_count(meta.cached_tokens) for meta in metas), default=0),
    )


def _count(value: int | None) -> int:
    return max(value or 0, 0)


def _judged(choices: list[Choice], usage: Usage, body: bytes) -> Answer:
    if not choices:
        raise BadAnswerError("bad_response", error_text(body) or "no choices")
    for choice in choices:
        if choice.finish_reason == "abort":
            raise BadAnswerError("aborted", f"the server aborted choice {choice.index}")
        if choice.matched_stop == NAN_STOP:
            raise BadAnswerError("nan", f"the sampler of choice {choice.index} met NaN")
    cut = [each for each in choices if each.finish_reason == "length"]
    return Answer(
        choices=choices,
        usage=usage,
        empty=all(
            not (each.content or each.reasoning_content or each.tool_calls) for each in choices
        ),
        truncated=bool(cut),
        reasoning_cut=any(_still_thinks(each) for each in cut),
        repeating=repeating(choices),
        unparsed_reasoning=unparsed_reasoning(choices),
    )


def _still_thinks(cut: Choice) -> bool:
    """Tell whether a cut choice had not begun to answer; unparsed, its thinking is content."""
    content = (cut.content or "").lstrip()
    if content.startswith(_THINKING_BEGINS):
        return _THINKING_ENDS not in content
    return bool(cut.reasoning_content) and not content
