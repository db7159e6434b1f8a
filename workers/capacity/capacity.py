"""Find out how many requests a server should hold: its cap, and the bound that follows. Pure.

The cap is what the server runs at once, after its own limits (for a hybrid model often the mamba
pool, not what was asked for). The bound adds a small backlog, so that a slot that becomes free is
filled by the server itself in its next step. A longer backlog gains nothing: it is lost when the
server dies.

How SGLang comes to its cap, by version:

    states a request holds   no_radix 1, no_buffer 3, extra_buffer_lazy 4, extra_buffer 5 (4 where
                             the overlap scheduler is off; before 0.5.10 where it speculates);
                             one less for the extra buffers under SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK
    what was asked           before 0.5.10 as it is; to 0.5.13 at most what `default_cap` gives
                             without its second limit; from 0.5.14 half the KV pool's tokens
    nothing asked            KV tokens / context * 512, from 2,048 to 4,096; from 0.5.10 at most
                             half the KV pool's tokens
    a pool of states         K / states a request, in every version
"""

from typing import Literal

from workers.releases import Strategy, release_or_newest

BACKLOG_MIN = 2
DEFAULT_CAP = 32
"""What is assumed of a server that does not tell its cap and was given no explicit bound."""


_BASE_STATES = 3
_TRACKED: dict[tuple[Strategy, bool], int] = {
    ("extra_buffer", True): 2,
    ("extra_buffer", False): 1,
    ("extra_buffer_lazy", True): 1,
}
"""States beside the base ones, by strategy and whether the overlap scheduler runs."""

_SKIP_LOCK_SINCE = (0, 5, 18)
_OVERLAP_COUNTS_SINCE = (0, 5, 10)
_ASKED_CLIPPED_SINCE = (0, 5, 10)
_ASKED_BY_TOKENS_SINCE = (0, 5, 14)

LEAST_DEFAULT, MOST_DEFAULT = 2_048, 4_096


def states_per_request(
    strategy: Strategy,
    *,
    version: str = "",
    overlap: bool = True,
    speculative: bool = False,
    skip_decode_lock: bool = False,
) -> int:
    """Say how many states of the mamba pool a running request reserves.

    Args:
        strategy: See `Strategy`.
        version: SGLang's; empty for the newest.
        overlap: Whether the overlap scheduler runs.
        speculative: Whether it decodes speculatively, which decided before 0.5.10.
        skip_decode_lock: SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK is set in the server's environment.
    """
    if strategy == "no_radix":
        return 1
    if release_or_newest(version) < _OVERLAP_COUNTS_SINCE:
        overlap = not speculative
    tracked = _TRACKED.get((strategy, overlap), 0)
    skips = bool(tracked) and skip_decode_lock and release_or_newest(version) >= _SKIP_LOCK_SINCE
    return _BASE_STATES + tracked - skips


def default_cap(kv_tokens: int, context_length: int, *, version: str = "") -> int:
    """Say what a server that was asked for no number runs at once, before its pool of states.

    Args:
        kv_tokens: Tokens that its KV pool holds.
        context_length: Tokens of prompt and answer together.
        version: SGLang's; empty for the newest.
    """
    cap = _estimated(kv_tokens, context_length)
    if release_or_newest(version) >= _ASKED_CLIPPED_SINCE:
        cap = min(cap, kv_tokens // 2)
    return max(1, cap)


def kv_cap(
    asked: int | None, *, kv_tokens: int | None, context_length: int | None, version: str = ""
) -> int | None:
    """Say what a server runs at once by what was asked and its KV pool; None where unknown.

    Args:
        asked: --max-running-requests, None when nothing was asked.
        kv_tokens: Tokens that its KV pool holds.
        context_length: Tokens of prompt and answer together.
        version: SGLang's; empty for the newest.
    """
    release = release_or_newest(version)
    if asked is None:
        if kv_tokens is None or context_length is None:
            return None
        return default_cap(kv_tokens, context_length, version=version)
    if release >= _ASKED_BY_TOKENS_SINCE:
        return asked if kv_tokens is None else min(asked, max(1, kv_tokens // 2))
    if release >= _ASKED_CLIPPED_SINCE and kv_tokens is not None and context_length is not None:
        return min(asked, _estimated(kv_tokens, context_length))
    return asked


def _estimated(kv_tokens: int, context_length: int) -> int:
    return min(MOST_DEFAULT, max(LEAST_DEFAULT, int(kv_tokens / max(1, context_length) * 512)))


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
