"""Find answers that are text, and yet nothing to train on. Pure, and cheap: every answer is seen.

    repeating            it ends in a loop: the same piece of text over and over
    unparsed_reasoning   its thinking stands in the content: no reasoning parser took it out
    same_answer          another prompt lately got the very same long text

A loop is found exactly: the last characters are searched for once more before themselves, and
what lies between is the piece. That takes 2 microseconds for 4,096 characters. One that changes a
little each time is not seen: to compress the end would find it, at 150 times the cost, and would
call generated code a loop too.
"""

from collections.abc import Sequence

from common.models import Choice

PROBE_CHARS = 32
LOOP_CHARS = 256
LOOP_TURNS = 4
WINDOW_CHARS = 4096
"""A piece stands at least four times, over at least 256 of the last 4,096 characters."""

SAME_CHARS = 200
"""Shorter answers are labels and refusals, which many prompts share."""

MOST_KNOWN = 4096

_BEGINS = ("<think", "<|channel|>analysis", "<seed:think>", "[THINK]", "◁think▷")
_ENDS = ("</think", "</seed:think>", "[/THINK]", "◁/think▷")


def loops(text: str) -> bool:
    """Tell whether a text ends in a loop."""
    if len(text) < LOOP_CHARS:
        return False
    tail = text[-WINDOW_CHARS:]
    end = len(tail) - PROBE_CHARS
    before = tail.rfind(tail[end:], 0, len(tail) - 1)
    if before < 0:
        return False
    turn = end - before
    size = max(LOOP_CHARS, LOOP_TURNS * turn)
    return size <= len(tail) and tail[-size:-turn] == tail[turn - size :]


def repeating(choices: Sequence[Choice]) -> bool:
    """Tell whether any choice ends in a loop; one that never began to answer, in its thinking."""
    return any(loops(each.content or each.reasoning_content or "") for each in choices)


def unparsed_reasoning(choices: Sequence[Choice]) -> bool:
    """Tell whether thinking stands in the content of any choice, and nowhere else."""
    return any(
        each.content is not None and not each.reasoning_content and _thinks(each.content)
        for each in choices
    )


def _thinks(content: str) -> bool:
    # With many templates the opening mark stands in the prompt. One search for what all closing
    # marks hold is quicker than one for each.
    if "think" not in content and "THINK" not in content:
        return content.startswith(_BEGINS)
    return content.lstrip().startswith(_BEGINS) or any(mark in content for mark in _ENDS)


class Lately:
    """The long answers of the last few thousand prompts, as hashes: bounded memory."""

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}

    def same(self, run: str, fingerprint: bytes, text: str) -> bool:
        """Tell whether another prompt of the run has had this text; samples of one may share it.

        Args:
            run: Its name.
            fingerprint: Of the prompt's request.
            text: Of its first choice.
        """
        if len(text) < SAME_CHARS:
            return False
        known = self._known.setdefault(hash((run, text)), fingerprint)
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return known != fingerprint
