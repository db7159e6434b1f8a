"""The table of a node's parts, for people."""

import time

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from common.harmless import one_line
from workers.node.node_record import NodeRecord, age

PLAIN_WIDTH = 140
_GOOD = frozenset({"ready", "running"})
_BAD = frozenset({"failed", "away", "down", "faulty", "wrong_model", "restarting"})
_HEADINGS = ("part", "pid", "state", "since", "restarts")
_MOST_CHARS = 300
STALE_S = 15.0


def console(*, stderr: bool) -> Console:
    """Make what writes for people; wide where no terminal says how wide."""
    screen = Console(stderr=stderr, highlight=False)
    if screen.is_terminal:
        return screen
    return Console(stderr=stderr, highlight=False, width=PLAIN_WIDTH)


def page(record: NodeRecord, *, last: str = "") -> Group:
    """Give the table, and a line above it.

    Args:
        record: Of the node.
        last: What was said last, below the table.
    """
    now_s = time.time()
    cells = [
        (
            row.name,
            str(row.pid or "-"),
            row.state,
            duration(now_s - row.since),
            str(row.restarts or "-"),
            one_line(row.says, _MOST_CHARS),
        )
        for row in record.rows
    ]
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False, expand=True)
    for place, heading in enumerate(_HEADINGS):
        widest = max(len(heading), *(len(row[place]) for row in cells))
        table.add_column(heading, no_wrap=True, min_width=widest)
    # What a part says gets the width that is left.
    table.add_column("says", no_wrap=True, overflow="ellipsis", ratio=1)
    for name, pid, state, since, restarts, says in cells:
        table.add_row(name, pid, Text(state, style=_style(state)), since, restarts, Text(says))
    head = f"{record.host}: {record.state} for {duration(now_s - record.since)}, pid {record.pid}"
    if age(record) > STALE_S:
        head += f" (as it was {duration(age(record))} ago)"
    return Group(Text(head), table, *([Text(one_line(last, _MOST_CHARS))] if last else []))


def _style(state: str) -> str:
    if state in _GOOD:
        return "green"
    return "red" if state in _BAD else "yellow"


def duration(seconds: float) -> str:
    """Write a duration in its two largest units: `42s`, `3m10s`, `5h02m`, `2d04h`."""
    whole = max(int(seconds), 0)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86_400
    if days:
        return f"{days}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"
