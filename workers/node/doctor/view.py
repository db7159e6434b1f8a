"""Show people what was found: a table, what is wrong in colour."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from workers.node.doctor.lines import Level, Line, summary

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
    for line in lines:
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
