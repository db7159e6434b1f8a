"""Show results to people: the prompt's end beside its answer, long text cut, nothing that acts."""

from collections.abc import Iterator
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from common.harmless import ends_of, harmless, one_line, tail_of
from producer.peek import IN_REDIS, Found

WIDE = 100
"""With so many columns prompt and answer stand side by side."""

EVERYTHING = 1 << 62


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


class _Choice(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None
    finish_reason: str | None = None


class _Request(msgspec.Struct, frozen=True):
    body: dict[str, Any] = {}


class _Row(msgspec.Struct, frozen=True):
    """What is shown of a completion or a failure; one lacks what the other has."""

    id: Any = None
    line: int = 0
    source: str = ""
    sample: int = 0
    messages: list[Any] | None = None
    prompt: Any = None
    choices: list[_Choice] = []
    usage: _Usage = _Usage()
    server: str = ""
    try_: int = msgspec.field(name="try", default=1)
    attempts: int = 1
    latency_s: float | None = None
    flags: list[str] = []
    outcome: str = "completed"
    reason: str = ""
    status: int | None = None
    message: str = ""
    request: Any = None


_rows = msgspec.json.Decoder(_Row)


def of_found(found: Found, *, width: int, chars: int) -> RenderableType:
    """Show one row on a page of `width` columns; of each text `chars` characters, 0 for all."""
    row, most = _rows.decode(found.row), chars or EVERYTHING
    asked = Text(tail_of(_asked(row), most))
    said = Group(*_said(row, most))
    head = Text("  ".join(_head(row, found.where)), style="bold")
    if row.flags:
        head.append(f"  {' '.join(map(one_line, row.flags))}", style="yellow")
    if width < WIDE:
        names = Text("prompt", style="dim"), Text("answer", style="dim")
        return Group(head, names[0], asked, names[1], said, Text(""))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    table.add_column("prompt", ratio=2, overflow="fold")
    table.add_column("answer", ratio=3, overflow="fold")
    table.add_row(asked, said)
    return Group(head, Padding(table, (0, 0, 1, 0)))


def _head(row: _Row, where: str) -> Iterator[str]:
    yield one_line(msgspec.json.encode(row.id).decode(), 80)
    yield f"{one_line(row.source, 60)} line {row.line:,}".strip()
    if row.sample:
        yield f"sample {row.sample}"
    if row.outcome != "completed":
        status = f" (HTTP {row.status})" if row.status else ""
        yield f"{one_line(row.outcome)}: {one_line(row.reason)}{status}"
    elif row.choices:
        yield one_line(row.choices[0].finish_reason or "no finish reason")
        usage = row.usage
        thought = f" ({usage.reasoning_tokens:,} of it thinking)" if usage.reasoning_tokens else ""
        yield f"{usage.prompt_tokens:,} -> {usage.completion_tokens:,} tokens{thought}"
    if row.latency_s is not None:
        yield f"{row.latency_s:,.1f} s"
    if row.server:
        yield one_line(row.server)
    if row.try_ > 1 or row.attempts > 1:
        yield f"try {row.try_}, attempts {row.attempts}"
    yield "not yet stored" if where == IN_REDIS else where


def _asked(row: _Row) -> str:
    """Give what was asked, the answer left out."""
    messages, prompt = row.messages, row.prompt
    if row.outcome != "completed":
        body = _body(row.request)
        messages = body.get("messages")
        prompt = next((body[name] for name in ("prompt", "text", "input_ids") if name in body), "")
    elif messages:
        messages = messages[:-1]
    if not isinstance(messages, list):
        return _content(prompt)
    return "\n\n".join(_turn(message) for message in messages)


def _body(request: Any) -> dict[str, Any]:
    try:
        return msgspec.convert(request, _Request).body
    except msgspec.ValidationError:
        # A prompt whose job could not be read fails with its bytes as text.
        return {"text": request}


def _turn(message: Any) -> str:
    if not isinstance(message, dict):
        return _content(message)
    return f"{message.get('role', '?')}: {_content(message.get('content'))}"


def _content(value: Any) -> str:
    """Give what a text, a list of parts, or a list of token ids says."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "\n".join(
            part["text"] if isinstance(part.get("text"), str) else f"[{part.get('type', 'part')}]"
            for part in value
            if isinstance(part, dict)
        )
    return msgspec.json.encode(value).decode()


def _said(row: _Row, most: int) -> Iterator[Text]:
    if row.outcome != "completed":
        yield Text(ends_of(row.message, most) or "the server said nothing", style="red")
        return
    first = row.choices[0] if row.choices else _Choice()
    if first.reasoning_content:
        yield Text(ends_of(first.reasoning_content, most // 2), style="dim italic")
        yield Text("--- end of its thinking", style="dim")
    yield Text(ends_of(first.content, most) if first.content else "(no text)")
    if first.tool_calls:
        calls = msgspec.json.encode(first.tool_calls).decode()
        yield Text(f"tool calls: {harmless(ends_of(calls, most))}")
    if len(row.choices) > 1:
        yield Text(f"(and {len(row.choices) - 1} other choices)", style="dim")
