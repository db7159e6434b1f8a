"""Turn what is known of a run at one instant into the figures of design.md §5. Pure.

`progress` is the one place where `producer status`, `producer watch` and the sink's progress.json
get their figures and the status word from.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from common.advice import UNUSABLE_S, Seen, limited_by, waits_behind, warnings
from common.flow import (
    Buckets,
    Eta,
    Flow,
    eta_by_client,
    eta_by_servers,
    flow_of,
    of_tail,
)
from common.group_figures import GroupFigures
from common.marks.effect import History, with_effects
from common.marks.mark import Mark
from common.models import Counts
from common.pins import difference
from common.standing import Standing

STARTING_S = 10.0
"""A worker group that young has not been told yet how its server is."""

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

_SERVING = frozenset({"ready", "draining"})
"""States of a worker group whose server gives tokens."""


def exit_code(status: str, unusable_s: float | None = None) -> int:
    """Give what `producer status` ends with: 0 done or fine, 1 ended badly, 4 unusable.

    Args:
        status: The status word.
        unusable_s: How long no server could be used; None where one can, or none is known.
    """
    if status == "waiting_for_server" and unusable_s is not None and unusable_s > UNUSABLE_S:
        return 4
    return _EXIT_CODES.get(status, 0)


def progress(
    counts: Counts,
    *,
    standing: Standing,
    now_ms: int,
    groups: Sequence[GroupFigures] = (),
    per_bucket: Buckets | None = None,
    marks: Sequence[Mark] = (),
    history: History | None = None,
) -> dict[str, Any]:
    """Give the figures as one JSON object.

    Args:
        counts: The run's counters, of one instant.
        standing: What else is known of it.
        now_ms: Redis TIME of the reading.
        groups: Worker groups that spoke lately.
        per_bucket: Completions by 5-second bucket of Redis TIME.
        marks: The newest marks, the oldest of them first.
        history: The half minutes around those (`common.marks.effect`).
    """
    groups = [
        as_seen(group, model=standing.model, pinned=standing.pinned, run=standing.run)
        for group in groups
    ]
    flow = flow_of(counts, groups=groups, per_bucket=per_bucket or {}, now_ms=now_ms)
    status = status_of(counts, standing=standing, groups=groups, flow=flow)
    eta = eta_of(counts, standing=standing, status=status, flow=flow)
    steady_in_s = flow.steady_in_s if status == "ramping" else None
    seen = Seen(counts=counts, standing=standing, groups=groups, status=status)
    return {
        "status": status,
        **_counted(counts),
        "rate_per_sec": _rounded(_rate_per_s(counts, standing, status=status, flow=flow)),
        "eta_hours": eta.hours,
        "eta_hours_low": eta.low,
        "eta_hours_high": eta.high,
        "steady_in_sec": _rounded(steady_in_s, 1),
        "server_rate_per_sec": _rounded(flow.server_rate_per_s),
        "server_tokens_per_sec": _rounded(flow.tokens_per_s, 1),
        "mean_output_tokens": _rounded(flow.mean_tokens, 1),
        "sealed": standing.sealed,
        "priority": standing.priority,
        "window": standing.window,
        "waits_behind": waits_behind(seen) or None,
        "limited_by": limited_by(seen),
        "unusable_sec": _rounded(seen.unusable_s, 1),
        "warnings": warnings(seen),
        "updated_at": datetime.fromtimestamp(now_ms / 1000, UTC).isoformat(timespec="seconds"),
        # Those that can serve: a server that is still loading serves nobody.
        "workers": sum(group.state in _SERVING for group in groups),
        "worker_groups": [_group(group) for group in groups],
        "marks": with_effects(marks, history=history or {}, now_ms=now_ms, answer_s=flow.answer_s),
    }


def _counted(counts: Counts) -> dict[str, Any]:
    done = counts.completed
    figures: dict[str, Any] = msgspec.to_builtins(counts)
    figures["total_input_tokens"] = figures.pop("input_tokens")
    figures["total_output_tokens"] = figures.pop("output_tokens")
    figures["elapsed_hours"] = round(figures.pop("active_ms") / 3_600_000, 4)
    figures["avg_output_tokens"] = round(counts.output_tokens / done, 1) if done else 0
    # Where Redis has lost completions, it may still count what was cut off of them.
    figures["truncated_share"] = round(min(counts.truncated / done, 1.0), 4) if done else 0
    return figures


def _rate_per_s(counts: Counts, standing: Standing, *, status: str, flow: Flow) -> float:
    """Give the rate of now; of a run with nothing left, that of all its time at work."""
    over = status in ENDED or (standing.sealed and not counts.queued + counts.in_flight)
    if over and counts.active_ms:
        return counts.completed * 1000 / counts.active_ms
    return flow.rate.per_s


def eta_of(counts: Counts, *, standing: Standing, status: str, flow: Flow) -> Eta:
    """Give the time left: nothing where nothing is left, unknown where nothing flows."""
    left = counts.queued + counts.in_flight
    if not left or status in ENDED:
        return Eta(low=0.0, hours=0.0, high=0.0)
    if status not in {"ramping", "running"}:
        return Eta()
    eta = Eta()
    if status == "ramping":
        eta = eta_by_servers(left, flow=flow, completed=counts.completed)
    if eta.hours is None:
        eta = eta_by_client(left, flow=flow)
    if counts.queued:
        return eta
    return of_tail(eta, oldest_s=flow.oldest_s, timeout_s=standing.request_timeout_s)


# --- The status word -----------------------------------------------------------------------------


def status_of(
    counts: Counts, *, standing: Standing, groups: Sequence[GroupFigures], flow: Flow
) -> Status:
    """Choose the one word for how a run stands; what people must act on comes first."""
    ended = counts.completed + counts.failed + counts.cancelled == counts.total
    ended = ended and bool(counts.total or not standing.sealed)
    words: list[tuple[bool, Status]] = [
        (bool(standing.lost) or _emptied(counts, standing), "state_lost"),
        (standing.cancelled, "cancelled"),
        (ended, _ended_status(counts, standing)),
        (bool(standing.s3_error), "s3_error"),
        (standing.paused is not None or standing.suspended, "paused"),
        (bool(standing.redis_full), "redis_full"),
    ]
    told = next((word for holds, word in words if holds), None)
    return told or _working_status(counts, standing=standing, groups=groups, flow=flow)


def _emptied(counts: Counts, standing: Standing) -> bool:
    """Tell a run that had prompts and has none: without one it is not sealed.

    A Redis without room may know of none yet.
    """
    return standing.sealed and not counts.total and not standing.redis_full


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
    if not states & _SERVING:
        return "wrong_model" if "wrong_model" in states else "waiting_for_server"
    if not counts.in_flight:
        return "running" if flow.rate.per_s and not standing.waits_behind else "queued"
    if flow.stalls(request_timeout_s=standing.request_timeout_s):
        return "stalled"
    return "ramping" if flow.ramps else "running"


# --- Worker groups -------------------------------------------------------------------------------


def as_seen(
    group: GroupFigures,
    *,
    model: str | None,
    pinned: Mapping[str, Any] | None = None,
    run: str = "",
) -> GroupFigures:
    """Give a worker group as a run sees it: another model's is of no use, old loads say nothing.

    Args:
        group: As it speaks of itself.
        model: What the run asks for, None for whatever comes.
        pinned: What the run's first server was.
        run: Its name.
    """
    state, detail, up_s = group.state, group.detail, group.up_s
    if state == "waiting" and up_s is not None and up_s < STARTING_S:
        state = "starting"
    elif state in {"ready", "wrong_model"} and run in group.left_out:
        state, detail = "wrong_model", group.left_out[run]
    elif (
        state in {"ready", "wrong_model"}
        and None not in (model, group.model)
        and model != group.model
    ):
        # What it says of itself may be of another run; the warning has the two models.
        state, detail = "wrong_model", ""
    elif state in {"ready", "wrong_model"} and pinned and group.identity:
        differs = difference(pinned, group.identity)
        state, detail = ("wrong_model", differs) if differs else (state, detail)
    if state in {"ready", "draining"}:
        return group
    return msgspec.structs.replace(
        group,
        state=state,
        detail="" if state == "starting" else detail,
        cap=None,
        running=None,
        queued=None,
        gen_tokens_per_s=None,
        kv_usage=None,
        mamba_usage=None,
        retracted=None,
        cached_share=None,
        occupancy=None,
    )


def _group(group: GroupFigures) -> dict[str, Any]:
    figures = msgspec.to_builtins(group)
    return {
        name: _rounded(value) if isinstance(value, float) else value
        for name, value in figures.items()
        if name not in {"epoch", "at_ms", "ages_s", "identity", "left_out"}
    }


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)
