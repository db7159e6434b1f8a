"""ShareGPT: `{"id":…,"conversations":[{"from":"human","value":…},{"from":"gpt",…}]}`.

The form has no place for reasoning and tool calls, so they stand in the text as its data sets
have them: reasoning as <think>…</think> before the answer, each call as <tool_call>…</tool_call>
after it, and `tools` beside the turns as JSON text.
"""

from typing import Any

import msgspec
from typing_extensions import override

from producer.formats.conversation import Conversation, Turn
from producer.formats.training import ConversationFormat

_FROM = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}
_encode = msgspec.json.Encoder().encode


class ShareGpt(ConversationFormat):
    """A line is a conversation of `from` and `value`."""

    @override
    def line(self, conversation: Conversation) -> dict[str, Any]:
        """Give a conversation's line."""
        turns = [{"from": _FROM[turn.role], "value": _value(turn)} for turn in conversation.turns]
        return {"id": conversation.id, "conversations": turns}


def _value(turn: Turn) -> str:
    text = f"<think>\n{turn.reasoning}\n</think>\n\n" if turn.reasoning else ""
    calls = [f"<tool_call>\n{_call(call['function'])}\n</tool_call>" for call in turn.tool_calls]
    return text + "\n".join([*([turn.content] if turn.content else []), *calls])


def _call(function: dict[str, str]) -> str:
    try:
        # As it was written: numbers keep their spelling.
        arguments: Any = msgspec.json.decode(function["arguments"], type=msgspec.Raw)
    except msgspec.MsgspecError:
        arguments = function["arguments"]
    return _encode({"name": function["name"], "arguments": arguments}).decode()


def make() -> ShareGpt:
    """Make what writes one file."""
    return ShareGpt()
