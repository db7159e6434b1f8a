"""Say what is worth telling somebody who does not look at a run: a change of its state. Pure.

    an end                   at once: completed, completed_with_failures, failed, cancelled
    trouble                  when it has stood for `HOLD_S`: stalled, paused, redis_full, s3_error,
                             wrong_model, state_lost, waiting_for_workers (once work had begun),
                             server_gone (one server or all, named)
    redis_gone               when Redis, and so all runs, could not be asked for `GONE_S`
    recovered                when trouble that was told has been over for as long

Two of them are at least `LEAST_GAP_S` apart, an end excepted: what changes to and fro is told once
in that time, as it stands then.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from common.figures import ENDED

HOLD_S = 10.0
GONE_S = 30.0
"""A server may be away for so long, as in a restart of its process that somebody sees to."""

LEAST_GAP_S = 60.0

RECOVERED = "recovered"
SERVER_GONE = "server_gone"
REDIS_GONE = "redis_gone"
_TROUBLE = {"stalled", "paused", "redis_full", "s3_error", "wrong_model", "state_lost"}
_AWAY = {"down", "faulty", "wrong_model"}


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is like, as far as somebody is told: `event` is empty where nothing is wrong.

    Attributes:
        groups: Worker groups whose servers are gone, sorted.
        at_ms: Redis TIME at which it was told.
    """

    event: str = ""
    groups: tuple[str, ...] = ()
    at_ms: int = 0

    @property
    def ended(self) -> bool:
        """Whether nothing more will come by itself."""
        return self.event in ENDED

    def covers(self, other: "State") -> bool:
        """Whether who was told of this one knows the other: fewer servers gone are no news."""
        return self.event == other.event and set(other.groups) <= set(self.groups)


def state_of(figures: Mapping[str, Any]) -> State:
    """Read from a run's figures what state it is in."""
    status = figures["status"]
    if status in ENDED or status in _TROUBLE:
        return State(event=status)
    gone = sorted(
        group["group"]
        for group in figures["worker_groups"]
        if group["state"] in _AWAY and (group["unready_s"] or 0.0) >= GONE_S
    )
    if gone:
        return State(event=SERVER_GONE, groups=tuple(gone))
    if status == "waiting_for_workers" and figures["completed"] + figures["failed"]:
        return State(event=status)
    return State()


def next_event(told: State | None, now: State, *, first_look: bool, now_ms: int) -> str | None:
    """Say what is to be told.

    Args:
        told: What was told last, of this run and to this address; None before anything.
        now: How it is, and has been for long enough.
        first_look: This process has not seen the run before.
        now_ms: Redis TIME.

    Returns:
        The event; empty where nothing is to be told but noted all the same; None where nothing
        is to be done.
    """
    if told is None:
        # Who begins to look at a run that was over does not tell of it.
        return "" if now.ended and first_look else now.event
    if told.covers(now):
        return None
    if not now.event and (told.ended or not told.event):
        return ""  # more prompts came
    if not now.ended and now_ms - told.at_ms < LEAST_GAP_S * 1000:
        return None
    return now.event or RECOVERED


def message_of_redis(event: str, runs: Iterable[str], why: str) -> dict[str, Any]:
    """Make what is told of all runs at once while their figures cannot be read, or can again."""
    names = sorted(runs)
    told = f"Redis cannot be used: {why}" if event == REDIS_GONE else "Redis can be used again"
    return {
        "event": event,
        "text": f"{told} (runs {', '.join(names) or 'unknown'})",
        "run": ",".join(names),
        "status": "",
        "runs": names,
    }


def message(event: str, now: State, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Make what is told: a sentence, and the figures that it rests on."""
    details = [
        f"{group['group']}: {group['detail'] or group['state']}"
        for group in figures["worker_groups"]
        if group["group"] in now.groups
    ]
    why = "; ".join(details or figures["warnings"][:1])
    done = f"{figures['completed']:,} of {figures['total']:,} completed"
    if figures["failed"]:
        done += f", {figures['failed']:,} failed"
    told = event.replace("_", " ")
    return {
        "event": event,
        "text": f"run {figures['run']}: {told}, {done}{f': {why}' if why else ''}",
        "run": figures["run"],
        "status": figures["status"],
        "at": figures["updated_at"],
        "output": figures["output"],
        "groups": list(now.groups),
        **{
            name: figures[name]
            for name in ("total", "completed", "failed", "cancelled", "in_flight", "queued")
        },
        "rate_per_sec": figures["rate_per_sec"],
        "eta_hours": figures["eta_hours"],
        "warnings": figures["warnings"],
    }
