"""What a worker group says of itself every few seconds. Pure; `common.queue.Groups` carries it."""

from typing import Any

import msgspec


class GroupFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One worker group's figures, design.md §5.

    Attributes:
        group: `gpu0@host`.
        state: waiting, ready, down, faulty, wrong_model; draining: it is told to stop, or its
            server is drained, and requests are open; drained: none is, and it goes on when the
            drain is over. `starting` is a young `waiting`, see `common.figures`.
        detail: Why, for people; empty when ready.
        in_flight: Open requests.
        leased: Jobs held: open, prefetched and not yet recorded.
        bound, cap: The most requests open at once; the server's effective cap (None: not told).
        gen_tokens_per_s: Rate of the server's counter over its last readings, or of its log.
        retracted: Requests that the server set back for want of room in the last five minutes.
        cached_share: Of the tokens of the last five minutes' prompts, those found in its cache.
        told_s: How old the newest of the server's own figures are; those that are stale are None.
        identity: Of its server, what a run pins (`common.pins`); None where nobody tells.
        left_out: Runs that its server cannot serve though it is of their model, and why.
        occupancy: Mean open requests over slots, over the last minute.
        oldest_s: Age of the oldest open request.
        ages_s: Sum of the ages of the open requests; None where the process does not tell.
        up_s: How long this process has been at work; None where it does not tell.
        unready_s: How long the server has not been ready; 0 while it is, None where nobody tells.
        binds: What ends the cap: mamba pool, KV pool, requested, default, unknown; empty where
            nothing tells.
        sizing: Why the cap is what it is, in a sentence; empty likewise.
        advice, better: What would give more requests at once, and the strategy of it; empty where
            nothing gains much.
        completed: Completions recorded by this process.
        at_ms: Redis TIME of this reading, filled in when published.
    """

    group: str
    epoch: str
    host: str
    pid: int
    server: str
    state: str
    detail: str = ""
    in_flight: int = 0
    leased: int = 0
    bound: int = 0
    cap: int | None = None
    running: int | None = None
    queued: int | None = None
    gen_tokens_per_s: float | None = None
    kv_usage: float | None = None
    mamba_usage: float | None = None
    retracted: int | None = None
    cached_share: float | None = None
    told_s: float | None = None
    strategy: str | None = None
    server_version: str | None = None
    model: str | None = None
    identity: dict[str, Any] | None = None
    left_out: dict[str, str] = {}
    occupancy: float | None = None
    oldest_s: float | None = None
    ages_s: float | None = None
    up_s: float | None = None
    unready_s: float | None = None
    binds: str = ""
    sizing: str = ""
    advice: str = ""
    better: str = ""
    completed: int = 0
    at_ms: int = 0
