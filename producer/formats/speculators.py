"""The conversations that `speculators prepare-data` of vLLM's speculators takes.

Facts of its loader (0.9.0): it reads `conversations` and `tools` (JSON text) of a .jsonl file,
keeps `reasoning_content`, and sends the messages to vLLM's /render, so tool calls are lists. An
empty list has no type that a later one could fit; `datasets` takes messages of any shape when
those of one conversation differ in their members, so only answers have `tool_calls`.
"""

from typing import Any

from typing_extensions import override

from producer.formats.conversation import Turn
from producer.formats.training import RoleFormat


class Speculators(RoleFormat):
    """Tool calls as lists."""

    @override
    def tool_calls(self, turn: Turn) -> dict[str, Any]:
        """Give the list to answers, empty without any."""
        return {"tool_calls": turn.tool_calls} if turn.role == "assistant" else {}


def make() -> Speculators:
    """Make what writes one file."""
    return Speculators()
