"""Show worker groups to people: one line on all of them, then a line each, the odd ones first."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from common.advice import count_of
from common.marks.mark import natural
from producer.units import duration

Figures = dict[str, Any]

MOST = 16
"""So many have a line each; of more, the odd ones."""

WIDE = 120
"""Columns from which on names are told whole."""

LONGEST_NAME = 18
SLOW_SHARE = 0.6
"""A server that generates so much less than most is odd."""

LONG_S = 600.0
"""A request that is so old, and three times as old as most, is odd."""

_BAD = "bold red"
_STYLES = {
    "ready": "green",
    **dict.fromkeys(("starting", "waiting", "draining", "drained"), "yellow"),
}

_Cell = Callable[[Figures], str]


def of_groups(groups: Sequence[Figures], *, width: int, most: int | None = MOST) -> RenderableType:
    """Show worker groups.

    Args:
        groups: As `worker_groups` of the figures has them.
        width: Columns there are.
        most: Lines that they may take; None for one each.
    """
    ordered = sorted(groups, key=lambda group: natural(group["group"]))
    notes = {id(group): note for group, note in zip(ordered, notes_of(ordered), strict=True)}
    shown = ordered
    if most is not None and len(ordered) > most:
        # What is odd stands first, and is never left out for what is not.
        shown = sorted(ordered, key=lambda group: not notes[id(group)])
        shown = shown[: max(most, 1)]
    parts: list[RenderableType] = [Text(summary(ordered))]
    parts += _lines(shown, ordered, notes, columns_of(ordered, width), width)
    left = len(ordered) - len(shown)
    if left:
        odd = sum(bool(note) for note in notes.values())
        hidden = max(odd - len(shown), 0)
        what = f"{hidden:,} of them odd too" if hidden else "nothing odd about them"
        parts.append(Text(f"{left:,} more, {what}: --all-gpus shows each", style="dim"))
    return Group(*parts)


def summary(groups: Sequence[Figures]) -> str:
    """Say on one line how all of them are."""
    states = Counter(group["state"] for group in groups)
    said = ", ".join(
        f"{number:,} {state}" if len(groups) > 1 else state
        for state, number in sorted(states.items(), key=lambda each: (-each[1], each[0]))
    )
    told = [f"{count_of(len(groups), 'worker group')}: {said}"]
    serving = [group for group in groups if group["state"] in {"ready", "draining"}]
    in_flight, bound = (sum(group[name] for group in serving) for name in ("in_flight", "bound"))
    if serving:
        told.append(f"{in_flight:,} of {bound:,} slots in use")
    running, queued = (_sum(groups, name) for name in ("running", "queued"))
    if running is not None:
        told.append(f"{running:,} running and {queued or 0:,} queued at the servers")
    same = [_same(groups, name) for name in ("strategy", "server_version")]
    same[1] = same[1] and f"SGLang {same[1]}"
    told += [", ".join(filter(None, same))] if any(same) else []
    return "; ".join(told)


def notes_of(groups: Sequence[Figures]) -> list[str]:
    """Say of each what somebody should see, empty where there is nothing."""
    at_work = [group for group in groups if group["state"] == "ready" and group["running"]]
    speeds = [group["gen_tokens_per_s"] for group in at_work if group["gen_tokens_per_s"]]
    ages = [group["oldest_s"] for group in groups if group["oldest_s"]]
    usual = {
        "speed": median(speeds) if len(speeds) > 2 else None,  # noqa: PLR2004 - of two, which?
        "age": median(ages) if ages else None,
        **{name: _most(groups, name) for name in ("strategy", "server_version", "cap", "model")},
    }
    return [_note(group, usual) for group in groups]


def _note(group: Figures, usual: Figures) -> str:
    state, told = group["state"], []
    if state != "ready":
        away_s = group["unready_s"] or 0.0
        since = f"for {duration(away_s / 3600)}" if away_s >= 1 and state != "draining" else ""
        told.append(": ".join(filter(None, (f"{state} {since}".strip(), group["detail"]))))
    speed = group["gen_tokens_per_s"]
    if usual["speed"] and group["running"] and speed is not None and state == "ready":
        share = speed / usual["speed"]
        if share < SLOW_SHARE:
            told.append(f"slow: {share:.0%} of what most generate")
    age_s, usual_s = group["oldest_s"], usual["age"]
    if age_s and usual_s and age_s >= max(LONG_S, 3 * usual_s):
        told.append(
            f"its oldest request is {duration(age_s / 3600)} old, elsewhere about "
            f"{duration(usual_s / 3600)}"
        )
    for name, what in (
        ("strategy", ""),
        ("server_version", "SGLang "),
        ("cap", "cap "),
        ("model", "model "),
    ):
        if usual[name] is not None and group[name] not in {None, "", usual[name]}:
            told.append(f"{what}{group[name]}, most have {usual[name]}")
    return "; ".join(told)


def _lines(
    groups: Sequence[Figures],
    every: Sequence[Figures],
    notes: dict[int, str],
    columns: Sequence[str],
    width: int,
) -> Iterator[RenderableType]:
    """Write a line each below a head; what is to be said of one stands below it."""
    rows = [[" ".join(_CELLS[name](group).split()) for name in columns] for group in groups]
    names = _names(every, width)
    for row, group in zip(rows, groups, strict=True):
        row[0] = " ".join(names[id(group)].split())
    wide = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    yield _line(columns, wide, "dim", "dim")
    for row, group in zip(rows, groups, strict=True):
        yield _line(row, wide, "", _STYLES.get(group["state"], _BAD))
        if notes[id(group)]:
            yield Padding(Text(notes[id(group)], style="yellow"), (0, 0, 0, 4))


def _line(cells: Sequence[str], wide: Sequence[int], style: str, state_style: str) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for number, (cell, width) in enumerate(zip(cells, wide, strict=True)):
        is_word = number < len(_WORDS)
        written = cell.ljust(width) if is_word else cell.rjust(width)
        line.append(f"{written} ", style=state_style if number == 1 else style)
    return line


def columns_of(groups: Sequence[Figures], width: int) -> list[str]:
    """Choose what fits beside what matters; what all have alike stands in the summary."""
    names = [*_WORDS, "open/bound/cap", "running", "queued", "tok/s", "KV"]
    hybrid = any(group["mamba_usage"] is not None for group in groups)
    names += ["mamba"] if hybrid else []
    names += ["oldest"]
    for name in ("full", "strategy", "SGLang"):
        if _needs([*names, name], groups, width) <= width:
            names.append(name)
    return names


def _needs(names: Sequence[str], groups: Sequence[Figures], width: int) -> int:
    """Count the columns that a line with so many figures takes."""
    widest = [max(len(name), *(len(_CELLS[name](g)) for g in groups)) for name in names[1:]]
    return sum(widest) + max(map(len, _names(groups, width).values())) + len(names)


def _names(groups: Sequence[Figures], width: int) -> dict[int, str]:
    """Give their names; on a narrow page without the domain that all have, and shortened."""
    names = {id(group): str(group["group"]) for group in groups}
    if width >= WIDE:
        return names
    domains = {name.partition("@")[2].partition(".")[2] for name in names.values()}
    if len(domains) == 1 and (domain := domains.pop()):
        names = {which: name.removesuffix(f".{domain}") for which, name in names.items()}
    half = LONGEST_NAME // 2
    return {
        which: name if len(name) <= LONGEST_NAME else f"{name[:half]}…{name[1 - half :]}"
        for which, name in names.items()
    }


_WORDS = ("worker group", "state")
"""The columns that stand to the left."""

_CELLS: dict[str, _Cell] = {
    "worker group": lambda group: str(group["group"]),
    "state": lambda group: str(group["state"]),
    "open/bound/cap": lambda group: "/".join(
        _or(group[name]) for name in ("in_flight", "bound", "cap")
    ),
    "running": lambda group: _or(group["running"], "{:,}"),
    "queued": lambda group: _or(group["queued"], "{:,}"),
    "tok/s": lambda group: _or(group["gen_tokens_per_s"], "{:,.0f}"),
    "KV": lambda group: _or(group["kv_usage"], "{:.0%}"),
    "mamba": lambda group: _or(group["mamba_usage"], "{:.0%}"),
    "full": lambda group: _or(group["occupancy"], "{:.0%}"),
    "oldest": lambda group: (
        "-" if group["oldest_s"] is None else duration(group["oldest_s"] / 3600)
    ),
    "strategy": lambda group: _or(group["strategy"]),
    "SGLang": lambda group: _or(group["server_version"]),
}


def _or(value: Any, form: str = "{}") -> str:
    return "-" if value is None or value == "" else form.format(value)


def _sum(groups: Sequence[Figures], name: str) -> int | None:
    told = [group[name] for group in groups if group[name] is not None]
    return sum(told) if told else None


def _same(groups: Sequence[Figures], name: str) -> str:
    """Give what all that tell it have alike."""
    told = {group[name] for group in groups if group[name]}
    return str(told.pop()) if len(told) == 1 else ""


def _most(groups: Sequence[Figures], name: str) -> Any:
    """Give what most have; None where no value has more than half of those that tell."""
    told = Counter(group[name] for group in groups if group[name] not in {None, ""})
    if not told:
        return None
    value, number = told.most_common(1)[0]
    return value if 2 * number > told.total() else None
