"""Find out what ends a running server's concurrency, by what it says of itself. Pure."""

from typing import Literal

from workers.servers.capacity import kv_cap, states_per_request
from workers.servers.facts import ServerFacts
from workers.servers.loads import ServerLoad
from workers.servers.model_shape import ModelShape
from workers.servers.strategies import Pools

Binds = Literal["mamba pool", "KV pool", "requested", "default", "unknown"]

FULL_SHARE = 0.9
"""With so many of its slots taken a server counts as full."""


def pools_of(facts: ServerFacts, shape: ModelShape | None) -> Pools:
    """Put together what is known of a server's memory.

    What config.json does not tell is taken from the server: a token's bytes from the KV pool's, a
    state's from its log, else from the ratio at which SGLang split the memory by itself.
    """
    token_bytes: float | None = shape.token_bytes if shape else None
    state_bytes: float | None = shape.state_bytes if shape else None
    if not token_bytes and facts.kv_bytes and facts.kv_tokens:
        token_bytes = facts.kv_bytes / facts.kv_tokens
    if not state_bytes and facts.states_bytes and facts.states:
        state_bytes = facts.states_bytes / facts.states
    split = bool(facts.states and facts.kv_tokens and facts.ratio)
    by_itself = split and facts.asked_states is None and facts.strategy != "no_radix"
    if not state_bytes and token_bytes and by_itself:
        kv_bytes = (facts.kv_tokens or 0) * token_bytes
        state_bytes = (facts.ratio or 0.0) * kv_bytes / (facts.states or 1)
    return Pools(
        states=facts.states,
        kv_tokens=facts.kv_tokens,
        state_bytes=state_bytes or None,
        token_bytes=token_bytes or None,
    )


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
