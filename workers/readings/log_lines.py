"""Read one line of a SGLang server's log, as 0.5.4 to 0.5.23 write it. Pure; never raises.

    Prefill batch, …       one for each batch of prompts that is admitted: `Batch`
    Decode batch, …        one for every 40 decode steps (`--decode-log-interval`): `Batch`
    max_total_num_tokens=  what a start came to: `Started`; the cap is the effective one
    Mamba Cache is …       how many states its pool holds: `MambaPool`
    max_running_requests … a cap that is lower than what was asked for: `Capped`
    KV cache pool is full  requests that were set back: `Retracted`
    ready, SIGTERM, deaths `Event`

The order of a batch's fields and which of them there are changes with version, model and flags, so
each is looked for by its name. A line begins with `[2026-01-31 10:00:00 DP0 TP1]`; what somebody
else (a container's runtime, a journal, colours) has put before that is passed over. A figure that
cannot be (NaN, below zero, more than a pool) is nothing. Of a line no more than `MOST_BYTES` are
looked at, in time that grows with them alone. No text of a line is kept: it may hold prompts.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal

import msgspec

MOST_BYTES = 4096
"""The longest line of interest has some 500; the one with all arguments 20,000."""

MOST_ARGUMENTS_BYTES = 64 << 10
MOST_PREFIX_BYTES = 200
MOST_STAMP_BYTES = 80
MOST_COUNT = 10**12
FULL = 1.005
"""A usage is rounded to two digits, and never above this."""

_STAMP = re.compile(
    rb"\[(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?)"
    rb"((?: [A-Z]{1,4}(?:_[A-Z]{1,4})?\d{1,6})*)\] ?"
)
_COLOUR = re.compile(rb"\x1b\[[0-9;]{0,20}m")
_RANK = re.compile(rb"([A-Z_]+)(\d+)")
_BATCH = re.compile(rb"(Prefill|Decode) batch(?: \[\d{1,20}\])?[,.] ")
_NUMBER = re.compile(rb"\d{1,15}(?:\.\d{1,9})?")
_STARTED = re.compile(rb"max_total_num_tokens=(\d{1,15}), ")
_MEMBER = re.compile(rb"\b(max_running_requests|context_len)=(\d{1,15})\b")
_MAMBA = re.compile(rb"Mamba Cache is allocated\. max_mamba_cache_size: (\d{1,15})\b")
_CAPPED = re.compile(
    rb"max_running_requests (?:is capped to|was reduced from the requested (\d{1,15}) to)"
    rb" (\d{1,15})\b"
)
_RESERVED = re.compile(rb"\bmax_mamba_cache_size=(\d{1,15}), (\d{1,6}) state slots per request\b")
_RETRACTED = re.compile(
    rb"KV cache pool is full\. Retract requests\. #retracted_reqs: (\d{1,9})\b"
)
_DIED = re.compile(rb"Subprocess \S{1,80} \(pid=\d{1,12}\) crashed with exit code (-?\d{1,4})\b")

_STRATEGY = re.compile(rb"\bmamba_(?:radix_cache|scheduler)_strategy(?:=|': )'([a-z_]{1,30})'")
_NO_RADIX = re.compile(rb"\bdisable_radix_cache(?:=|': )True\b")

What = Literal[
    "launching",
    "ready",
    "health_failed",
    "exception",
    "sigquit",
    "child_died",
    "watchdog",
    "leak",
    "sigterm",
    "draining",
]

_EVENTS: tuple[tuple[bytes, What], ...] = (
    (b"server_args=", "launching"),
    (b"The server is fired up and ready to roll!", "ready"),
    (b"Health check failed. ", "health_failed"),
    (b"Scheduler hit an exception", "exception"),
    (b"SIGQUIT received. ", "sigquit"),
    (b"Scheduler watchdog timeout", "watchdog"),
    (b"pool memory leak detected!", "leak"),
    (b"token_to_kv_pool_allocator memory leak detected!", "leak"),
    (b"SIGTERM received. ", "sigterm"),
    (b"Gracefully exiting... ", "draining"),
)
# What a line without SGLang's own stamp must hold, and where: its text may quote anything, so only
# what stands at its beginning or after somebody's prefix counts.
_UNSTAMPED = re.compile(
    rb"(?:^|[\s\]:|>])((?:Prefill|Decode) batch|max_total_num_tokens=|Mamba Cache is allocated"
    rb"|max_running_requests (?:is|was) |KV cache pool is full"
    rb"|The server is fired up|Subprocess \S{1,80} \(pid=)"
)


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """What a line begins with.

    Attributes:
        at_s: Seconds on a clock whose zone nobody tells: good for differences; None without one.
        dp_rank: Of the data-parallel rank that speaks.
        first_rank: Whether it is that rank's own word, not a repetition by another process of it.
    """

    at_s: float | None = None
    dp_rank: int = 0
    first_rank: bool = True


NO_STAMP = Stamp()


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One batch; None is what its line does not say.

    Attributes:
        kind: prefill or decode.
        running, queued: Requests; of a prefill line, `running` leaves out those of this batch.
        used_tokens, token_usage: Of the KV pool; of several pools the one with full attention.
        mamba_states, mamba_usage, swa_usage: Of the other pools.
        gen_tokens_per_s: What was generated since the last decode line over the time since then.
        prefill_tokens_per_s: Likewise of prompts, not in all versions.
        new_seqs, new_tokens, cached_tokens: A prefill's prompts, tokens computed, tokens found.
        pending_tokens: Of prompts that wait.
        accept_len: Tokens a step, with speculative decoding.
        graph: Whether it ran as a recorded graph.
    """

    kind: Literal["prefill", "decode"]
    stamp: Stamp = NO_STAMP
    running: int | None = None
    queued: int | None = None
    used_tokens: int | None = None
    token_usage: float | None = None
    mamba_states: int | None = None
    mamba_usage: float | None = None
    swa_usage: float | None = None
    gen_tokens_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    new_seqs: int | None = None
    new_tokens: int | None = None
    cached_tokens: int | None = None
    pending_tokens: int | None = None
    accept_len: float | None = None
    graph: bool | None = None


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """What a start came to: tokens of the KV pool, effective cap, context length."""

    stamp: Stamp = NO_STAMP
    kv_tokens: int
    cap: int | None = None
    context_length: int | None = None


class MambaPool(msgspec.Struct, frozen=True, kw_only=True):
    """How many states the mamba pool holds."""

    stamp: Stamp = NO_STAMP
    states: int


class Capped(msgspec.Struct, frozen=True, kw_only=True):
    """The cap is lower than asked for.

    Attributes:
        cap: The effective one.
        asked: What was asked for, where it is said.
        states, states_per_request: Of the mamba pool, where that binds.
    """

    stamp: Stamp = NO_STAMP
    cap: int
    asked: int | None = None
    states: int | None = None
    states_per_request: int | None = None


class Retracted(msgspec.Struct, frozen=True, kw_only=True):
    """Requests were set back for want of room."""

    stamp: Stamp = NO_STAMP
    requests: int


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something happened to the server.

    Attributes:
        what: launching (all arguments), ready, health_failed, exception (in a scheduler), sigquit
            (it ends itself), child_died, watchdog (a step took too long), leak (its own check
            found one), sigterm, draining.
        exit_code: Of a child that died.
        strategy: Of one that is launching, as its arguments say: no_buffer, extra_buffer, auto …,
            `no_radix` without radix cache.
    """

    stamp: Stamp = NO_STAMP
    what: What
    exit_code: int | None = None
    strategy: str | None = None


LogLine = Batch | Started | MambaPool | Capped | Retracted | Event


def parse_line(line: bytes) -> LogLine | None:
    """Read one line, with or without its end; None where it says nothing that is known."""
    stamp, message = _message(line[:MOST_BYTES])
    if not message:
        return None
    batch = _BATCH.match(message)
    if batch:
        return _batch(batch[1], message[batch.end() :], stamp)
    found = _other(message, stamp)
    if isinstance(found, Event) and found.what == "launching":
        return msgspec.structs.replace(found, strategy=_strategy(line[:MOST_ARGUMENTS_BYTES]))
    return found


def stamp_of(line: bytes) -> Stamp:
    """Read what any line begins with, whatever it says."""
    return _message(line[: MOST_PREFIX_BYTES + MOST_STAMP_BYTES])[0]


def _message(line: bytes) -> tuple[Stamp, bytes]:
    """Find where SGLang's own text begins; empty where nothing of it is there."""
    line = line.rstrip(b"\r\n")
    if b"\x1b" in line:
        line = _COLOUR.sub(b"", line)
    found = _STAMP.search(line, 0, MOST_PREFIX_BYTES)
    if found:
        return _stamp(found[1], found[2]), line[found.end() :]
    bare = _UNSTAMPED.search(line, 0, MOST_PREFIX_BYTES)
    return (NO_STAMP, line[bare.start(1) :]) if bare else (NO_STAMP, b"")


def _stamp(text: bytes, ranks: bytes) -> Stamp:
    try:
        at = datetime.fromisoformat(text.decode().replace(",", "."))
        at_s = at.replace(tzinfo=UTC).timestamp()
    except ValueError:  # the 31st of February
        at_s = None
    known = {name: int(number) for name, number in _RANK.findall(ranks)}
    # A data-parallel rank has requests of its own, whatever its number among the others is; the
    # later stages of a pipeline, and the other shards of one model, repeat the first one's.
    kinds = (b"PP", b"ATTN_CP") if b"DP" in known else (b"PP", b"ATTN_CP", b"TP")
    first = not any(known.get(kind) for kind in kinds)
    return Stamp(at_s=at_s, dp_rank=known.get(b"DP", 0), first_rank=first)


def _batch(kind: bytes, text: bytes, stamp: Stamp) -> Batch:
    fields: dict[bytes, bytes] = {}
    for part in text.strip().rstrip(b",").split(b", "):
        name, found, value = part.rpartition(b": ")
        if found:
            fields[name] = value
    return Batch(
        kind="prefill" if kind == b"Prefill" else "decode",
        stamp=stamp,
        running=_count(fields, b"#running-req"),
        queued=_count(fields, b"#queue-req"),
        used_tokens=_count(fields, b"#full token", b"#token", b"#gpu token"),
        token_usage=_usage(fields, b"full token usage", b"token usage", b"gpu token usage"),
        mamba_states=_count(fields, b"mamba num"),
        mamba_usage=_usage(fields, b"mamba usage"),
        swa_usage=_usage(fields, b"swa token usage"),
        gen_tokens_per_s=_number(fields, b"gen throughput (token/s)"),
        prefill_tokens_per_s=_number(fields, b"input throughput (token/s)"),
        new_seqs=_count(fields, b"#new-seq"),
        new_tokens=_count(fields, b"#new-token"),
        cached_tokens=_count(fields, b"#cached-token"),
        pending_tokens=_count(fields, b"#pending-token"),
        accept_len=_number(fields, b"accept len"),
        graph=_graph(fields),
    )


def _other(message: bytes, stamp: Stamp) -> LogLine | None:
    if found := _STARTED.match(message):
        members = {name: int(value) for name, value in _MEMBER.findall(message)}
        return Started(
            kv_tokens=int(found[1]),
            cap=members.get(b"max_running_requests") or None,
            context_length=members.get(b"context_len") or None,
            stamp=stamp,
        )
    if found := _MAMBA.match(message):
        return MambaPool(states=int(found[1]), stamp=stamp)
    if found := _CAPPED.match(message):
        pool = _RESERVED.search(message)
        return Capped(
            cap=int(found[2]),
            asked=int(found[1]) if found[1] else None,
            states=int(pool[1]) if pool else None,
            states_per_request=int(pool[2]) if pool else None,
            stamp=stamp,
        )
    if found := _RETRACTED.match(message):
        return Retracted(requests=int(found[1]), stamp=stamp)
    if found := _DIED.match(message):
        return Event(what="child_died", exit_code=int(found[1]), stamp=stamp)
    what = next((word for text, word in _EVENTS if message.startswith(text)), None)
    return Event(what=what, stamp=stamp) if what else None


def _strategy(arguments: bytes) -> str | None:
    if _NO_RADIX.search(arguments):
        return "no_radix"
    found = _STRATEGY.search(arguments)
    return found[1].decode() if found else None


def _number(fields: Mapping[bytes, bytes], *names: bytes) -> float | None:
    """Give the first of these figures that there is, as a number that can be."""
    for name in names:
        value = fields.get(name)
        if value is not None:
            # Whatever is no plain number is none: NaN, below zero, of a hundred digits.
            return float(value) if _NUMBER.fullmatch(value) else None
    return None


def _count(fields: Mapping[bytes, bytes], *names: bytes) -> int | None:
    number = _number(fields, *names)
    return int(number) if number is not None and number <= MOST_COUNT else None


def _usage(fields: Mapping[bytes, bytes], *names: bytes) -> float | None:
    share = _number(fields, *names)
    return min(share, 1.0) if share is not None and share <= FULL else None


def _graph(fields: Mapping[bytes, bytes]) -> bool | None:
    words = (value for name, value in fields.items() if name.endswith(b" graph"))
    return {b"True": True, b"False": False}.get(next(words, b""))
