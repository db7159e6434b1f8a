"""Say what is odd about the answers of a run, early enough to stop it. Pure.

Every completion's row bears flags, and the finish script counts them, so that a share is known
from the first answers on. A share is judged from `LEAST_ANSWERS` answers on, or when no more are
to come; what is found is said by `producer status`, progress.json and the logs.
"""

from collections.abc import Iterator

import msgspec

from common.models import Counts

LEAST_ANSWERS = 50
"""Fewer say nothing: the shortest answers come first."""

FLAGS = {
    "truncated": "t",
    "empty": "e",
    "repeating": "r",
    "same_answer": "s",
    "unparsed_reasoning": "u",
    "reasoning_cut": "c",
    "prompt_cut": "p",
    "clamped": "l",
}
"""What a row may be flagged with -> its letter in the finish script, which counts it.

truncated            finish_reason length
empty                no text at all
repeating            ends in a loop
same_answer          the same long text as that of another prompt lately
unparsed_reasoning   thinking stands in the content
reasoning_cut        cut off while it was still thinking
prompt_cut           the server has cut the prompt to what fits
clamped              its limit was lowered to what the context leaves; asked for, never warned of
"""


class Oddity(msgspec.Struct, frozen=True, kw_only=True):
    """What is found, once it is more than a share of the answers; `text` says what to do."""

    flag: str
    above: float
    text: str


_KNOWN = (
    Oddity(
        flag="truncated",
        above=0.2,
        text="were cut off at their token limit (finish_reason length): a larger --max-tokens "
        "gives whole ones",
    ),
    Oddity(
        flag="reasoning_cut",
        above=0.1,
        text="were cut off while still thinking and hold no answer: a larger --max-tokens, or a "
        "request that thinks less",
    ),
    Oddity(
        flag="unparsed_reasoning",
        above=0.1,
        text="hold their thinking as content: start the SGLang servers with the model's "
        "--reasoning-parser, and this run anew",
    ),
    Oddity(
        flag="repeating",
        above=0.05,
        text="end in a loop that says the same again and again: look at the sampling (a "
        "temperature of 0, or no repetition penalty) and the chat template",
    ),
    Oddity(
        flag="same_answer",
        above=0.05,
        text="are word for word the answer to another prompt: look whether the prompts reach the "
        "model (chat template, input fields)",
    ),
    Oddity(
        flag="empty",
        above=0.05,
        text="are empty: look at the stop texts and the chat template",
    ),
    Oddity(
        flag="prompt_cut",
        above=0.0,
        text="are to a prompt that the server has cut: start it without --allow-auto-truncate, "
        "and with a larger --context-length",
    ),
)


def oddities(counts: Counts, *, run: str) -> Iterator[tuple[str, str]]:
    """Give what is odd about so many of the answers that somebody should look.

    Args:
        counts: Of a run, or of one process's share of it.
        run: Its name, for the command to type.

    Yields:
        Flag, and a sentence without a full stop.
    """
    more = counts.queued + counts.in_flight
    if not counts.completed or (more and counts.completed < LEAST_ANSWERS):
        return
    for known in _KNOWN:
        # Where Redis has lost completions, it may still count what was flagged of them.
        share = min(getattr(counts, known.flag) / counts.completed, 1.0)
        if share > known.above:
            look = f"`producer peek {run} --flag {known.flag}` shows some"
            yield known.flag, f"{_percent(share)} of the answers {known.text}; {look}"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{share:.2%}"  # noqa: PLR2004 - a percent
