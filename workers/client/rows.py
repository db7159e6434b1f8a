"""Write the rows that a prompt ends as: completion and failure, one JSON line each. Pure.

A row is put together from JSON that exists already: what the author wrote is copied byte for byte
from the job (id, messages, tools, extra), and only what is new is encoded. That keeps numbers,
escapes and nulls as they were given, and costs a tenth of decoding and encoding it all.

`models.CompletionRow` and `models.FailureRow` say what a row holds; the tests read every row back
through them.
"""

from functools import lru_cache
from typing import Literal

import msgspec

from common.models import Choice, Claim, Turn, Usage
from workers.client.answers import Answer
from workers.client.requests import RawPrompt, Request, params_hash, read_prompt
from workers.client.tolerant import MESSAGE_CHARS

MAX_ROW_BYTES = 16 * 1024 * 1024
"""A longer row would block Redis, the sink and every reader of the shard."""

_NO_MESSAGES = msgspec.Raw(b"[]")

_encode = msgspec.json.encode
_quoted = lru_cache(maxsize=256)(_encode)
"""For the few strings that stand in every row: source, model, server, version."""


class RowTooLargeError(ValueError):
    """A completion's row exceeds `MAX_ROW_BYTES`; the prompt fails with reason too_large."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(
            f"the row has {size_bytes} bytes and a row holds at most {MAX_ROW_BYTES}; "
            "ask for fewer choices, log-probabilities or tokens"
        )
        self.size_bytes = size_bytes


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where an answer came from: the same for all rows of a group until its server restarts.

    Attributes:
        server: The server's URL.
        model: Served model name.
        server_version: For example 0.5.23; empty when the server does not say.
    """

    server: str
    model: str
    server_version: str


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt was completed with.

    Attributes:
        request: As it was sent.
        answer: What came; its first choice continues the conversation.
        origin: Where it came from.
        flags: As the verdict gives them.
        latency_s: From sending the request to the last byte of its answer; of several turns, all.
        completed_at: Wall time, ISO 8601 in UTC.
        messages: JSON list of the conversation before this answer, where it is not the prompt's
            own because earlier turns were generated too.
        usage: Sum over the turns, where there were several.
        turns: Their figures, where there were several.
    """

    request: Request
    answer: Answer
    origin: Origin
    flags: tuple[str, ...]
    latency_s: float
    completed_at: str
    messages: bytes | None = None
    usage: Usage | None = None
    turns: tuple[Turn, ...] = ()


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a prompt has no completion.

    Attributes:
        reason: One word, as the verdict gives it.
        status: HTTP status of the last attempt, None when there was none.
        message: The server's text; cut at 2,000 characters.
        server: The server's URL, empty when none was asked.
        attempts: Attempts of this try, the last one included.
        failed_at: Wall time, ISO 8601 in UTC.
        turn: Which of several turns failed, from 1.
    """

    reason: str
    status: int | None = None
    message: str = ""
    server: str = ""
    attempts: int
    failed_at: str
    turn: int | None = None


class _Assistant(msgspec.Struct, omit_defaults=True):
    """The answer as a message; `content` is always there, null for tool calls alone."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[object] | None = None


def assistant_message(choice: Choice) -> bytes:
    """Write a choice as the message that continues its conversation."""
    return _encode(
        _Assistant(
            role="assistant",
            content=choice.content,
            reasoning_content=choice.reasoning_content,
            tool_calls=choice.tool_calls,
        )
    )


def appended(messages: bytes, message: bytes) -> bytes:
    """Append one JSON value to a JSON list without reading either."""
    head = messages.rstrip()[:-1].rstrip()
    comma = b"" if head.endswith(b"[") else b","
    return b"%b%b%b]" % (head, comma, message)


def completion_row(claim: Claim, prompt: RawPrompt, done: Completion) -> bytes:
    """Write a completion.

    Args:
        claim: Whose prompt it is; its attempts are those that were charged before this one.
        prompt: As it was accepted.
        done: What it was completed with.

    Returns:
        A `CompletionRow` as one JSON line without newline.

    Raises:
        RowTooLargeError: If it exceeds `MAX_ROW_BYTES`.
    """
    params = _encode(done.request.params)
    tools = prompt.body.get("tools")
    row = b"".join((
        _head(claim, prompt),
        b',"endpoint":"', prompt.endpoint.encode(),
        *_content(prompt, done),
        b',"choices":', _encode(done.answer.choices),
        b',"usage":', _encode(done.usage or done.answer.usage),
        b',"params":', params,
        b',"params_hash":"', _params_hash(params),
        b'","model":', _quoted(done.origin.model),
        b',"server_version":', _quoted(done.origin.server_version),
        b',"server":', _quoted(done.origin.server),
        b',"try":%d,"attempts":%d,"latency_s":%.3f,"completed_at":"'
        % (claim.try_, claim.attempts + 1, done.latency_s),
        done.completed_at.encode(),
        b'","flags":', _quoted(done.flags),
        b',"extra":', prompt.extra,
        *((b',"tools":', tools) if tools is not None else ()),
        *((b',"turns":', _encode(done.turns)) if done.turns else ()),
        b"}",
    ))  # fmt: skip
    if len(row) > MAX_ROW_BYTES:
        raise RowTooLargeError(len(row))
    return _one_line(row)


def failure_row(claim: Claim, failure: Failure) -> bytes:
    """Write a failure; the row holds the whole request.

    Args:
        claim: Whose prompt it is. A prompt that cannot be read gets the id null, line 0, and its
            bytes as a string.
        failure: Why it has no completion.

    Returns:
        A `FailureRow` as one JSON line without newline.
    """
    try:
        prompt, request = read_prompt(claim.prompt), claim.prompt
    except ValueError:
        prompt = RawPrompt(id=msgspec.Raw(b"null"), line=0, endpoint="chat", body={})
        request = _encode(claim.prompt.decode("utf-8", "replace"))
    return _one_line(b"".join((
        _head(claim, prompt),
        b',"outcome":"failed","reason":', _encode(failure.reason),
        b',"status":', _encode(failure.status),
        b',"message":', _encode(failure.message[:MESSAGE_CHARS]),
        b',"server":', _quoted(failure.server),
        b',"try":%d,"attempts":%d,"failed_at":"' % (claim.try_, failure.attempts),
        failure.failed_at.encode(),
        b'","request":', request,
        b',"turn":%d}' % failure.turn if failure.turn else b"}",
    )))  # fmt: skip


def _head(claim: Claim, prompt: RawPrompt) -> bytes:
    return b'{"id":%b,"sample":%d,"key":"%b","fingerprint":"%b","line":%d,"source":%b' % (
        bytes(prompt.id),
        prompt.sample,
        claim.key.hex().encode(),
        claim.fingerprint.hex().encode(),
        prompt.line,
        _quoted(prompt.source),
    )


def _content(prompt: RawPrompt, done: Completion) -> tuple[bytes, bytes, bytes, bytes]:
    if prompt.endpoint == "chat":
        # A prompt may be token ids alone; its conversation is then the answer.
        own = bytes(prompt.body.get("messages", _NO_MESSAGES))
        before = own if done.messages is None else done.messages
        conversation = appended(before, assistant_message(done.answer.choices[0]))
        return b'","messages":', conversation, b',"prompt":', b"null"
    for name in ("prompt", "text", "input_ids"):
        if name in prompt.body:
            return b'","messages":', b"null", b',"prompt":', bytes(prompt.body[name])
    return b'","messages":', b"null", b',"prompt":', b"null"


@lru_cache(maxsize=256)
def _params_hash(params: bytes) -> bytes:
    # Most rows of a run are sent with the same parameters.
    return params_hash(msgspec.json.decode(params)).encode()


def _one_line(row: bytes) -> bytes:
    # A line break can only stand between two JSON tokens, where a blank is as good.
    if b"\n" in row or b"\r" in row:
        return row.replace(b"\n", b" ").replace(b"\r", b" ")
    return row
