"""Say in one line what a launch came to: version, strategy, cap, rooms, and what binds. Pure."""

import msgspec

from workers.capacity.diagnosis import diagnose
from workers.capacity.model_shape import ModelShape
from workers.readings.facts import ServerFacts, with_log
from workers.readings.loads import ServerIdentity


class Got(msgspec.Struct, frozen=True, kw_only=True):
    """What a launch came to; None is what nothing told.

    Attributes:
        version: SGLang's.
        strategy: Empty where it makes no difference.
        cap: Requests at once.
        kv_tokens, mamba_states: Room of its pools.
        line: All of it, for people.
        advice: What would give more; empty when nothing gains much.
    """

    version: str
    strategy: str
    cap: int | None
    kv_tokens: int | None
    mamba_states: int | None
    line: str
    advice: str


def got(
    identity: ServerIdentity | None, log: str, *, version: str, strategy: str, shape: ModelShape
) -> Got:
    """Put together what a server tells of itself and what its log does.

    Args:
        identity: What it tells; None when it tells nothing.
        log: What it wrote since its start.
        version: Of the SGLang that was launched.
        strategy: By which; empty where it makes no difference.
        shape: What its model's requests cost.
    """
    told = (identity.facts if identity else None) or ServerFacts(version=version)
    if identity is not None and told.cap is None:
        told = msgspec.structs.replace(told, cap=identity.cap)
    facts = with_log(told, log)
    runs_by = strategy if facts.strategy is None or not strategy else facts.strategy
    found = diagnose(facts, shape=shape)
    parts = [
        f"SGLang {facts.version or version}",
        runs_by or "no states to keep",
        f"cap {_number(facts.cap)}",
        f"{_number(facts.kv_tokens)} KV tokens",
    ]
    if facts.states is not None:
        parts.append(f"{_number(facts.states)} mamba states")
    words = f"; {found.words}" if found.words else ""
    return Got(
        version=facts.version or version,
        strategy=runs_by,
        cap=facts.cap,
        kv_tokens=facts.kv_tokens,
        mamba_states=facts.states,
        line=", ".join(parts) + words,
        advice=found.advice,
    )


def _number(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
