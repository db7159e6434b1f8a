"""Say in words why a server has ended, by the last that it wrote and its exit code. Pure.

An exception in one of SGLang's processes ends all of them, and each then reports the end of the
others: what counts is the first that a scheduler says, else the last that is not about others.
"""

import re
import signal

import msgspec

MOST_CHARS = 400

_STAMP = re.compile(r"^(?:\[\d{4}-\d\d-\d\d[^\]]*\]\s*)+")
_ARGPARSE = re.compile(r"^[\w./ -]{1,80}: error: (.+)$")
_ERROR = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)(?::.*)?$")
_FOLLOWS = re.compile(
    r"^(?:EOFError|BrokenPipeError|ConnectionResetError|asyncio\.\S*CancelledError)\b"
    r"|^RuntimeError: (?:Initialization failed|Rank \d+ scheduler (?:is dead|died))"
)
_SCHEDULER = "Scheduler hit an exception"
_CHILD = re.compile(r"Subprocess \S{1,80} \(pid=\d+\) crashed with exit code (-?\d+)")
_WATCHDOG = "Scheduler watchdog timeout"

_ADVICE = (
    (
        re.compile(r"(?i)out ?of ?memory|not enough memory|no available memory"),
        "see with nvidia-smi who else holds the GPU's memory; else lower --mem-fraction-static",
    ),
    (re.compile(r"unrecognized arguments|ambiguous option"), "this version has no such flag"),
    (re.compile(r"(?i)address already in use"), "somebody listens on its port"),
    (re.compile(r"No module named|cannot import name"), "its environment lacks that"),
    (
        re.compile(r"(?i)no space left"),
        "make room on that disk",
    ),
)


class LastWords(msgspec.Struct, frozen=True):
    """Why a server has ended.

    Attributes:
        text: In words, the server's own line among them.
        repeats: The next start would end the same, since its arguments are refused.
    """

    text: str
    repeats: bool = False


def last_words(log: str, exit_code: int | None) -> LastWords:
    """Read why a server has ended.

    Args:
        log: What it wrote since its start, or the end of that.
        exit_code: Negative for a signal; None where nobody knows it.
    """
    lines = [_STAMP.sub("", line).strip() for line in log.splitlines()]
    for line in reversed(lines):
        refused = _ARGPARSE.match(line)
        if refused and exit_code in {2, None}:
            return LastWords(_with_advice(f"it refuses its arguments: {refused[1]}"), repeats=True)
    said = _telling(lines)
    if said:
        return LastWords(_with_advice(said))
    return LastWords(_by_code(exit_code))


def _telling(lines: list[str]) -> str:
    start = next((n for n, line in enumerate(lines) if _SCHEDULER in line), None)
    if start is not None:
        first = next((line for line in lines[start:] if _ERROR.match(line)), "")
        if first:
            return first
    for line in reversed(lines):
        if _ERROR.match(line) and not _FOLLOWS.match(line):
            return line
    for line in reversed(lines):
        if _WATCHDOG in line:
            return "its own watchdog found a step that did not end"
        child = _CHILD.search(line)
        if child:
            return f"a process of it ended: {_by_code(int(child[1]))}"
    return ""


def _by_code(code: int | None) -> str:
    if code is None:
        return "it is gone"
    if code >= 0:
        return f"it ended with exit code {code} and said nothing of why"
    if -code == signal.SIGKILL:
        return (
            "it was killed (SIGKILL): by the kernel for want of memory (dmesg tells), or by hand"
        )
    try:
        return f"it was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was ended by signal {-code}"


def _with_advice(text: str) -> str:
    shown = text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]}…"
    advice = next((words for found, words in _ADVICE if found.search(text)), "")
    return f"{shown} ({advice})" if advice else shown
