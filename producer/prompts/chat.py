"""Check the messages of a chat, and turn stored conversations into requests. Pure.

What is refused here are rows that no server can answer well: no user turn, a blank last user turn,
turns that are no turns, addresses of local files. All else passes unchanged; the server judges it.
"""

from typing import Any

from producer.prompts.addresses import check_address
from producer.prompts.verdicts import RowRejectedError

_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_TURN_MEMBERS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""What of a stored turn is sent; weights, scores and the like are the data set's own."""

_LEADING = ("system", "developer")


def check_messages(messages: Any, *, private: bool = False) -> None:
    """Check the `messages` of a chat request.

    Args:
        messages: As the row has them.
        private: Their addresses may be of private networks.

    Raises:
        RowRejectedError: Naming the turn, from 1.
    """
    if type(messages) is not list:
        raise RowRejectedError("bad_type", "messages is no list of turns")
    if not messages:
        raise RowRejectedError("empty_prompt", "messages is empty")
    last_user: Any = None
    for number, message in enumerate(messages, 1):
        if type(message) is not dict:
            raise RowRejectedError("bad_type", f"turn {number} of messages is no object")
        role = message.get("role")
        if type(role) is not str:
            raise RowRejectedError("role", f"turn {number} of messages has no role")
        content = message.get("content")
        if type(content) is not str and content is not None:
            _check_parts(content, number, private=private)
        if role == "user":
            last_user = message
    if last_user is None:
        raise RowRejectedError("no_user", "there is no user turn to answer")
    if is_blank(last_user.get("content")):
        raise RowRejectedError("empty_prompt", "the last user turn is empty")


def is_blank(content: Any) -> bool:
    """Tell whether a turn's content holds nothing to answer: no text but white space, no part."""
    if type(content) is str:
        return not content or content.isspace()
    if type(content) is list:
        return all(part.get("type") == "text" and is_blank(part.get("text")) for part in content)
    return True


def _check_parts(content: Any, number: int, *, private: bool) -> None:
    if type(content) is not list:
        raise RowRejectedError(
            "bad_type", f"content of turn {number} is neither text nor a list of parts"
        )
    for part in content:
        if type(part) is not dict:
            raise RowRejectedError("bad_type", f"turn {number} has a part that is no object")
        kind = part.get("type")
        if type(kind) is str and kind.endswith("_url"):
            value = part.get(kind)
            address = value.get("url") if type(value) is dict else value
            check_address(address, f"turn {number}", private=private)


def from_conversation(turns: Any, *, whole: bool = False) -> list[dict[str, Any]]:
    """Turn a stored conversation into the messages that ask for its last answer again.

    Turns are `from`/`value` (human or user, gpt or assistant, system) or `role`/`content`. The
    assistant turns at the end are what is asked for, so they are dropped; a conversation that ends
    with another turn is sent whole. `whole` keeps them: all answers are asked for (`turns`).
    """
    if type(turns) is not list:
        raise RowRejectedError("bad_type", "conversations is no list of turns")
    if not turns:
        raise RowRejectedError("empty_prompt", "conversations is empty")
    messages = [_message(turn, number) for number, turn in enumerate(turns, 1)]
    spoken = [message for message in messages if message["role"] not in _LEADING]
    if spoken and spoken[0]["role"] != "user":
        raise RowRejectedError(
            "first_turn", f"the {spoken[0]['role']} speaks before the user has asked"
        )
    return messages if whole else without_last_answer(messages)


def without_last_answer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop the assistant turns at the end."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    return messages[:end]


def _message(turn: Any, number: int) -> dict[str, Any]:
    if type(turn) is not dict:
        raise RowRejectedError("bad_type", f"turn {number} of conversations is no object")
    if "from" in turn:
        speaker = turn["from"]
        role = _SPEAKERS.get(speaker) if type(speaker) is str else None
        value = turn.get("value")
        message = {"role": role, "content": value}
        wrong = value is not None and type(value) is not str
    else:
        role = turn.get("role")
        role = role if type(role) is str and role in _ROLES else None
        message = {name: turn[name] for name in _TURN_MEMBERS if name in turn}
        wrong = False
    if role is None:
        raise RowRejectedError(
            "role",
            f"turn {number} has an unknown speaker: known are from human, user, gpt, assistant, "
            f"system, or role {', '.join(sorted(_ROLES))}",
        )
    if wrong:
        raise RowRejectedError("bad_type", f"the value of turn {number} is no text")
    return message


def with_system(messages: list[dict[str, Any]], system: str) -> list[dict[str, Any]]:
    """Put a system text that stood beside the turns before them.

    Raises:
        RowRejectedError: If the turns begin with another system text.
    """
    first = messages[0] if messages else None
    if type(first) is dict and first.get("role") in _LEADING:
        if first.get("content") == system:
            return messages
        raise RowRejectedError(
            "ambiguous", "there is a system text beside the turns and another one in them"
        )
    return [{"role": "system", "content": system}, *messages]
