"""Say what binds a server's concurrency, and what each strategy would give instead. Pure.

diagnose       of a running server, by what it says of itself
before_launch  of a model and a GPU, for `--strategy best`
"""

from typing import Literal

import msgspec

from workers.servers.capacity import Strategy, kv_cap, states_per_request
from workers.servers.facts import ServerFacts
from workers.servers.model_shape import ModelShape
from workers.servers.strategies import (
    Option,
    Pools,
    Prompts,
    best_of,
    options_of,
    pools_before_launch,
)

Binds = Literal["mamba pool", "KV pool", "requested", "default", "unknown"]

WORTH_TELLING = 1.2
"""An alternative that gives less than this times the slots is not advised."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What binds one server, of one data-parallel rank.

    Attributes:
        strategy: By which it runs; None where states are no matter, or nothing tells.
        cap: Requests that it runs at once; None when it does not tell.
        binds: What ends them.
        states, per_request: States in its pool, and how many a request reserves.
        kv_tokens: Tokens that its KV pool holds.
        fits: Requests that the KV pool holds at their mean length; None where that is unknown.
        options: What each strategy would give on the same memory; none without a pool of states.
        words: One sentence on what binds.
        advice: What to do; empty when nothing gains much.
    """

    strategy: Strategy | None = None
    cap: int | None = None
    binds: Binds = "unknown"
    states: int | None = None
    per_request: int | None = None
    kv_tokens: int | None = None
    fits: int | None = None
    options: list[Option] = []
    words: str = ""
    advice: str = ""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What `--strategy best` comes to.

    Attributes:
        strategy: None: the strategy makes no difference, or nobody can tell; give none.
        slots: Requests at once that are expected, for --max-running-requests; None is unknown.
        states: What to ask for with --max-mamba-cache-size; None leaves it to SGLang.
        words: Why, for people.
        options: What was chosen among.
    """

    strategy: Strategy | None
    slots: int | None = None
    states: int | None = None
    words: str = ""
    options: list[Option] = []


def diagnose(
    facts: ServerFacts, *, shape: ModelShape | None = None, prompts: Prompts | None = None
) -> Diagnosis:
    """Say what binds a running server, and what would give more.

    Args:
        facts: What it says of itself.
        shape: What a request costs, where the model's config.json can be read.
        prompts: What is known of those that it serves.
    """
    prompts = prompts or Prompts()
    per_request = _per_request(facts)
    tokens = prompts.tokens
    fits = int(facts.kv_tokens / tokens) if facts.kv_tokens and tokens else None
    options = (
        options_of(
            pools_of(facts, shape),
            version=facts.version,
            speculative=facts.speculative,
            tokens=tokens,
        )
        if facts.states
        else []
    )
    found = Diagnosis(
        strategy=facts.strategy if facts.recurrent is not False else None,
        cap=facts.cap,
        binds=_binds(facts, per_request, fits),
        states=facts.states,
        per_request=per_request,
        kv_tokens=facts.kv_tokens,
        fits=fits,
        options=options,
    )
    return msgspec.structs.replace(
        found, words=_words(found, facts, prompts), advice=_advice(found, facts, prompts)
    )


def before_launch(
    shape: ModelShape,
    *,
    version: str = "",
    prompts: Prompts | None = None,
    pool_bytes: float | None = None,
    ratio: float = 0.9,
) -> Choice:
    """Choose a strategy for a model that is to be launched.

    Args:
        shape: What a request costs, from its config.json.
        version: SGLang's; empty for the newest.
        prompts: What is known of those that will come.
        pool_bytes: Of one GPU, for both pools (`pool_bytes_of`); None is unknown.
        ratio: --mamba-full-memory-ratio.
    """
    if shape.recurrent is False:
        return Choice(
            strategy=None,
            words=f"{shape.family or 'this model'} keeps no states: the strategy makes no "
            "difference, and its prefix cache costs no slots",
        )
    if shape.recurrent is None:
        return Choice(
            strategy=None,
            words=f"cannot tell whether {shape.family or 'this model'} keeps states "
            f"({shape.why_not or 'no config.json'}): left to SGLang",
        )
    prompts = prompts or Prompts()
    pools = pools_before_launch(
        pool_bytes=pool_bytes,
        state_bytes=shape.state_bytes,
        token_bytes=shape.token_bytes,
        ratio=ratio,
    )
    options = options_of(pools, version=version, tokens=prompts.tokens)
    best = best_of(options, prompts)
    told = [f"{best.strategy}: {_states(best.per_request)} a running request"]
    if best.most:
        told.append(f"about {best.most:,} requests at once")
    others = _others(options, best.strategy)
    if others:
        told.append(f"instead of {others}")
    if shape.state_bytes is None:
        told.append(f"how many is not known ({shape.why_not})")
    return Choice(
        strategy=best.strategy,
        slots=best.most,
        states=best.states,
        words=f"{', '.join(told)}; its price: {best.price}",
        options=options,
    )


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


def launched_line(found: Diagnosis, *, version: str = "") -> str:
    """Say in one line what a server came to: version, strategy, cap and why, KV tokens, states."""
    parts = [f"SGLang {version or 'of unknown version'}"]
    if found.strategy:
        parts.append(found.strategy)
    parts.append(found.words)
    if found.kv_tokens:
        parts.append(f"{found.kv_tokens:,} KV tokens")
    return ", ".join(parts)


# --- What binds ----------------------------------------------------------------------------------


def _per_request(facts: ServerFacts) -> int | None:
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


def _binds(facts: ServerFacts, per_request: int | None, fits: int | None) -> Binds:
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


# --- In words ------------------------------------------------------------------------------------


def _words(found: Diagnosis, facts: ServerFacts, prompts: Prompts) -> str:
    if found.cap is None:
        return "it does not tell how many requests it runs at once"
    told = f"{found.cap:,} requests at once"
    pool = (
        f"{found.states:,} states, {found.per_request} a request"
        if found.states and found.per_request
        else ""
    )
    if found.binds == "KV pool" and found.fits is not None:
        return (
            f"{told}, of which the KV pool holds {found.fits:,} at their {prompts.tokens:,.0f} "
            "tokens: the KV pool binds"
        )
    why = {
        "mamba pool": f"the mamba pool binds ({pool})",
        "KV pool": "half the KV pool's tokens bind",
        "requested": "as many as --max-running-requests asks" + (f" ({pool})" if pool else ""),
        "default": "SGLang's own default, nothing asked for more",
        "unknown": f"what binds is not known{f' ({pool})' if pool else ''}",
    }[found.binds]
    if found.binds == "mamba pool" and facts.asked is not None and facts.asked > found.cap:
        why += f", {facts.asked:,} were asked for"
    return f"{told}: {why}"


def _advice(found: Diagnosis, facts: ServerFacts, prompts: Prompts) -> str:
    if found.binds == "KV pool" and found.fits is not None:
        return (
            "requests are set back when it is full: give it more tokens (--mem-fraction-static, "
            "--kv-cache-dtype fp8_e4m3, a smaller --mamba-full-memory-ratio), or fewer requests"
        )
    if found.binds not in {"mamba pool", "requested"} or not found.options or not found.cap:
        return ""
    best = best_of(found.options, prompts)
    mine = next((each for each in found.options if each.strategy == found.strategy), None)
    if found.binds == "requested" and (mine is None or _gains(mine.most, found.cap)):
        slots = mine.most if mine else None
        more = f": its memory holds about {slots:,}" if slots else ""
        return f"ask for more with --max-running-requests{more}"
    if best.strategy == found.strategy:
        return _advice_to_resize(mine, found.cap)
    if not _gains(best.most, found.cap):
        return ""
    others = _others(found.options, best.strategy, but=found.strategy)
    # Without the requests' mean length nobody knows what the KV pool says to so many.
    about = "about" if prompts.tokens else "up to"
    return (
        f"{best.strategy} gives {about} {best.most:,} on the same memory"
        f"{f' ({others})' if others else ''}{_asks_for(best)}{_graphs(best, facts)}; its price: "
        f"{best.price}"
    )


def _graphs(option: Option, facts: ServerFacts) -> str:
    """Say that a larger batch would decode slowly; a limit that follows what was asked rises."""
    most, limit = option.most or 0, facts.graph_cap
    if limit is None or most <= limit or limit in {facts.asked, facts.cap}:
        return ""
    return f" (above {limit:,} it decodes without captured graphs: raise --cuda-graph-max-bs too)"


def _advice_to_resize(mine: Option | None, cap: int) -> str:
    if mine is None or mine.resized is None or not _gains(mine.resized, cap):
        return ""
    return (
        f"about {mine.resized:,} would fit into the same memory, split otherwise{_asks_for(mine)}"
    )


def _asks_for(option: Option) -> str:
    if option.strategy == "no_radix":
        return f", with --max-running-requests {option.slots}"
    if option.states is not None:
        return f", with --max-mamba-cache-size {option.states}"
    return ""


def _others(options: list[Option], best: Strategy, *, but: Strategy | None = None) -> str:
    told = [
        f"{each.strategy} {each.most:,}" if each.most else f"{each.strategy} {each.per_request}"
        for each in options
        if each.offered and each.strategy not in {best, but}
    ]
    return ", ".join(told)


def _gains(slots: int | None, cap: int) -> bool:
    return slots is not None and slots >= WORTH_TELLING * cap


def _states(number: int) -> str:
    return f"{number} state{'' if number == 1 else 's'}"
