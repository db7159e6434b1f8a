"""Find out what ends a running server's concurrency, by what it says of itself. Pure."""

from typing import Literal

import msgspec

from workers.capacity.capacity import kv_cap, states_per_request
from workers.capacity.model_shape import ModelShape
from workers.capacity.strategies import Pools
from workers.readings.facts import ServerFacts
from workers.readings.loads import ServerLoad

Binds = Literal["mamba pool", "KV pool", "requested", "default", "unknown"]

LARGE_POOL_BYTES = 0.5e9
"""From here on a pool's size, told to 10 MB at worst, says what one of it takes."""
ROUNDED = 0.1

FULL_SHARE = 0.9
"""With so many of its slots taken a server counts as full."""


def pools_of(facts: ServerFacts, shape: ModelShape | None) -> Pools:
    """Put together what is known of a server's memory.

    What config.json tells is exact, unless the server goes by something else (a type that the
    weights' own quantization sets, an environment variable): then what it says of its pools
    counts. What neither tells of a state is taken from the ratio at which SGLang splits the memory
    by itself. With speculative decoding states have company that is not told: only the present
    split is known.
    """
    known = Pools(states=facts.states, kv_tokens=facts.kv_tokens)
    if facts.speculative:
        return known
    token_bytes = _settled(shape.token_bytes if shape else None, facts.kv_bytes, facts.kv_tokens)
    state_bytes = _settled(shape.state_bytes if shape else None, facts.states_bytes, facts.states)
    split = bool(facts.states and facts.kv_tokens and facts.ratio)
    by_itself = split and facts.asked_states is None and facts.strategy != "no_radix"
    if not state_bytes and token_bytes and by_itself:
        kv_bytes = (facts.kv_tokens or 0) * token_bytes
        state_bytes = (facts.ratio or 0.0) * kv_bytes / (facts.states or 1)
    return msgspec.structs.replace(known, state_bytes=state_bytes, token_bytes=token_bytes)


def _settled(worked_out: int | None, pool_bytes: float | None, number: int | None) -> float | None:
    """Choose between what config.json comes to and what a pool, of which so many, takes."""
    told = pool_bytes / number if pool_bytes and number else None
    if not worked_out or told is None:
        return worked_out or told
    differs = abs(told - worked_out) > ROUNDED * worked_out
    return told if differs and (pool_bytes or 0.0) >= LARGE_POOL_BYTES else worked_out


def measured_tokens(facts: ServerFacts, load: ServerLoad) -> float | None:
    """Measure what a request holds of the KV pool; None while the server is not full.

    Answers that have come say less, since short ones come first.

    Args:
        facts: Of that server; its cap is that of one rank.
        load: What it last said of itself, of all ranks.
    """
    running, usage, tokens = load.running, load.token_usage, facts.kv_tokens
    if not (running and usage and tokens and facts.cap):
        return None
    if running < FULL_SHARE * facts.cap * facts.ranks:
        return None
    return usage * tokens * facts.ranks / running


def per_request_of(facts: ServerFacts) -> int | None:
    """Say how many states a request reserves; the server's environment shows in its cap alone."""
    if facts.strategy is None or facts.recurrent is False:
        return None
    told = [
        states_per_request(
            facts.strategy,
            version=facts.version,
            overlap=facts.overlap,
            speculative=facts.speculative,
            skip_decode_lock=skips,
        )
        for skips in (False, True)
    ]
    if facts.states and facts.cap and facts.cap > facts.states // told[0]:
        return told[1] if facts.cap <= facts.states // told[1] else told[0]
    return told[0]


def binds_of(facts: ServerFacts, per_request: int | None, fits: int | None) -> Binds:
    """Say what ends a server's concurrency.

    Args:
        facts: What it says of itself.
        per_request: States that a request reserves, None without any.
        fits: Requests that its KV pool holds at their length, None where that is unknown.
    """
    cap = facts.cap
    if cap is None:
        return "unknown"
    if fits is not None and fits < cap:
        return "KV pool"
    by_states = facts.states // per_request if facts.states and per_request else None
    if facts.asked is not None and cap >= facts.asked:
        # Also where the pool of states was made for just that number.
        return "requested"
    if by_states is not None and cap >= by_states:
        return "mamba pool"
    by_kv = kv_cap(
        facts.asked,
        kv_tokens=facts.kv_tokens,
        context_length=facts.context_length,
        version=facts.version,
    )
    if by_kv is not None and cap >= by_kv:
        return "default" if facts.asked is None else "KV pool"
    return "unknown"
