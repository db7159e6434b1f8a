"""SpecForge's training file: `{"id":…,"conversations":[{"role":…,"content":…}]}`.

Facts of its loader (0.2.0) that decide the form: any further column of a line is passed to the
chat template as an argument, so there is none; `reasoning_content` beside `content` is what its
thinking parsers render, so reasoning stays out of the text; a message's `tool_calls` and a line's
`tools` may be JSON text, which keeps the columns' types, and the empty text for "no tool call" is
taken out of the message, as templates want it that ask whether the member is there.
"""

from typing import Any

import msgspec
from typing_extensions import override

from producer.formats.conversation import Turn
from producer.formats.training import RoleFormat


class SpecForge(RoleFormat):
    """Tool calls as JSON text."""

    @override
    def tool_calls(self, turn: Turn) -> dict[str, Any]:
        """Give JSON text, empty without any."""
        text = msgspec.json.encode(turn.tool_calls).decode() if turn.tool_calls else ""
        return {"tool_calls": text}


def make() -> SpecForge:
    """Make what writes one file."""
    return SpecForge()
