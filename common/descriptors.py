"""How many files this process may open, of which each open request takes one.

Many systems give 1,024 and allow far more to whoever asks; so we ask. What is left bounds the
requests, because a process without a descriptor can reach neither its server nor Redis.
"""

import contextlib
import resource

SPARE = 128
"""For Redis, aborts, probes, pages of the server, the store, and what libraries open."""

ENOUGH = 65_536
"""More is not asked for: programs that a process starts may close each by hand."""


def raise_limit() -> int:
    """Raise this process's limit of open files as far as it may and makes sense.

    Returns:
        The limit as it is now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # Some systems let nobody raise it, whatever the hard limit says.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return _limit()


def most_requests() -> int:
    """Say how many requests may be open beside what else needs descriptors; at least 1."""
    return max(1, _limit() - SPARE)


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH if soft == resource.RLIM_INFINITY else soft
