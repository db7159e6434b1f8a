"""Show the marks of a run to people: what was marked, and how the figures changed there."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from common.harmless import harmless
from producer.units import duration

Told = dict[str, Any]

MOST = 3
"""Marks on the page of a run: the newest."""


def of_marks(
    marks: Sequence[Told],
    *,
    width: int,
    now: datetime | None = None,
    mean_tokens: float | None = None,
) -> RenderableType:
    """Show marks, each with its time here, and the figures before and after where they are known.

    Args:
        marks: As `common.marks.effect` tells them, in the order in which they are to stand.
        width: Columns there are.
        now: What "ago" is counted from.
        mean_tokens: Of an answer, as far as is known.
    """
    now = datetime.now(UTC) if now is None else now
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False, width=width)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    above: list[str] = []
    for mark in marks:
        at = datetime.fromisoformat(mark["at"])
        clock, ago = _when(at, now)
        text = Text(harmless(mark["text"]), style="bold")
        lines = list(lines_of(mark, mean_tokens=mean_tokens))
        # Several marks of one change have the same figures.
        shown = [Text(line) for line in lines if lines != above]
        above = lines
        if not shown:
            # Of a line alone the age stands in it, not on a second one.
            text.append(f"  ({ago})", style="not bold dim")
        left = f"{clock}\n{ago}" if shown else clock
        table.add_row(Text(left, style="dim"), Group(text, *shown))
    return table


def _when(at: datetime, now: datetime) -> tuple[str, str]:
    """Write an instant as it stands on a clock here, and how long ago that is."""
    here, today = at.astimezone(), now.astimezone()
    form = "%H:%M:%S" if here.date() == today.date() else "%d %b %H:%M"
    ago_s = (now - at).total_seconds()
    return here.strftime(form), f"{duration(max(ago_s, 0.0) / 3600)} ago"


def lines_of(mark: Told, *, mean_tokens: float | None = None) -> Iterator[str]:
    """Say how the figures changed at a mark; nothing where none are known."""
    before, after = mark["before"] or {}, mark["after"] or {}
    if not before and not after:
        return
    told = [
        _change(before, after, "server_tokens_per_sec", " tokens/s"),
        _change(before, after, "running_per_group", " running at each"),
        _change(before, after, "worker_groups", " worker groups", only_changed=bool(before)),
    ]
    # How many worker groups there were tells nothing of servers that nobody has seen since.
    if any(told[:2]) or (after and told[2]):
        yield f"{_about(before, after)} {', '.join(filter(None, told))}"
    yield _of_answers(mark, before, after, mean_tokens)


def _about(before: Told, after: Told) -> str:
    if not before:
        return "since then servers"
    return "servers" if after else "not known yet; before, servers"


def _of_answers(mark: Told, before: Told, after: Told, mean_tokens: float | None) -> str:
    then, now = before.get("rate_per_sec"), after.get("rate_per_sec")
    was = "" if then is None else f"{then:,.3g}"
    if now is not None:
        share = f" ({now / then - 1:+.0%})" if then else ""
        mean = _change(before, after, "avg_output_tokens", " tokens each", only_changed=True)
        return f"answers {was and f'{was} -> '}{now:,.3g}/s{share}" + (f", {mean}" if mean else "")
    steady_s, tokens = mark["steady_in_sec"], after.get("server_tokens_per_sec")
    told = f"answers {was}/s -> " if was else "answers: "
    if not steady_s:
        return f"{told}nobody can tell: no answer has ended, or the next mark came too soon"
    if tokens and mean_tokens:
        told += f"about {tokens / mean_tokens:,.3g}/s by the servers' tokens; "
    return (
        f"{told}too early to tell by answers, which begun since have to end first: in "
        f"{duration(steady_s / 3600)}"
    )


def _change(before: Told, after: Told, name: str, unit: str, *, only_changed: bool = False) -> str:
    """Write a figure of both sides; empty where neither is known."""
    then, now = before.get(name), after.get(name)
    if then is None and now is None:
        return ""
    if not before or not after:
        return _with_unit(f"{(now if then is None else then) or 0:,.0f}", unit)
    written = ["?" if value is None else f"{value:,.0f}" for value in (then, now)]
    if written[0] == written[1] and only_changed:
        return ""
    share = f" ({now / then - 1:+.0%})" if then and now and "per_sec" in name else ""
    return f"{written[0]} -> {_with_unit(written[1], unit)}{share}"


def _with_unit(number: str, unit: str) -> str:
    return number + (unit.removesuffix("s") if number == "1" and unit.endswith("groups") else unit)
