"""Bring a completion to the conversations that training files hold: one for each choice. Pure.

Roles become the four that every trainer knows (developer is system, function is tool). Content in
parts becomes their text; parts that are none (images) fit in no such file. An answer without text
and without a tool call teaches nothing, and the trainers' own generators refuse it too.
"""

from typing import Any

import msgspec

from producer.formats.base import ExportedRow, UnfitError, id_text

NO_CONVERSATION = "have no conversation (text to complete, or token ids)"
NOT_TEXT = "hold content that is no text"
NO_ANSWER = "have an answer without text"

_ROLES = {
    "developer": "system",
    "function": "tool",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class Turn(msgspec.Struct, kw_only=True):
    """One message; texts that are not there are empty.

    Attributes:
        tool_calls: In OpenAI's shape: id, type, function with name and arguments as JSON text.
    """

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = []
    tool_call_id: str = ""
    name: str = ""


class Conversation(msgspec.Struct, kw_only=True):
    """A conversation with its answer.

    Attributes:
        id: Its text; further samples and choices end in their numbers, so that none is a double.
        tools: JSON text; empty without any.
    """

    id: str
    turns: list[Turn]
    tools: str = ""


def conversations(row: ExportedRow) -> list[Conversation]:
    """Give a conversation for each choice of a completion that has an answer.

    Raises:
        UnfitError: It has none.
    """
    if row.messages is None or len(row.messages) < 2:  # noqa: PLR2004 - a question, an answer
        raise UnfitError(NO_CONVERSATION)
    before = [_turn(message) for message in row.messages[:-1]]
    tools = bytes(row.tools)
    made = []
    for number, choice in enumerate(row.choices or [row.messages[-1]]):
        answer = _turn({**choice, "role": "assistant"})
        if not (answer.content or answer.tool_calls):
            continue
        made.append(
            Conversation(
                id=line_id(row, number),
                turns=[*before, answer],
                tools="" if tools in {b"null", b"[]"} else tools.decode(),
            )
        )
    if not made:
        raise UnfitError(NO_ANSWER)
    return made


def line_id(row: ExportedRow, choice: int) -> str:
    """Name the line of a choice."""
    sample = f"-sample{row.sample}" if row.sample else ""
    return id_text(row.id) + sample + (f"-choice{choice}" if choice else "")


def _turn(message: dict[str, Any]) -> Turn:
    return Turn(
        role=_ROLES.get(message.get("role") or "", "user"),
        content=_text(message.get("content")),
        reasoning=_text(message.get("reasoning_content") or message.get("reasoning")),
        tool_calls=[_call(call) for call in message.get("tool_calls") or []],
        tool_call_id=_text(message.get("tool_call_id")),
        name=_text(message.get("name")),
    )


def _call(call: Any) -> dict[str, Any]:
    """Keep what every reader knows; arguments become text, as OpenAI has them."""
    function = call.get("function") if type(call) is dict else None
    if type(function) is not dict:
        raise UnfitError(NOT_TEXT)
    arguments = function.get("arguments")
    if type(arguments) is not str:
        arguments = msgspec.json.encode({} if arguments is None else arguments).decode()
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": str(function.get("name") or ""), "arguments": arguments},
    }


def _text(content: Any) -> str:
    if content is None:
        return ""
    if type(content) is str:
        return content
    if type(content) is not list:
        raise UnfitError(NOT_TEXT)
    return "".join(_part(part) for part in content)


def _part(part: Any) -> str:
    if type(part) is str:
        return part
    text = part.get("text") if type(part) is dict and part.get("type") == "text" else None
    if type(text) is not str:
        raise UnfitError(NOT_TEXT)
    return text
