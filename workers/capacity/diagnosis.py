"""Say what binds a server's concurrency, and what each strategy would give instead. Pure.

diagnose       of a running server, by what it says of itself
before_launch  of a model and a GPU, for `--strategy best`
"""

import msgspec

from workers.capacity.binding import Binds, binds_of, per_request_of, pools_of
from workers.capacity.model_shape import ModelShape
from workers.capacity.strategies import (
    USUAL_RATIO,
    Option,
    Prompts,
    best_of,
    options_of,
    pools_before_launch,
)
from workers.readings.facts import ServerFacts
from workers.releases import Strategy

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
        better: The strategy that is advised, None when it is another thing or none.
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
    better: Strategy | None = None


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
    per_request = per_request_of(facts)
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
        binds=binds_of(facts, per_request, fits),
        states=facts.states,
        per_request=per_request,
        kv_tokens=facts.kv_tokens,
        fits=fits,
        options=options,
    )
    words = _words(found, facts, prompts)
    better = _better(found, prompts)
    advice = (
        _to_change(found, facts, prompts, better) if better else _advice(found, facts, prompts)
    )
    return msgspec.structs.replace(
        found, words=words, advice=advice, better=better.strategy if better else None
    )


def before_launch(
    shape: ModelShape,
    *,
    version: str = "",
    prompts: Prompts | None = None,
    pool_bytes: float | None = None,
    ratio: float = USUAL_RATIO,
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
    """Say what to do where no other strategy is advised."""
    cap = found.cap or 0
    if found.binds == "KV pool" and found.fits is not None:
        return (
            "requests are set back when it is full: give it more tokens (--mem-fraction-static, "
            "--kv-cache-dtype fp8_e4m3, a smaller --mamba-full-memory-ratio), or fewer requests"
        )
    mine = _mine(found)
    if found.binds == "requested" and mine and _gains(mine.most, cap):
        return (
            f"its memory holds {_about(prompts)} {mine.most:,}, ask for more: "
            f"{_restart(mine, facts)}"
        )
    if found.binds == "mamba pool" and mine and _gains(mine.most, cap):
        # Also without a prefix cache, where the size of the pool was asked for and so stood.
        return (
            f"about {mine.most:,} would fit into the same memory, split otherwise: "
            f"{_restart(mine, facts)}"
        )
    return ""


def _mine(found: Diagnosis) -> Option | None:
    return next((each for each in found.options if each.strategy == found.strategy), None)


def _better(found: Diagnosis, prompts: Prompts) -> Option | None:
    """Choose the strategy that is worth a change; None where none is."""
    if found.binds not in {"mamba pool", "requested"} or not found.options or not found.cap:
        return None
    mine = _mine(found)
    if found.binds == "requested" and mine and _gains(mine.most, found.cap):
        return None  # what it has is not even used
    best = best_of(found.options, prompts)
    return best if best.strategy != found.strategy and _gains(best.most, found.cap) else None


def _to_change(found: Diagnosis, facts: ServerFacts, prompts: Prompts, better: Option) -> str:
    others = _others(found.options, better.strategy, but=found.strategy)
    return (
        f"{better.strategy} gives {_about(prompts)} {better.most:,} on the same memory"
        f"{f' ({others})' if others else ''}: {_restart(better, facts)}{_graphs(better, facts)}; "
        f"its price: {better.price}"
    )


def _about(prompts: Prompts) -> str:
    # Without the requests' mean length nobody knows what the KV pool says to so many.
    return "about" if prompts.tokens else "up to"


def _graphs(option: Option, facts: ServerFacts) -> str:
    """Say that a larger batch would decode slowly; a limit that follows what was asked rises."""
    most, limit = option.most or 0, facts.graph_cap
    if limit is None or most <= limit or limit in {facts.asked, facts.cap}:
        return ""
    return f" (above {limit:,} it decodes without captured graphs: raise --cuda-graph-max-bs too)"


def _restart(option: Option, facts: ServerFacts) -> str:
    """Give the command that changes servers of ours, and with it the flags of any other."""
    words = ["workers restart"]
    if option.strategy != facts.strategy:
        words.append(f"--strategy {option.strategy}")
    flags, states = [], option.states
    if option.strategy == "no_radix":
        # A size of the pool that was asked for would stand in the way of the number of requests.
        states = option.most if facts.asked_states is not None else None
    if option.strategy == "no_radix" or (
        facts.asked is not None and facts.asked < (option.most or 0)
    ):
        flags.append(f"--max-running-requests {option.most}")
    if states is not None:
        flags.append(f"--max-mamba-cache-size {states}")
    return f"`{' '.join([*words, *(['--', *flags] if flags else [])])}`"


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
