"""Show the figures of a run to people: a bar, the counts, a line a worker group."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from common.harmless import harmless

Figures = dict[str, Any]

_STYLES = {
    "completed": "bold green",
    "running": "green",
    "ramping": "green",
    **dict.fromkeys(("completed_with_failures", "paused", "open", "queued"), "yellow"),
    **dict.fromkeys(("waiting_for_workers", "waiting_for_server"), "yellow"),
}
_BAD = "bold red"

_UNITS = ("bytes", "kB", "MB", "GB", "TB")
WIDE = 100
"""Columns that the whole page of a run takes."""

_COLUMNS = (
    "worker group",
    "state",
    "open",
    "bound",
    "server",
    "tok/s",
    "KV",
    "mamba",
    "full",
    "oldest",
    "strategy",
    "SGLang",
)
_ONLY_WIDE = {"mamba", "strategy", "SGLang"}

WHOLE_FROM = 10
"""A time of so many units is told without a fraction."""


def of_run(figures: Figures, *, width: int = WIDE) -> RenderableType:
    """Show one run on a page of so many columns."""
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
    if figures["worker_groups"]:
        parts.append(_groups(figures["worker_groups"], narrow=narrow))
    parts += [Text(f"! {warning}", style="yellow") for warning in figures["warnings"]]
    return Group(*parts)


def _lines(figures: Figures) -> Iterator[str]:
    counts = ("completed", "failed", "cancelled", "in_flight", "queued")
    yield "  ".join(
        f"{name.replace('_', ' ')} {figures[name]:,}"
        for name in counts
        if figures[name] or name != "cancelled"
    ) + (f" ({figures['unfed']:,} of them wait in the output)" if figures["unfed"] else "")
    stored = f"stored {figures['s3_uploaded']:,} rows, {_size(figures['s3_bytes'])}"
    if figures["stream_entries"]:
        stored += f" ({figures['stream_entries']:,} wait for a sink)"
    parts = [stored, f"at work {_duration(figures['elapsed_hours'])}"]
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
        ramp = f"steady in {_duration(figures['steady_in_sec'] / 3600)}, "
    else:
        ramp = ""
    if eta is None:
        left = "time left unknown"
    elif eta == 0:
        left = ""
    else:
        left = f"{_duration(eta)} left"
        low, high = _duration(figures["eta_hours_low"]), _duration(figures["eta_hours_high"])
        left += f" ({low} to {high})" if low != high else ""
    return f"{rate:,.3g}/s  {ramp}{left}".rstrip()


def _groups(groups: Sequence[Figures], *, narrow: bool) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    shown = [name for name in _COLUMNS if not (narrow and name in _ONLY_WIDE)]
    for name in shown:
        table.add_column(name, justify="left" if name in {"worker group", "state"} else "right")
    for group in groups:
        cells = _cells(group)
        table.add_row(*(_text(cells[name]) for name in shown))
    return table


def _cells(group: Figures) -> dict[str, str | Text]:
    state = group["state"]
    style = {"ready": "green", "starting": "yellow"}.get(state, _BAD)
    return {
        "worker group": group["group"],
        "state": Text(state, style=style),
        "open": str(group["in_flight"]),
        "bound": str(group["bound"]),
        "server": _server(group),
        "tok/s": _or(group["gen_tokens_per_s"], "{:,.0f}"),
        "KV": _or(group["kv_usage"], "{:.0%}"),
        "mamba": _or(group["mamba_usage"], "{:.0%}"),
        "full": _or(group["occupancy"], "{:.0%}"),
        "oldest": _or(group["oldest_s"], "{:,.0f} s"),
        "strategy": _or(group["strategy"]),
        "SGLang": _or(group["server_version"]),
    }


def _server(group: Figures) -> str:
    told = [group[name] for name in ("running", "queued", "cap")]
    if told == [None, None, None]:
        return "-"
    return "{}+{}/{}".format(*map(_or, told))


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
            "?" if eta is None else _duration(eta),
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


def _text(cell: str | Text) -> Text:
    """Give a cell that is no markup of rich's, whatever is in it."""
    return cell if isinstance(cell, Text) else Text(cell)


def _or(value: Any, form: str = "{}") -> str:
    return "-" if value is None or value == "" else form.format(value)


def _duration(hours: float) -> str:
    """Write a time so that its size is seen: 12 s, 34 min, 5.6 h, 107 h, 5.3 days."""
    seconds = hours * 3600
    for limit, unit_s, unit in ((90, 1, "s"), (5_400, 60, "min"), (360_000, 3_600, "h")):
        if seconds < limit:
            value = seconds / unit_s
            digits = 0 if unit == "s" or round(value) >= WHOLE_FROM else 1
            return f"{value:.{digits}f} {unit}"
    return f"{seconds / 86_400:.1f} days"


def _size(number: float) -> str:
    power = min(max(len(str(int(number))) - 1, 0) // 3, len(_UNITS) - 1)
    return f"{number / 1_000**power:,.{1 if power else 0}f} {_UNITS[power]}"
