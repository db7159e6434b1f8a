"""Say what holds a run back, and what somebody should do about it. Pure.

`warnings` makes the lines that people see behind a `!`, and those of `--json` and progress.json.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from common.group_figures import GroupFigures
from common.models import Counts
from common.quality import oddities
from common.standing import Standing

BUSY_SHARE = 0.9

UNUSABLE_S = 60.0
"""Servers that could not be used for so long are no hiccup, and no restart of one."""

SHOWN_REASONS = 5

_LIMITS = {
    "waiting_for_workers": "no workers",
    "waiting_for_server": "server",
    "wrong_model": "server",
    "stalled": "server",
    "redis_full": "Redis",
    "s3_error": "sink",
}
_OF_STATES = {"", "unknown", "mamba pool"}
_OVER = {"completed", "completed_with_failures", "failed", "cancelled"}


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one instant, with the word that was chosen for it; groups as the run sees them."""

    counts: Counts
    standing: Standing
    groups: Sequence[GroupFigures]
    status: str

    @property
    def run(self) -> str:
        """Its name, as it may stand in a command."""
        return self.standing.run or "RUN"

    @property
    def unusable_s(self) -> float | None:
        """How long no server could be used; None where one can, or nobody tells."""
        if self.status != "waiting_for_server":
            return None
        told = [group.unready_s for group in self.groups if group.unready_s is not None]
        return min(told, default=None)


# --- What holds it back --------------------------------------------------------------------------


def limited_by(seen: Seen) -> str | None:
    """Name what holds the run back, None when nothing can be named."""
    counts, standing, status = seen.counts, seen.standing, seen.status
    if status in _LIMITS:
        return _LIMITS[status]
    if status == "running" and not counts.queued + counts.in_flight:
        # One that is there and does not complain waits for its batch, and holds nothing back.
        return None if standing.sinks else "sink"
    if waits_behind(seen):
        return "another run"
    if status not in {"running", "ramping"} or standing.paused or not counts.queued:
        return None
    found = [_limit_of(group) for group in seen.groups if group.state == "ready"]
    named = [limit for limit in found if limit]
    # What most of the servers are short of; one odd server does not name the run's limit.
    return max(named, key=named.count) if 2 * len(named) > len(found) else None


def waits_behind(seen: Seen) -> str:
    """Name the run that takes the slots this one waits for; empty where that is not so."""
    return seen.standing.waits_behind if seen.status == "queued" and seen.counts.queued else ""


def _limit_of(group: GroupFigures) -> str | None:
    """Name what one server is short of.

    A few requests of ours always wait at a server, so that its slots stay full: a queue alone says
    nothing.
    """
    mamba, running, cap = group.mamba_usage, group.running or 0, group.cap
    at_cap = cap is not None and running >= cap
    if mamba is not None and (mamba >= BUSY_SHARE or (at_cap and group.binds in _OF_STATES)):
        # The cap of a hybrid model is what its pool of states allows, unless less was asked for.
        return "mamba pool"
    if group.kv_usage is not None and group.kv_usage >= BUSY_SHARE:
        return "KV pool"
    if group.queued and running:
        return "server queue" if at_cap or cap is None else "prefill"
    if group.occupancy is not None and group.occupancy < BUSY_SHARE:
        return "client"
    return None


# --- What somebody should do ---------------------------------------------------------------------


def warnings(seen: Seen) -> list[str]:
    """Give sentences on what somebody should do something about."""
    standing = seen.standing
    told = [why for why in (standing.lost, standing.s3_error, standing.redis_full) if why]
    told += _of_claims(seen)
    told += _of_servers(seen)
    if standing.open_producers:
        told.append(
            f"{count_of(standing.open_producers, 'producer')} began and did not end: the same "
            f"enqueue again ends one that died, `producer resume {seen.run} --seal` closes them "
            "all"
        )
    if standing.sinks == 0 and seen.status not in {*_OVER, "state_lost"}:
        waiting = seen.counts.stream_entries
        waits = f", {count_of(waiting, 'result')} in Redis" if waiting else ""
        if seen.counts.unfed:
            waits += f", {count_of(seen.counts.unfed, 'prompt')} in the output to be fed"
        told.append(f"no sink is running{waits}: `workers sink` stores results and proves the run")
    elif limited_by(seen) == "sink" and not standing.s3_error:
        waits = count_of(seen.counts.stream_entries, "result")
        told.append(f"{waits} not yet in the store: `workers sink` stores and proves them")
    # Last, because what holds the run back is the more urgent.
    told += _of_answers(seen)
    told += _of_room(seen)
    return told


def _of_claims(seen: Seen) -> Iterator[str]:
    """Say why nothing is claimed."""
    standing, over = seen.standing, seen.status in _OVER
    if seen.status == "state_lost" and not standing.lost:
        yield (
            "Redis counts no prompts of a run that takes no more: its output was emptied, or "
            "Redis lost them. Put the objects back and call `producer resume "
            f"{seen.run}`, or call the same `producer enqueue FILE --run {seen.run}` again, which "
            "queues what was lost"
        )
    if standing.paused is not None and not over:
        yield f"paused: {standing.paused}; `producer resume {seen.run}` lifts it"
    if standing.suspects and not over:
        were = "prompt was" if standing.suspects == 1 else "prompts were"
        yield (
            f"{standing.suspects:,} {were} at work when servers or worker processes died: tried "
            "by halves when nothing else waits, and at last alone, nothing need be done"
        )
    if standing.suspended and not over:
        yield "`rq suspend` stopped all runs; `rq resume` lifts it"
    if standing.unreconciled and not standing.lost and not over:
        yield (
            "Redis restarted and is not yet compared with the store: nothing is claimed until a "
            f"sink or `producer resume {seen.run}` has done it"
        )


def _of_servers(seen: Seen) -> list[str]:
    """Say which servers do not fit the run, and what is wrong where none can be used."""
    odd = [group for group in seen.groups if group.state == "wrong_model"]
    if seen.status != "wrong_model":
        # Another run's server is where it should be; one of this model was started otherwise.
        odd = [group for group in odd if group.model == seen.standing.model]
    if seen.status not in _OVER and odd:
        return _once_each((group, _misfit(seen, group)) for group in odd)
    if seen.status == "waiting_for_workers":
        return ["no worker group serves it: `workers start --gpu 0-7` does, beside the servers"]
    if seen.status != "waiting_for_server":
        return []
    told = _once_each((g, f"{g.group}: {g.detail}") for g in seen.groups if g.detail)
    unusable_s = seen.unusable_s or 0.0
    if unusable_s > UNUSABLE_S:
        told.insert(0, f"no server could be used for {unusable_s / 60:,.0f} min: start them again")
    return told


def _once_each(told: Iterable[tuple[GroupFigures, str]]) -> list[str]:
    """Let the first stand for all that say the same but for their names and addresses."""
    alike: dict[str, dict[str, None]] = {}
    for group, text in sorted(told, key=lambda each: each[1]):
        address = group.server.partition("://")[2] or group.server
        same = text.replace(group.group, "").replace(address, "")
        alike.setdefault(same, {})[text] = None
    return [
        f"{first} ({len(others)} more alike)" if others else first
        for first, *others in alike.values()
    ]


def _of_room(seen: Seen) -> Iterator[str]:
    """Say what would give more requests at once, where servers are full and prompts wait."""
    if seen.status not in {"running", "ramping"} or not seen.counts.queued:
        return
    full = [group for group in seen.groups if _is_full(group) and group.advice]
    # Servers that are alike differ in their measured figures alone: the first stands for them.
    for kind in sorted({(group.binds, group.strategy, group.better) for group in full}, key=str):
        alike = [g for g in full if (g.binds, g.strategy, g.better) == kind]
        more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        yield f"{alike[0].group}{more}: {alike[0].sizing}; {alike[0].advice}"


def _is_full(group: GroupFigures) -> bool:
    if group.state != "ready" or group.cap is None:
        return False
    return (group.running or 0) >= group.cap and bool(group.queued)


def _misfit(seen: Seen, group: GroupFigures) -> str:
    if seen.run in group.left_out:
        return f"{group.group} gets no job of run {seen.run}: {group.left_out[seen.run]}"
    wanted = seen.standing.model
    if wanted is not None and group.model not in {None, wanted}:
        return (
            f"{group.group} serves the model {group.model}, and run {seen.run} wants {wanted}: "
            f"start an SGLang server of {wanted} at {group.server}, or enqueue for {group.model} "
            "with another --run and --output"
        )
    return (
        f"{group.group} serves the right model otherwise than run {seen.run} began with "
        f"({group.detail or 'its log says how'}): start the server as it was, or enqueue with "
        "another --run and --output"
    )


def _of_answers(seen: Seen) -> Iterator[str]:
    """Say what is wrong with the results."""
    counts, run = seen.counts, seen.run
    if seen.status in {"completed_with_failures", "failed"}:
        ended = [(counts.failed, "failed"), (counts.cancelled, "were cancelled")]
        told = ", ".join(f"{number:,} {word}" for number, word in ended if number)
        yield (
            f"{told}{_reasons(seen)}; see them: `producer export {run} --to FILE --partial "
            f"--failures failed.jsonl`; try them again: `producer retry {run}`"
        )
    for _, text in oddities(counts, run=run):
        yield text


def _reasons(seen: Seen) -> str:
    """Name why, most frequent first; with numbers where they are those of what has failed now."""
    reasons = sorted(seen.standing.reasons.items(), key=lambda each: (-each[1], each[0]))
    if not reasons:
        return ""
    exact = len(reasons) > 1 and sum(seen.standing.reasons.values()) == seen.counts.failed
    named = [f"{number:,} {word}" if exact else word for word, number in reasons]
    more = ["…"] if len(named) > SHOWN_REASONS else []
    return f": {', '.join(named[:SHOWN_REASONS] + more)}"


def count_of(number: int, what: str) -> str:
    """Write a number with its noun."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
