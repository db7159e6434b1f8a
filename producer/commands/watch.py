"""`producer watch`: the status of a run, again and again, until it has ended."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import click
import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from common.errors import RedisUnusableError
from common.figures import ENDED
from common.notify import Notifier
from common.options import NOTIFY, REDIS
from producer.groups_view import MOST
from producer.locate import Where, connected
from producer.options import ALL_GPUS
from producer.screen import console
from producer.status import ended_with, figures_of
from producer.view import of_run, pace

AROUND = 22
"""Lines of a page beside those of its worker groups, about: a terminal cuts what is too much."""

LEAST = 4


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--json", "json_", is_flag=True, help="Print one JSON object a line.")
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    metavar="S",
    help="Seconds between two looks.",
)
@ALL_GPUS
@NOTIFY
@REDIS
def command(
    run: str,
    *,
    json_: bool,
    every_s: float,
    all_gpus: bool,
    notify: str | None,
    redis: str | None,
) -> int:
    """Show RUN until it has ended.

    Ends with what `producer status` ends with. Ctrl-C ends the look, not the run.

    \b
    Example:
        producer watch prompts && producer export prompts --to answers.jsonl
        producer watch prompts --notify 'notify-send "$HEADRACE_NOTIFY_TEXT"'
    """
    watch = _Watch(Where(run=run, redis=redis), every_s=every_s, notify=notify)
    screen = console()
    try:
        if json_:
            return watch.lines(lambda figures: msgspec.json.encode(figures).decode())
        if screen.is_terminal:
            return watch.live(screen, all_gpus=all_gpus)
        return watch.lines(_line)
    finally:
        watch.close()


class _Watch:
    """Looks at a run until it has ended; a Redis that is away meanwhile is waited for."""

    def __init__(self, where: Where, *, every_s: float, notify: str | None) -> None:
        self._where = where
        self._every_s = every_s
        self._client = connected(where.redis)
        self._notifier = Notifier(self._client, notify, old_too=True) if notify else None

    def close(self) -> None:
        """Tell what there is to tell."""
        if self._notifier is not None:
            self._notifier.close()

    def live(self, screen: Console, *, all_gpus: bool) -> int:
        """Show the newest figures in place."""
        with Live(console=screen, auto_refresh=False) as live:
            for figures, note in self._looks():
                most = None if all_gpus else max(min(screen.height - AROUND, MOST), LEAST)
                page: RenderableType = Text(note)
                if figures is not None:
                    page = of_run(figures, width=screen.width, most_groups=most)
                live.update(page, refresh=True)
                if figures is not None and figures["status"] in ENDED:
                    return ended_with(figures)
        return 0

    def lines(self, form: Callable[[dict[str, Any]], str]) -> int:
        """Print a line a look; without anything new in it, none."""
        before = ""
        for figures, note in self._looks():
            line = note if figures is None else form(figures)
            if line != before:
                click.echo(line, err=figures is None)
                before = line
            if figures is not None and figures["status"] in ENDED:
                return ended_with(figures)
        return 0

    def _looks(self) -> Iterator[tuple[dict[str, Any] | None, str]]:
        """Give figures, or why there are none at present."""
        yield self._look(), ""
        while True:
            time.sleep(self._every_s)
            try:
                figures = self._look()
            except RedisUnusableError as error:
                if self._notifier is not None:
                    self._notifier.redis_away(str(error))
                yield None, f"producer: {error}; asking again"
            else:
                yield figures, ""

    def _look(self) -> dict[str, Any]:
        figures = figures_of(self._client, self._where)
        if self._notifier is not None:
            self._notifier.note(figures)
        return figures


def _line(figures: dict[str, Any]) -> str:
    counts = ("completed", "failed", "in_flight", "queued")
    told = ", ".join(f"{figures[name]:,} {name.replace('_', ' ')}" for name in counts)
    # A line has room for what is most urgent; `status` tells all of it.
    why = "".join(f"; {warning}" for warning in figures["warnings"][:1])
    return f"{figures['run']} {figures['status']}: {told}, {pace(figures)}{why}"
