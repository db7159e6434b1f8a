"""Find out how many requests a server should hold: its cap, and the bound that follows. Pure.

The cap is what the server runs at once, after its own limits (for a hybrid model often the mamba
pool, not what was asked for). The bound adds a small backlog, so that a slot that becomes free is
filled by the server itself in its next step. A longer backlog gains nothing: it is lost when the
server dies.
"""

import re
from typing import Literal

BACKLOG_MIN = 2
DEFAULT_CAP = 32
"""What is assumed of a server that does not tell its cap and was given no explicit bound."""

# Not the line with all arguments, which has the figure that was asked for.
_SUMMARY = re.compile(r"\bmax_running_requests=(\d+), context_len=")
_LOWERED = re.compile(r"max_running_requests (?:is capped to|was reduced .*? to) (\d+)")


def backlog_of(cap: int) -> int:
    """Say how many requests wait at a full server: 10 % of its cap, at least 2."""
    return max(BACKLOG_MIN, cap // 10)


def bound_of(concurrency: int | Literal["auto"], cap: int | None) -> int:
    """Say how many requests may be open at a server, over all processes.

    Args:
        concurrency: What the user asked for: a number is never exceeded.
        cap: The server's effective cap, None when it does not tell.

    Returns:
        At least 1: min(C, cap + backlog) for an explicit C, else cap + backlog.
    """
    if concurrency != "auto" and concurrency < 1:
        raise ValueError(f"concurrency must be at least 1 or auto, got {concurrency}")
    if cap is None or cap < 1:
        if concurrency != "auto":
            return concurrency
        cap = DEFAULT_CAP
    full = cap + backlog_of(cap)
    return full if concurrency == "auto" else min(concurrency, full)


def cap_from_log(log: str) -> int | None:
    """Read the cap from a server's log, for versions that tell it nowhere else.

    Args:
        log: Any part of the log; the last start counts.

    Returns:
        The summary line's figure, which is the effective one in every version; else that of a
        warning; None when there is neither.
    """
    found = _SUMMARY.findall(log) or _LOWERED.findall(log)
    return int(found[-1]) if found else None
