"""Tell what came of `producer enqueue`: one JSON object for programs, some lines for people."""

import os
import shlex
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from common.advice import count_of
from producer.request import Outcome

# The address may hold a password: it is written as it may be seen.
_ADDRESS_FLAGS = {"--redis", "--url"}
_WITH_VALUE = {*_ADDRESS_FLAGS, "-u", "--limit"}

_VARIABLES = ("HEADRACE_REDIS", "RQ_REDIS_URL")


def as_json(outcome: Outcome) -> str:
    """Give the one object of `--json`; the last members only where something was to be queued."""
    reading, tally = outcome.reading, outcome.tally
    told: dict[str, Any] = {
        "run": outcome.run,
        "source": reading.source,
        "lines_read": reading.lines_read,
        "ok": reading.ok,
        "samples": reading.samples,
        "prompts": reading.prompts,
        "duplicates": reading.duplicates,
        "blank": reading.blank,
        "rejected": reading.rejected,
        "rejects": reading.rejects,
        "unsent": reading.unsent,
    }
    if outcome.queued:
        told |= {
            "enqueued": tally.added,
            "already_queued": tally.queued,
            "already_done": tally.completed,
            "already_failed": tally.failed,
            "already_cancelled": tally.cancelled,
            "restored": tally.restored,
            "lost_results": tally.lost,
            "retried": tally.retried,
            "replaced": tally.replaced,
            "unchanged": tally.kept,
            "total": outcome.total,
        }
    return msgspec.json.encode(told).decode()


def as_text(outcome: Outcome) -> list[str]:
    """Give what people read, a line each; of a file refused whole its one message says all."""
    if outcome.reading.refused:
        return []
    lines = [_read(outcome)]
    if outcome.queued:
        lines.append(_queued(outcome))
    if unsent := outcome.reading.unsent_line():
        lines.append(unsent)
    lines += outcome.reading.reject_lines()
    if outcome.rejects_file:
        lines.append(f"rejected rows with reasons: {outcome.rejects_file}")
    return [*lines, *outcome.notes]


def next_lines(
    outcome: Outcome, given: str | None, pilot: Sequence[str] = (), *, limit_from: str = ""
) -> list[str]:
    """Give the lines to type next; an address with a password is named by its variable.

    Args:
        outcome: Of a call that queued.
        given: The address as a flag gave it, None for the default.
        pilot: The arguments of a call that took the first rows alone, `enqueue` and all.
        limit_from: The variable or key that says so, where no flag does.
    """
    url = shown_url(outcome.redis)
    # embedded:DIR is an address for us, and a socket for RQ's tools.
    ours = shlex.quote(given) if given and given.startswith("embedded:") else url
    if outcome.tally.all_done and not pilot:
        # No server has anything to do for these; of the run there may be more.
        return [
            *_how_to_set(outcome.redis, url),
            f"producer status {outcome.run} --redis {ours}",
            f"producer verify {outcome.run} --redis {ours}",
            f"producer export {outcome.run} --to answers.jsonl --redis {ours}",
            *_how_to_stop(given),
        ]
    # A Redis of this kind is for a trial, where there may be no server at all.
    trial = ", or --simulate 2 without any" if ours != url else ""
    return [
        *_how_to_set(outcome.redis, url),
        f"workers up --attach 30000 --redis {ours}  # 30000-30007 beside eight servers{trial}",
        f"producer status {outcome.run} --redis {ours}",
        *_how_to_go_on(outcome.run, ours, pilot, limit_from=limit_from),
        f"rq info -u {url} {outcome.run}",
        *_how_to_stop(given),
    ]


def _how_to_go_on(run: str, redis: str, pilot: Sequence[str], *, limit_from: str) -> list[str]:
    """Look at the pilot's answers, then the same command for all rows."""
    if not pilot:
        return []
    words: list[str] = []
    left = iter(pilot)
    for word in left:
        flag, equals, _ = word.partition("=")
        short = word.startswith("-u")
        if flag != "--limit" and flag not in _ADDRESS_FLAGS and not short:
            words.append(shlex.quote(word))
        elif not equals and word in _WITH_VALUE:
            next(left, "")
    then = f"without {limit_from} the rest" if limit_from else "then the rest"
    return [
        f"producer peek {run} --redis {redis}  # look at some answers first",
        f"producer {' '.join(words)} --redis {redis}  # {then}: nothing is asked twice",
    ]


def _how_to_set(url: str, shown: str) -> list[str]:
    """Name the variable that the lines use, where it does not hold the address yet."""
    if shown != f'"${_VARIABLES[0]}"' or os.environ.get(_VARIABLES[0]) == url:
        return []
    return [f"export {_VARIABLES[0]}=…  # this address with its password, which is not shown here"]


def _how_to_stop(given: str | None) -> list[str]:
    """An embedded server goes on when all else has ended: say how to end it."""
    address = given or os.environ.get("HEADRACE_REDIS") or os.environ.get("RQ_REDIS_URL") or ""
    kind, _, folder = address.partition(":")
    if kind != "embedded":
        return []
    return [f"python -m common.embedded stop {shlex.quote(folder)}  # at the end: Redis stays"]


def shown_url(url: str) -> str:
    """Write an address as it may be typed into a shell and be seen by others."""
    parts = urlsplit(url)
    if parts.password is None and "password=" not in parts.query:
        return shlex.quote(url)
    for variable in _VARIABLES:
        if os.environ.get(variable) == url:
            return f'"${variable}"'
    # It came from a flag or a file: the variable has to be set first.
    return f'"${_VARIABLES[0]}"'


def _read(outcome: Outcome) -> str:
    reading = outcome.reading
    parts = [
        count_of(count, what.removesuffix("s")) if what.endswith("s") else f"{count:,} {what}"
        for count, what in (
            (reading.ok, "prompts"),
            (reading.duplicates, "duplicates"),
            (reading.blank, "blank"),
            (reading.rejected, "rejected"),
        )
        if count or what == "prompts"
    ]
    told = f"{reading.source}: {count_of(reading.lines_read, 'line')} read: {', '.join(parts)}"
    if reading.samples > 1:
        told += f"; {reading.samples} samples of each make {count_of(reading.prompts, 'request')}"
    return told


def _queued(outcome: Outcome) -> str:
    tally = outcome.tally
    parts = [
        f"{count:,} {what}"
        for count, what in (
            (tally.added, "queued now"),
            (tally.retried, "tried again"),
            (tally.replaced, "replaced"),
            (tally.queued, "already queued"),
            (tally.restored, "of these put back"),
            (tally.completed, "already done"),
            (tally.failed, "failed"),
            (tally.cancelled, "cancelled"),
        )
        if count or what == "queued now"
    ]
    return f"run {outcome.run}: {', '.join(parts)}; {count_of(outcome.total, 'prompt')} in all"
