"""Work out what each strategy would give on the same memory, and choose among them. Pure.

A GPU's memory beside the weights is split once, at a server's start, into a pool of states and a
KV pool. What a strategy changes is how many states a running request reserves; what one request
needs of KV is its tokens. So a strategy's slots are

    radix cache on    min(K / states a request, KV tokens / tokens a request), K as it is;
                      `resized`: memory / (states * state + tokens * token), K asked for to fit
    radix cache off   memory / (state + tokens * token): one state a request, and SGLang gives
                      all that is left to the KV pool

For the mean of a request's tokens at a random instant stands the mean of prompt and answer
together: a request is counted more often the longer it runs, which makes up for those that have
just begun (exactly so where lengths are exponential, to 5 % where they are lognormal with 0.8).
"""

from typing import Literal

import msgspec

from workers.capacity.capacity import states_per_request
from workers.releases import STRATEGIES, Strategy, is_offered

Limit = Literal["mamba pool", "KV pool", "memory"]

WORTH_RESIZING = 1.1
"""Another split that gives less than this times the slots is not worth a restart."""

SHARED = 0.2
"""From this share of prompt tokens found in the prefix cache on, the cache earns its cost."""

USUAL_RATIO = 0.9
"""Bytes of the pool of states to those of the KV pool where nobody says otherwise."""

PRICES: dict[Strategy, str] = {
    "no_buffer": "no overlap scheduler; a prefix is found only where an earlier prompt ended",
    "extra_buffer": "the most states a request; shared prefixes are found, overlap stays on",
    "extra_buffer_lazy": "shared prefixes are found, overlap stays on; from 0.5.13",
    "no_radix": "no prefix is found, each request prefills its whole prompt; overlap stays on",
}
"""What a strategy costs beside its states, for people."""


class Prompts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run's prompts; None is unknown.

    Attributes:
        tokens: Mean of a prompt and its answer together.
        cached_share: Share of prompt tokens that the prefix cache gave, 0 to 1.
        shares: They are known to share long prefixes, or to be turns of conversations.
    """

    tokens: float | None = None
    cached_share: float | None = None
    shares: bool = False

    @property
    def want_prefixes(self) -> bool:
        """Whether a prefix cache that works earns its cost."""
        return self.shares or (self.cached_share or 0.0) >= SHARED


class Pools(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one rank beside the weights; None is unknown.

    Attributes:
        states: In the pool of states.
        kv_tokens: In the KV pool.
        state_bytes, token_bytes: What one takes.
    """

    states: int | None = None
    kv_tokens: int | None = None
    state_bytes: float | None = None
    token_bytes: float | None = None

    @property
    def memory_bytes(self) -> float | None:
        """Both pools together."""
        if not (self.states and self.kv_tokens and self.state_bytes and self.token_bytes):
            return None
        return self.states * self.state_bytes + self.kv_tokens * self.token_bytes


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy, and what it would give.

    Attributes:
        per_request: States that a running request reserves.
        slots: Requests at once; None where the pool is unknown.
        limit: What ends them.
        resized: Slots with another split of the same memory, where that is worth it.
        states: What --max-mamba-cache-size would be asked for then.
        offered: Whether the version knows it.
        price: What it costs beside, for people.
    """

    strategy: Strategy
    per_request: int
    slots: int | None = None
    limit: Limit | None = None
    resized: int | None = None
    states: int | None = None
    offered: bool = True
    price: str = ""

    @property
    def most(self) -> int | None:
        """The slots of its better split."""
        return self.resized if self.resized is not None else self.slots


def options_of(
    pools: Pools, *, version: str = "", speculative: bool = False, tokens: float | None = None
) -> list[Option]:
    """Work out what each strategy gives.

    Args:
        pools: The memory, as one server splits it now.
        version: SGLang's; empty for the newest.
        speculative: Whether it decodes speculatively.
        tokens: Mean of a prompt and its answer together; None leaves the KV pool out of account.
    """
    return [
        _option(strategy, pools, version=version, speculative=speculative, tokens=tokens)
        for strategy in STRATEGIES
    ]


def _option(
    strategy: Strategy, pools: Pools, *, version: str, speculative: bool, tokens: float | None
) -> Option:
    per_request = states_per_request(strategy, version=version, speculative=speculative)
    base = Option(
        strategy=strategy,
        per_request=per_request,
        offered=is_offered(strategy, version),
        price=PRICES[strategy],
    )
    if not pools.states:
        return base
    slots, limit = _as_split(pools, per_request, tokens)
    fitted = _fitted(pools, per_request, tokens)
    if strategy == "no_radix" and fitted:
        # SGLang itself splits the memory anew for the number that is asked for.
        return msgspec.structs.replace(base, slots=fitted, limit="memory")
    if fitted and fitted >= WORTH_RESIZING * slots:
        return msgspec.structs.replace(
            base, slots=slots, limit=limit, resized=fitted, states=fitted * per_request
        )
    return msgspec.structs.replace(base, slots=slots, limit=limit)


def _as_split(pools: Pools, per_request: int, tokens: float | None) -> tuple[int, Limit]:
    slots = (pools.states or 0) // per_request
    by_tokens = int(pools.kv_tokens / tokens) if pools.kv_tokens and tokens else None
    if by_tokens is not None and by_tokens < slots:
        return by_tokens, "KV pool"
    return slots, "mamba pool"


def _fitted(pools: Pools, per_request: int, tokens: float | None) -> int | None:
    memory = pools.memory_bytes
    if memory is None or not tokens or not pools.state_bytes or not pools.token_bytes:
        return None
    return int(memory / (per_request * pools.state_bytes + tokens * pools.token_bytes))


def best_of(options: list[Option], prompts: Prompts) -> Option:
    """Choose the strategy with most slots that these prompts allow.

    Args:
        options: As `options_of` gives them.
        prompts: Of those who share prefixes, only strategies that find them.
    """
    finds: set[Strategy] = {"extra_buffer", "extra_buffer_lazy"}
    able = [
        each
        for each in options
        if each.offered and (each.strategy in finds or not prompts.want_prefixes)
    ] or options
    return max(able, key=lambda each: (each.most or 0, -each.per_request))


def pools_before_launch(
    *,
    pool_bytes: float | None,
    state_bytes: int | None,
    token_bytes: int | None,
    ratio: float = USUAL_RATIO,
) -> Pools:
    """Say how SGLang would split a memory by itself.

    Args:
        pool_bytes: Memory of one GPU for both pools; None is unknown.
        state_bytes: See `ModelShape`.
        token_bytes: See `ModelShape`.
        ratio: --mamba-full-memory-ratio.
    """
    if not (pool_bytes and state_bytes and token_bytes):
        return Pools(state_bytes=state_bytes, token_bytes=token_bytes)
    return Pools(
        states=int(pool_bytes * ratio / (1 + ratio) / state_bytes),
        kv_tokens=int(pool_bytes / (1 + ratio) / token_bytes),
        state_bytes=state_bytes,
        token_bytes=token_bytes,
    )


_LARGE_GPU_BYTES = 60e9
_RESERVE_BYTES = 10e9
_RESERVE_SHARE = 0.12


def pool_bytes_of(
    gpu_bytes: float, weights_bytes: float, *, mem_fraction: float | None = None
) -> float | None:
    """Estimate what of a GPU's memory is left for both pools; None when nothing is.

    Args:
        gpu_bytes: Of one GPU.
        weights_bytes: Of the model's part on it.
        mem_fraction: --mem-fraction-static; None for SGLang's own choice, which leaves about 10 GB
            free on large GPUs and an eighth on smaller ones.
    """
    if mem_fraction is not None:
        usable = gpu_bytes * mem_fraction
    elif gpu_bytes > _LARGE_GPU_BYTES:
        usable = gpu_bytes - _RESERVE_BYTES
    else:
        usable = gpu_bytes * (1 - _RESERVE_SHARE)
    left = usable - weights_bytes
    return left if left > 0 else None
