"""What a prompt ends as: a line of a shard or of `failures/`."""

from typing import Any, Literal

import msgspec

from common.models.kinds import Endpoint, NonNegativeInt, PositiveInt


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request; completion tokens cover all its choices, reasoning included."""

    prompt_tokens: NonNegativeInt
    completion_tokens: NonNegativeInt
    reasoning_tokens: NonNegativeInt = 0
    cached_tokens: NonNegativeInt = 0


class Choice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of the answer's choices, in the server's order.

    Attributes:
        index: From 0.
        content: Text; None where the server gave none (tool calls, cut thinking).
        finish_reason: stop, length, tool_calls … as the server says.
        token_ids: Only with `--keep-token-ids`: as the engine used them, those of the whole prompt
            (chat template, tools and placeholders of images included), then those that it made
            (thinking, the matched stop text or end token included, whatever `content` leaves out).
        loss_mask: As long as `token_ids`: 0 for the prompt's, 1 for those that it made.
        logprobs, prompt_token_ids, output_token_ids: Only when the row itself asked for them.
    """

    index: NonNegativeInt
    content: str | None
    finish_reason: str | None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None
    matched_stop: Any = None
    logprobs: Any = None
    prompt_token_ids: list[int] | None = None
    output_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    loss_mask: list[Literal[0, 1]] | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One generated answer of a conversation in which all of them were.

    Attributes:
        at: Where it stands in `messages`, from 0.
        finish_reason: stop, length, tool_calls … as the server says.
        usage: Of this turn's request.
        latency_s: Of this turn's request.
        attempts: Requests that it took, the last one included.
        server: Where it was generated: after a failure another one may have gone on.
        flags: As in the row.
        matched_stop and the others: As in `Choice`; those of the last turn are in the row's
            choices. With `--keep-token-ids` each turn has the ids of its own prompt and answer.
    """

    at: NonNegativeInt
    finish_reason: str | None
    usage: Usage
    latency_s: float
    attempts: PositiveInt
    server: str
    completed_at: str
    flags: list[str] = []
    matched_stop: Any = None
    logprobs: Any = None
    prompt_token_ids: list[int] | None = None
    output_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    loss_mask: list[Literal[0, 1]] | None = None


class CompletionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a shard: what was asked, what came, and how.

    Attributes:
        id: As the author gave it, type and text.
        key, fingerprint: 32 and 16 hex digits; the fingerprint is of the request that this
            row answers, so two swapped answers are found.
        messages: The conversation with the answer in its place, ready to train on; None for
            completions and generate, which have `prompt` instead.
        prompt: Text or token ids as given, None for chat.
        choices: Every choice; of several turns, the last one's.
        usage: Of several turns, the sum.
        params: What was sent besides content: model, max_tokens, temperature, seed …
        tools: As given; in the row only when the prompt had them.
        params_hash: 16 hex digits of their canonical JSON.
        attempts, latency_s: Of several turns, the sum. The latency of a request is from sending it
            to the last byte of its answer.
        flags: Any of `common.quality.FLAGS`; of several turns, what holds of any.
        turns: Each generated answer, in order; in the row only where there are several.
    """

    id: msgspec.Raw
    sample: NonNegativeInt
    key: str
    fingerprint: str
    line: NonNegativeInt
    source: str
    endpoint: Endpoint
    messages: list[Any] | None
    prompt: str | list[Any] | None
    choices: list[Choice]
    usage: Usage
    params: dict[str, Any]
    params_hash: str
    model: str
    server_version: str
    server: str
    try_: PositiveInt = msgspec.field(name="try")
    attempts: PositiveInt
    latency_s: float
    completed_at: str
    flags: list[str]
    extra: dict[str, Any]
    tools: list[Any] | None = None
    turns: list[Turn] = []


class FailureRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `failures/`: the prompt's whole request, and why it has no completion.

    Attributes:
        outcome: failed or cancelled.
        reason: One word of `workers.client.faults`, for example bad_request, timeout, poison,
            cancelled.
        status: HTTP status of the last attempt, None when there was none.
        message: The server's text, at most 2,000 characters.
        attempts: Of several turns, of the one that failed.
        request: The `Prompt` as it was accepted.
        turn: Which of several turns failed, from 1; in the row only then.
    """

    id: msgspec.Raw
    sample: NonNegativeInt
    key: str
    fingerprint: str
    line: NonNegativeInt
    source: str
    outcome: Literal["failed", "cancelled"]
    reason: str
    status: int | None
    message: str
    server: str
    try_: PositiveInt = msgspec.field(name="try")
    attempts: NonNegativeInt
    failed_at: str
    request: msgspec.Raw
    turn: PositiveInt | None = None
