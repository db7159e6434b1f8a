"""Show people what was found: a table, what is wrong in colour."""

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from workers.node.doctor.lines import Level, Line, summary

REACHED = "reachable"
PLAIN_WIDTH = 140
"""Of a page that no terminal shows."""

_STYLES: dict[Level, str] = {"ok": "green", "warning": "yellow", "fault": "bold red"}


def show(lines: Sequence[Line]) -> None:
    """Print all lines on stdout, what to do below each that needs it, and the account."""
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen = Console(highlight=False, width=PLAIN_WIDTH)
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column("part", no_wrap=True)
    table.add_column("level", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("text", overflow="fold", ratio=1)
    part = ""
    for line in _alike_once(lines):
        text = Text(line.text)
        if line.advice:
            text.append(f"\n→ {line.advice}", style="italic")
        table.add_row(
            Text(line.part if line.part != part else "", style="bold"),
            Text(line.level, style=_STYLES[line.level]),
            Text(line.check),
            text,
        )
        part = line.part
    screen.print(table)
    screen.print(Text(_account(lines)))


def _alike_once(lines: Sequence[Line]) -> list[Line]:
    """Show servers of which the same is to be said once, under the names of all."""
    by_part: dict[str, list[Line]] = {}
    for line in lines:
        by_part.setdefault(line.part, []).append(line)
    parts: dict[tuple[object, ...], list[str]] = {}
    for part, mine in by_part.items():
        # Of what is well only the address differs.
        said = tuple(
            (line.check, line.level, line.check != REACHED and line.text, line.advice)
            for line in mine
        )
        parts.setdefault(said, []).append(part)
    shown: list[Line] = []
    for names in parts.values():
        name = names[0] if len(names) == 1 else f"{names[0]}\nand {len(names) - 1} alike"
        shown += [msgspec.structs.replace(line, part=name) for line in by_part[names[0]]]
    return shown


def _account(lines: Sequence[Line]) -> str:
    told = summary(lines)
    faults, warnings = told["faults"], told["warnings"]
    if not faults and not warnings:
        return f"all {len(lines)} checks are well"
    parts = [
        f"{number} {word}{'' if number == 1 else 's'}"
        for number, word in ((faults, "fault"), (warnings, "warning"))
        if number
    ]
    return f"{' and '.join(parts)} in {len(lines)} checks"
