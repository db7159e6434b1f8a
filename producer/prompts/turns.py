"""Ask for every answer of a conversation anew: `--turns all`. Pure.

The rules, those of SpecForge's regenerate_train_data where it has one:

    a stored answer                  is dropped; a new one is asked for in its place
    several in a row                 are one answer
    a last turn that is no answer    is answered
    an answer before any question    the row is rejected: nobody has asked
    system, developer, user, tool    stay where they stand
    a call of tools with its results stays too, since results of an old call do not fit a new one;
                                     the answer to them is asked for

SpecForge refuses rows with tools. It answers each of two user turns in a row; here they are
answered once, together, since the author wrote no turn between them.
"""

from collections.abc import Mapping
from typing import Any

from producer.prompts.chat import is_blank
from producer.prompts.verdicts import RowRejectedError


def all_turns(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any] | None], int]:
    """Put None where an answer is to be generated.

    Args:
        messages: Checked (`chat.check_messages`), with the stored answers.

    Returns:
        What is asked, and how many answers it takes: at least one, of which the last ends it. The
        stored answers are no part of it, so they do not count when two requests are compared.

    Raises:
        RowRejectedError: An answer stands before the first question, or a question is empty.
    """
    asked: list[dict[str, Any] | None] = []
    answers = 0
    question: tuple[int, Any] | None = None
    at = 0
    while at < len(messages):
        end = _end_of_answer(messages, at)
        if end == at:
            message = messages[at]
            if message["role"] == "user":
                question = (at + 1, message.get("content"))
            asked.append(message)
            at += 1
            continue
        _check_asked(question)
        if end < len(messages) and messages[end]["role"] == "tool":
            asked += messages[at:end]
        else:
            asked.append(None)
            answers += 1
        at = end
    if asked[-1] is not None:
        _check_asked(question)
        asked.append(None)
        answers += 1
    return asked, answers


def _end_of_answer(messages: list[dict[str, Any]], at: int) -> int:
    while at < len(messages) and messages[at]["role"] == "assistant":
        at += 1
    return at


def _check_asked(question: tuple[int, Any] | None) -> None:
    if question is None:
        raise RowRejectedError(
            "first_turn", "the assistant speaks before the user has asked: not with --turns all"
        )
    number, content = question
    if is_blank(content):
        raise RowRejectedError(
            "empty_prompt", f"turn {number} is empty, and with --turns all it is to be answered"
        )


def unfit(parameters: Mapping[str, Any]) -> str:
    """Say which request parameter does not go with `--turns all`, empty when none is there."""
    choices = parameters.get("n")
    if choices is not None and choices != 1:
        return "n is not 1, but with --turns all a turn has one answer, which the next builds on"
    if parameters.get("continue_final_message"):
        return "continue_final_message does not go with --turns all, which drops stored answers"
    return ""
