"""Print figures for people, once or again and again."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from producer.groups_view import MOST
from producer.view import of_run, of_runs

PLAIN_WIDTH = 140
"""Of a page that no terminal shows: wide enough for a line a worker group."""


def console() -> Console:
    """Make what writes on stdout."""
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen = Console(highlight=False, width=PLAIN_WIDTH)
    return screen


def show(every: Sequence[dict[str, Any]], *, one: bool, all_gpus: bool = False) -> None:
    """Print one run in full, or several a line each."""
    if not every:
        return
    screen = console()
    most = None if all_gpus else MOST
    page = of_run(every[0], width=screen.width, most_groups=most) if one else of_runs(every)
    screen.print(page)
