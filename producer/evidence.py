"""Turn the store's objects into lines that can be compared by key. Pure.

Three kinds of lines, cut so that those of one prompt fit together as bytes:

    accepted   key TAB fp TAB content TAB id
    recorded   key TAB fp TAB try TAB outcome TAB in TAB out TAB manifest
    row        recorded TAB content TAB id

`content` (32 hex digits) is the hash of what was asked: the messages before the answer, or the
prompt, and the tools. Where every answer of a conversation was generated, a null stands for each,
as in the prompt: all between them is compared, and where they stand. So a row that bears its own
key and another prompt's conversation is found even where its hashes were mended by hand.
"""

import hashlib
import re
from typing import Any

import msgspec

from common.ids import fingerprint_of, typed_id
from common.models import Endpoint, Outcome, Usage

AFTER_KEY = 32
AFTER_FP = AFTER_KEY + 1 + 16
"""Where the key ends in every line, and where the fingerprint does."""

_IDENTITY = re.compile(rb"[0-9a-f]{32}\t[0-9a-f]{16}\t")
_RECORD = re.compile(
    rb"[0-9a-f]{32}\t[0-9a-f]{16}\t[1-9]\d*\t(?:completed|failed|cancelled)\t\d+\t\d+"
)

NO_CONTENT = b"-"
_ABSENT = (b"", b"null")
_NULL = msgspec.Raw(b"null")
_PROMPT_MEMBERS = ("prompt", "text", "input_ids")


class RowError(ValueError):
    """A row is not one that Headrace wrote; the text says why, without anything of its content."""


class _Prompt(msgspec.Struct):
    id: msgspec.Raw
    endpoint: Endpoint
    body: dict[str, msgspec.Raw]


class _Message(msgspec.Struct):
    role: str


class _Choice(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None
    token_ids: list[int] | None = None
    loss_mask: list[int] | None = None


class _Turn(msgspec.Struct):
    at: int
    token_ids: list[int] | None = None
    loss_mask: list[int] | None = None


class _Completion(msgspec.Struct):
    id: msgspec.Raw
    key: str
    fingerprint: str
    messages: list[msgspec.Raw] | None
    prompt: msgspec.Raw
    choices: list[_Choice]
    usage: Usage
    try_: int = msgspec.field(name="try")
    tools: msgspec.Raw = msgspec.Raw(b"null")
    turns: list[_Turn] = []


class _Failure(msgspec.Struct):
    id: msgspec.Raw
    key: str
    fingerprint: str
    outcome: Outcome
    request: msgspec.Raw
    try_: int = msgspec.field(name="try")


_prompts = msgspec.json.Decoder(_Prompt)
_completions = msgspec.json.Decoder(_Completion)
_failures = msgspec.json.Decoder(_Failure)
_turns = msgspec.json.Decoder(list[msgspec.Raw])
_choices = msgspec.json.Decoder(_Choice)
_roles = msgspec.json.Decoder(_Message)


def accepted_line(key: bytes, fingerprint: bytes, prompt: bytes) -> bytes:
    """Make the line of an accepted prompt.

    Args:
        key: 32 hex digits.
        fingerprint: 16 hex digits.
        prompt: JSON of a `Prompt`.

    Raises:
        RowError: It cannot be read, or its fingerprint is another.
    """
    try:
        asked = _prompts.decode(prompt)
        body = {name: msgspec.json.decode(value) for name, value in asked.body.items()}
    except (msgspec.MsgspecError, ValueError) as error:
        raise RowError("it is no accepted prompt") from error
    if fingerprint_of(asked.endpoint, body).hex().encode() != fingerprint:
        raise RowError("its fingerprint is not that of its request")
    return _checked(b"%b\t%b\t%b\t%b\n" % (key, fingerprint, _content_asked(asked), _id(asked.id)))


def recorded_line(line: bytes, manifest: int) -> bytes:
    """Make the line of a record.

    Args:
        line: As it stands in `keys/`.
        manifest: Number of the manifest that names it.

    Raises:
        RowError: It is no such line.
    """
    if _RECORD.fullmatch(line) is None:
        raise RowError("it is no record")
    return b"%b\t%d\n" % (line, manifest)


def completion_line(row: bytes, manifest: int, *, token_ids: bool = False) -> bytes:
    """Make the line of a row of `shards/`.

    Args:
        row: JSON.
        manifest: Number of the manifest that names its shard.
        token_ids: Every choice must hold them: the run keeps them.

    Raises:
        RowError: It is no such row, its conversation does not end with its first choice, or its
            token ids do not fit its loss mask or its usage.
    """
    try:
        found = _completions.decode(row)
        content = _content_answered(found)
    except (msgspec.MsgspecError, ValueError) as error:
        raise RowError(_why(error, "it is no completion")) from error
    usage = found.usage
    if token_ids:
        _check_token_ids([*found.turns[:-1], *found.choices], usage.completion_tokens)
    what = b"completed\t%d\t%d" % (usage.prompt_tokens, usage.completion_tokens)
    return _row_line(found, what, manifest, content=content)


def _check_token_ids(answers: list[_Turn | _Choice], generated: int) -> None:
    masked = 0
    for answer in answers:
        ids, mask = answer.token_ids, answer.loss_mask
        if ids is None or mask is None:
            raise RowError("it holds no token ids, which the run keeps")
        ones = sum(mask)
        if len(ids) != len(mask) or mask != [0] * (len(mask) - ones) + [1] * ones:
            raise RowError("its loss mask is not that of its token ids")
        masked += ones
    if masked != generated:
        raise RowError("its loss masks do not cover the generated tokens of its usage")


def failure_line(row: bytes, manifest: int) -> bytes:
    """Make the line of a row of `failures/`.

    Raises:
        RowError: It is no such row.
    """
    try:
        found = _failures.decode(row)
        content = _content_failed(found)
    except (msgspec.MsgspecError, ValueError) as error:
        raise RowError(_why(error, "it is no failure")) from error
    return _row_line(found, found.outcome.encode() + b"\t0\t0", manifest, content=content)


def _row_line(
    row: "_Completion | _Failure", what: bytes, manifest: int, *, content: bytes
) -> bytes:
    return _checked(
        b"%b\t%b\t%d\t%b\t%d\t%b\t%b\n"
        % (
            row.key.encode(),
            row.fingerprint.encode(),
            row.try_,
            what,
            manifest,
            content,
            _id(row.id),
        )
    )


def _checked(line: bytes) -> bytes:
    """See that a line begins with a key and a fingerprint: it is sorted by them."""
    if _IDENTITY.match(line) is None:
        raise RowError("its key or fingerprint is none")
    return line


def _why(error: Exception, otherwise: str) -> str:
    return str(error) if isinstance(error, RowError) else otherwise


def _content_asked(prompt: _Prompt) -> bytes:
    tools = prompt.body.get("tools", msgspec.Raw(b""))
    if prompt.endpoint == "chat":
        turns = prompt.body.get("messages")
        return _content(_turns.decode(turns) if turns is not None else [], tools)
    for name in _PROMPT_MEMBERS:
        if name in prompt.body:
            return _content([prompt.body[name]], tools)
    return _content([], tools)


def _content_answered(row: _Completion) -> bytes:
    if row.messages is None:
        asked = [] if bytes(row.prompt) in _ABSENT else [row.prompt]
        return _content(asked, row.tools)
    if not row.messages or not row.choices:
        raise RowError("it holds no answer")
    last, first = _choices.decode(row.messages[-1]), row.choices[0]
    if (last.content, last.reasoning_content) != (first.content, first.reasoning_content):
        raise RowError("its conversation does not end with its first choice")
    if row.turns:
        return _content(_without_answers(row.messages, row.turns), row.tools)
    return _content(row.messages[:-1], row.tools)


def _without_answers(messages: list[msgspec.Raw], turns: list[_Turn]) -> list[msgspec.Raw]:
    """Put null where an answer was generated, as in the prompt; nothing else may differ."""
    asked = list(messages)
    for turn in turns:
        if not 0 <= turn.at < len(asked) or _roles.decode(asked[turn.at]).role != "assistant":
            raise RowError("a turn of it is not where it says")
        asked[turn.at] = _NULL
    return asked


def _content_failed(row: _Failure) -> bytes:
    # A prompt whose job could not be read fails with its bytes as text.
    if bytes(row.request)[:1] != b"{":
        return NO_CONTENT
    return _content_asked(_prompts.decode(row.request))


def _content(asked: list[msgspec.Raw], tools: msgspec.Raw) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in asked:
        digest.update(_as_in_a_row(bytes(part)))
        digest.update(b",")
    if bytes(tools) not in _ABSENT:
        digest.update(b"tools")
        digest.update(_as_in_a_row(bytes(tools)))
    return digest.hexdigest().encode()


def _as_in_a_row(value: bytes) -> bytes:
    # A row has no line breaks: they can only stand between two JSON tokens.
    return value.replace(b"\r", b" ") if b"\r" in value else value


def _id(raw: msgspec.Raw) -> bytes:
    """Give an id so that one spelled in two ways (escapes) is the same."""
    text = bytes(raw)
    if text[:1] == b'"' and b"\\" in text:
        return typed_id(msgspec.json.decode(text))
    return text
