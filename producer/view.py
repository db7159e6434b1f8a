"""Show the figures of a run to people: a bar, the counts, a line a worker group."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from common.harmless import harmless
from producer import groups_view, marks_view
from producer.units import duration, size

Figures = dict[str, Any]

_STYLES = {
    "completed": "bold green",
    "running": "green",
    "ramping": "green",
    **dict.fromkeys(("completed_with_failures", "paused", "open", "queued"), "yellow"),
    **dict.fromkeys(("waiting_for_workers", "waiting_for_server"), "yellow"),
}
_BAD = "bold red"

WIDE = 100
"""Columns that the whole page of a run takes."""


def of_run(
    figures: Figures, *, width: int = WIDE, most_groups: int | None = groups_view.MOST
) -> RenderableType:
    """Show one run.

    Args:
        figures: From `producer.status`.
        width: Columns of the page.
        most_groups: Lines that worker groups may take; None for one each.
    """
    figures = _harmless(figures)
    narrow = width < WIDE
    total, ended = figures["total"], figures["total"] - figures["queued"] - figures["in_flight"]
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(figures["run"], style="bold"),
        Text(figures["status"], style=_STYLES.get(figures["status"], _BAD)),
        Text(figures["output"], overflow="fold"),
    )
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=max(total, 1), completed=ended, width=24 if narrow else 36),
        f"{ended:,} of {total:,} ({min(ended / max(total, 1), 1):.1%})",
        *([] if narrow else [pace(figures)]),
    )
    parts: list[RenderableType] = [head, bar]
    parts += [Text(pace(figures), overflow="ellipsis", no_wrap=True)] if narrow else []
    parts += [Text(line) for line in _lines(figures)]
    parts += [Text(f"! {warning}", style="yellow") for warning in figures["warnings"]]
    if figures["worker_groups"]:
        parts.append(
            groups_view.of_groups(figures["worker_groups"], width=width, most=most_groups)
        )
    if figures.get("marks"):
        newest = figures["marks"][: marks_view.MOST]
        now = datetime.fromisoformat(figures["updated_at"])
        mean = figures["mean_output_tokens"]
        parts.append(Text())
        parts.append(marks_view.of_marks(newest, width=width, now=now, mean_tokens=mean))
    return Group(*parts)


def _lines(figures: Figures) -> Iterator[str]:
    counts = ("completed", "failed", "cancelled", "in_flight", "queued")
    yield "  ".join(
        f"{name.replace('_', ' ')} {figures[name]:,}"
        for name in counts
        if figures[name] or name != "cancelled"
    ) + (f" ({figures['unfed']:,} of them wait in the output)" if figures["unfed"] else "")
    stored = f"stored {figures['s3_uploaded']:,} rows, {size(figures['s3_bytes'])}"
    if figures["stream_entries"]:
        stored += f" ({figures['stream_entries']:,} more in Redis)"
    parts = [stored, f"at work {duration(figures['elapsed_hours'])}"]
    if figures["completed"]:
        mean = figures["mean_output_tokens"] or figures["avg_output_tokens"]
        parts.append(
            f"about {mean:,.0f} tokens an answer, {figures['truncated_share']:.1%} cut off"
        )
    if figures["retries"]:
        parts.append(f"{figures['retries']:,} attempts repeated")
    yield "  ".join(parts)
    if figures["waits_behind"]:
        yield f"waits behind {figures['waits_behind']}"
        return
    servers = figures["server_tokens_per_sec"]
    if servers:
        told = f"servers {servers:,.0f} tokens/s"
        if figures["server_rate_per_sec"]:
            told += f", {figures['server_rate_per_sec']:,.2f} answers/s by that"
        yield told + (f"  limited by: {figures['limited_by']}" if figures["limited_by"] else "")
    elif figures["limited_by"]:
        yield f"limited by: {figures['limited_by']}"


def pace(figures: Figures) -> str:
    """Tell the rate and the time left."""
    rate, eta = figures["rate_per_sec"], figures["eta_hours"]
    if figures["status"] == "ramping" and figures["steady_in_sec"]:
        ramp = f"steady in {duration(figures['steady_in_sec'] / 3600)}, "
    else:
        ramp = ""
    if eta is None:
        left = "time left unknown"
    elif eta == 0:
        left = ""
    else:
        left = f"{duration(eta)} left"
        low, high = duration(figures["eta_hours_low"]), duration(figures["eta_hours_high"])
        left += f" ({low} to {high})" if low != high else ""
    return f"{rate:,.3g}/s  {ramp}{left}".rstrip()


def of_runs(runs: Sequence[Figures]) -> RenderableType:
    """Show several runs, a line each."""
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("run", "status", "total", "done", "failed", "rate", "left", "output"):
        right = name in {"total", "done", "failed", "rate", "left"}
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for figures in map(_harmless, runs):
        eta = figures["eta_hours"]
        table.add_row(
            Text(figures["run"]),
            Text(figures["status"], style=_STYLES.get(figures["status"], _BAD)),
            f"{figures['total']:,}",
            f"{figures['completed']:,}",
            f"{figures['failed']:,}",
            f"{figures['rate_per_sec']:,.3g}/s",
            "?" if eta is None else duration(eta),
            Text(figures["output"]),
        )
    return table


def _harmless(value: Any) -> Any:
    """Keep a terminal from acting on what servers, Redis and the store say of themselves."""
    if isinstance(value, str):
        return harmless(value)
    if isinstance(value, dict):
        return {name: _harmless(each) for name, each in value.items()}
    return [_harmless(each) for each in value] if isinstance(value, list) else value
