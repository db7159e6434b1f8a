"""Files of conversations, a line each, in which every line has the same members.

Such files are read with `datasets`, which takes the types of a column from the first 10 MB: a
member that appears later, or that is null there and a text later, ends the loading with an error.
So a member stands in every line and message of a file, or in none, and none is null.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from typing_extensions import override

from producer.formats.base import ExportedRow, LineFormat, UnfitError, read_row
from producer.formats.conversation import Conversation, Turn, conversations
from producer.formats.token_ids import NO_TOKENS, token_lines
from producer.outfile import OutFile

_OPTIONAL = ("reasoning", "tool_calls", "tool_call_id", "name")
_encode = msgspec.json.Encoder().encode


class ConversationFormat(LineFormat):
    """A line is a conversation; `tools` as JSON text stands in each, where the file has any."""

    def __init__(self) -> None:
        super().__init__()
        self.members: set[str] = set()
        """Members of `Turn` that some message of the file has."""
        self._tools = False
        self._choices_left = 0

    @override
    def look(self, row: bytes) -> None:
        """Note which members the file needs."""
        self.see(read_row(row))

    def see(self, row: ExportedRow) -> None:
        """Note which members the file needs."""
        try:
            found = conversations(row)
        except UnfitError:
            return
        for conversation in found:
            self._tools |= bool(conversation.tools)
            for turn in conversation.turns:
                self.members.update(name for name in _OPTIONAL if getattr(turn, name))

    @override
    def lines(self, row: bytes) -> Sequence[bytes]:
        """Give a line for each choice."""
        completion = read_row(row)
        found = conversations(completion)
        self._choices_left += max(0, len(completion.choices) - len(found))
        return [_encode(self._whole(conversation)) for conversation in found]

    @override
    def write(self, to: OutFile, rows: Iterable[bytes]) -> None:
        """Write the file, and say what of its completions is not in it."""
        super().write(to, rows)
        if self._choices_left:
            self.tally.notes.append(
                f"{self._choices_left:,} choices without text are left out, beside others of "
                "their prompts"
            )

    def _whole(self, conversation: Conversation) -> dict[str, Any]:
        line = self.line(conversation)
        if self._tools:
            line["tools"] = conversation.tools
        return line

    @abstractmethod
    def line(self, conversation: Conversation) -> dict[str, Any]:
        """Give a conversation's line, `tools` aside."""


class RoleFormat(ConversationFormat):
    """What SpecForge and speculators have in common: messages of role and content, or tokens.

    Both take `input_ids` with `loss_mask` as they are, without a chat template. That is what the
    engine used and made, so a run that keeps token ids gives them: a line for each choice and for
    each turn that was generated.
    """

    def __init__(self) -> None:
        super().__init__()
        self._with_tokens = self._without_tokens = 0

    @override
    def see(self, row: ExportedRow) -> None:
        """Note which members the file needs, and whether token ids can stand for them."""
        super().see(row)
        if token_lines(row) is None:
            self._without_tokens += 1
        else:
            self._with_tokens += 1

    @property
    def writes_tokens(self) -> bool:
        """Whether the lines are token ids."""
        return self.token_ids and self._with_tokens > 0 and not self._without_tokens

    @override
    def lines(self, row: bytes) -> Sequence[bytes]:
        """Give a line for each choice, and of token ids for each turn."""
        if not self.writes_tokens:
            return super().lines(row)
        made = token_lines(read_row(row))
        if not made:
            raise UnfitError(NO_TOKENS)
        return [_encode(line) for line in made]

    @override
    def write(self, to: OutFile, rows: Iterable[bytes]) -> None:
        """Write the file, and say where token ids had to be left out."""
        super().write(to, rows)
        if self.token_ids and self._with_tokens and self._without_tokens:
            self.tally.notes.append(
                f"{self._without_tokens:,} completions have no token ids, so the file holds "
                f"conversations and not the token ids of the other {self._with_tokens:,}"
            )

    @override
    def line(self, conversation: Conversation) -> dict[str, Any]:
        """Give a conversation's line."""
        messages = [self._message(turn) for turn in conversation.turns]
        return {"id": conversation.id, "conversations": messages}

    def _message(self, turn: Turn) -> dict[str, Any]:
        message: dict[str, Any] = {"role": turn.role, "content": turn.content}
        if "reasoning" in self.members:
            message["reasoning_content"] = turn.reasoning
        if "tool_calls" in self.members:
            message.update(self.tool_calls(turn))
        for name in ("tool_call_id", "name"):
            if name in self.members:
                message[name] = getattr(turn, name)
        return message

    @abstractmethod
    def tool_calls(self, turn: Turn) -> dict[str, Any]:
        """Give the member for a message's tool calls, in a file that has some."""
