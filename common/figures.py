"""Turn what is known of a run at one instant into the figures of design.md §5. Pure.

`progress` is the one place where `producer status`, `producer watch` and the sink's progress.json
get their figures and the status word from.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from common.flow import (
    LONGEST_SILENCE_S,
    Buckets,
    Eta,
    Flow,
    eta_by_client,
    eta_by_servers,
    flow_of,
)
from common.group_figures import GroupFigures
from common.models import Counts

TRUNCATED_SHARE = 0.2
BUSY_SHARE = 0.9

Status = Literal[
    "open",
    "queued",
    "waiting_for_workers",
    "waiting_for_server",
    "wrong_model",
    "ramping",
    "running",
    "stalled",
    "paused",
    "redis_full",
    "s3_error",
    "completed",
    "completed_with_failures",
    "failed",
    "cancelled",
    "state_lost",
]

ENDED = frozenset({"completed", "completed_with_failures", "failed", "cancelled"})
"""Statuses in which nothing more will come by itself."""

_EXIT_CODES = {
    **dict.fromkeys(("completed_with_failures", "failed", "cancelled", "stalled"), 1),
    **dict.fromkeys(("wrong_model", "redis_full", "s3_error", "state_lost"), 4),
}

_LIMITS = {
    "waiting_for_workers": "no workers",
    "waiting_for_server": "server",
    "wrong_model": "server",
    "stalled": "server",
    "redis_full": "Redis",
    "s3_error": "sink",
}


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run besides numbers.

    Attributes:
        sealed: No more prompts will come.
        proven: `_SUCCESS` was written for the counters as they are now.
        paused: Why, None while it is not.
        suspended: `rq suspend` stopped the claims of all runs.
        unreconciled: Redis restarted, and nobody has compared it with the store yet.
        lost: What the store has and Redis lacks, for people; empty when nothing is known to be.
        s3_error: Why nothing is stored at present.
        redis_full: Why claims stop for want of room.
        open_producers: How many producers have begun and not ended.
        request_timeout_s: Time limit of one attempt.
    """

    sealed: bool = True
    proven: bool = False
    paused: str | None = None
    suspended: bool = False
    cancelled: bool = False
    unreconciled: bool = False
    lost: str = ""
    s3_error: str = ""
    redis_full: str = ""
    open_producers: int = 0
    request_timeout_s: float = LONGEST_SILENCE_S


def exit_code(status: str) -> int:
    """Give what `producer status` ends with: 0 done or fine, 1 ended badly, 4 unusable."""
    return _EXIT_CODES.get(status, 0)


def progress(
    counts: Counts,
    *,
    standing: Standing,
    now_ms: int,
    groups: Sequence[GroupFigures] = (),
    per_bucket: Buckets | None = None,
) -> dict[str, Any]:
    """Give the figures as one JSON object.

    Args:
        counts: The run's counters, of one instant.
        standing: What else is known of it.
        now_ms: Redis TIME of the reading.
        groups: Worker groups that spoke lately.
        per_bucket: Completions by 5-second bucket of Redis TIME.
    """
    flow = flow_of(counts, groups=groups, per_bucket=per_bucket or {}, now_ms=now_ms)
    status = status_of(counts, standing=standing, groups=groups, flow=flow)
    eta = eta_of(counts, status=status, flow=flow)
    steady_in_s = flow.steady_in_s if status == "ramping" else None
    return {
        "status": status,
        **_counted(counts),
        "rate_per_sec": _rounded(flow.rate.per_s),
        "eta_hours": eta.hours,
        "eta_hours_low": eta.low,
        "eta_hours_high": eta.high,
        "steady_in_sec": _rounded(steady_in_s, 1),
        "server_rate_per_sec": _rounded(flow.server_rate_per_s),
        "server_tokens_per_sec": _rounded(flow.tokens_per_s, 1),
        "mean_output_tokens": _rounded(flow.mean_tokens, 1),
        "sealed": standing.sealed,
        "limited_by": limited_by(counts, standing=standing, groups=groups, status=status),
        "warnings": warnings(counts, standing=standing, groups=groups, status=status),
        "updated_at": datetime.fromtimestamp(now_ms / 1000, UTC).isoformat(timespec="seconds"),
        "workers": len(groups),
        "worker_groups": [_group(group) for group in groups],
    }


def _counted(counts: Counts) -> dict[str, Any]:
    done = counts.completed
    figures: dict[str, Any] = msgspec.to_builtins(counts)
    figures["total_input_tokens"] = figures.pop("input_tokens")
    figures["total_output_tokens"] = figures.pop("output_tokens")
    figures["elapsed_hours"] = round(figures.pop("active_ms") / 3_600_000, 4)
    figures["avg_output_tokens"] = round(counts.output_tokens / done, 1) if done else 0
    figures["truncated_share"] = round(counts.truncated / done, 4) if done else 0
    return figures


def eta_of(counts: Counts, *, status: str, flow: Flow) -> Eta:
    """Give the time left: nothing where nothing is left, unknown where nothing flows."""
    left = counts.queued + counts.in_flight
    if not left or status in ENDED:
        return Eta(low=0.0, hours=0.0, high=0.0)
    if status == "ramping":
        eta = eta_by_servers(left, flow=flow, completed=counts.completed)
        return eta if eta.hours is not None else eta_by_client(left, flow=flow)
    return eta_by_client(left, flow=flow) if status == "running" else Eta()


# --- The status word -----------------------------------------------------------------------------


def status_of(
    counts: Counts, *, standing: Standing, groups: Sequence[GroupFigures], flow: Flow
) -> Status:
    """Choose the one word for how a run stands; what people must act on comes first."""
    ended = counts.completed + counts.failed + counts.cancelled == counts.total
    words: list[tuple[bool, Status]] = [
        (bool(standing.lost), "state_lost"),
        (standing.cancelled, "cancelled"),
        (ended, _ended_status(counts, standing)),
        (bool(standing.s3_error), "s3_error"),
        (standing.paused is not None or standing.suspended, "paused"),
        (bool(standing.redis_full), "redis_full"),
    ]
    told = next((word for holds, word in words if holds), None)
    return told or _working_status(counts, standing=standing, groups=groups, flow=flow)


def _ended_status(counts: Counts, standing: Standing) -> Status:
    """Choose the word for a run of which every prompt has ended."""
    if not standing.sealed or not standing.proven or counts.stream_entries:
        # Not all of it is in the store and proven, or more prompts may come.
        if standing.s3_error:
            return "s3_error"
        return "running" if standing.sealed else "open"
    if counts.completed == counts.total:
        return "completed"
    return "completed_with_failures" if counts.completed else "failed"


def _working_status(
    counts: Counts, *, standing: Standing, groups: Sequence[GroupFigures], flow: Flow
) -> Status:
    if not groups:
        return "waiting_for_workers"
    states = {group.state for group in groups}
    if not states & {"ready", "draining"}:
        return "wrong_model" if "wrong_model" in states else "waiting_for_server"
    if not counts.in_flight:
        return "running" if flow.rate.per_s else "queued"
    if flow.stalls(request_timeout_s=standing.request_timeout_s):
        return "stalled"
    return "ramping" if flow.ramps else "running"


# --- What people should know ---------------------------------------------------------------------


def limited_by(
    counts: Counts, *, standing: Standing, groups: Sequence[GroupFigures], status: str
) -> str | None:
    """Name what holds the run back, None when nothing can be named."""
    if status in _LIMITS:
        return _LIMITS[status]
    if status == "running" and not counts.queued + counts.in_flight:
        return "sink"
    if status not in {"running", "ramping"} or standing.paused or not counts.queued:
        return None
    found = [_limit_of(group) for group in groups if group.state == "ready"]
    named = [limit for limit in found if limit]
    # What most of the servers are short of; one odd server does not name the run's limit.
    return max(named, key=named.count) if 2 * len(named) > len(found) else None


def _limit_of(group: GroupFigures) -> str | None:
    """Name what one server is short of.

    A few requests of ours always wait at a server, so that its slots stay full: a queue alone says
    nothing.
    """
    mamba, running, cap = group.mamba_usage, group.running or 0, group.cap
    at_cap = cap is not None and running >= cap
    if mamba is not None and (mamba >= BUSY_SHARE or at_cap):
        # The cap of a hybrid model is what its pool of states allows.
        return "mamba pool"
    if group.kv_usage is not None and group.kv_usage >= BUSY_SHARE:
        return "KV pool"
    if group.queued and running:
        return "server queue" if at_cap or cap is None else "prefill"
    if group.occupancy is not None and group.occupancy < BUSY_SHARE:
        return "client"
    return None


def warnings(
    counts: Counts, *, standing: Standing, groups: Sequence[GroupFigures], status: str
) -> list[str]:
    """Give sentences on what somebody should do something about."""
    told = [why for why in (standing.lost, standing.s3_error, standing.redis_full) if why]
    if standing.paused is not None:
        told.append(f"paused: {standing.paused}; `producer resume` lifts it")
    if standing.suspended:
        told.append("`rq suspend` stopped all runs; `rq resume` lifts it")
    if standing.unreconciled and not standing.lost:
        told.append(
            "Redis restarted and is not yet compared with the store: nothing is claimed until a "
            "sink or `producer resume` has done it"
        )
    if status in {"waiting_for_server", "wrong_model"}:
        told += sorted({f"{group.group}: {group.detail}" for group in groups if group.detail})
    if standing.open_producers:
        told.append(
            f"{_count(standing.open_producers, 'producer')} began and did not end: the same "
            "enqueue again ends one that died, `producer resume --seal` closes them all"
        )
    if counts.truncated > TRUNCATED_SHARE * counts.completed:
        told.append(
            f"{counts.truncated / max(counts.completed, 1):.0%} of the answers were cut off at "
            "their token limit (finish_reason length): a larger --max-tokens gives whole ones"
        )
    if limited_by(counts, standing=standing, groups=groups, status=status) == "sink":
        waits = _count(counts.stream_entries, "result")
        told.append(f"{waits} not yet in the store: `workers sink` stores and proves them")
    return told


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _group(group: GroupFigures) -> dict[str, Any]:
    figures = msgspec.to_builtins(group)
    return {
        name: _rounded(value) if isinstance(value, float) else value
        for name, value in figures.items()
        if name not in {"epoch", "at_ms", "ages_s"}
    }


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)
