"""Show people how far something long has come: a bar with a rate, on a terminal, after a second.

Without a terminal nothing is shown: what comes at the end says it all.
"""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_QUIET_S = 1.0
_STEP_S = 0.1


class Meter:
    """Progress of one step.

    Args:
        what: What is being done, "reading".
        total: Of the parts' units (bytes), or of the count when there are no parts; None where
            nobody knows.
        shown: Whether there is anybody to show it to.
    """

    def __init__(self, what: str, total: int | None = None, *, shown: bool | None = None) -> None:
        self._what = what
        self._total = total
        self._shown = sys.stderr.isatty() if shown is None else shown
        self._ended = 0
        self._begin = self._next = time.monotonic()
        self._next += _QUIET_S
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, count: int, *, part: int | None = None) -> None:
        """Say that `count` rows are done, and `part` units of the present part."""
        if not self._shown:
            return
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _STEP_S
        done = count if part is None else self._ended + part
        rate = count / (now - self._begin)
        self._draw(done, f"{count:,} rows, {rate:,.0f}/s")

    def end_part(self, size: int) -> None:
        """Say that a part of `size` units is done."""
        self._ended += size

    def _draw(self, done: int, text: str) -> None:
        if self._bar is None:
            # Most calls are over before rich would be imported.
            from rich.console import Console  # noqa: PLC0415
            from rich.progress import (  # noqa: PLC0415
                BarColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(self._what, total=self._total, text=text)
            self._bar.start()
        if self._task is not None:
            self._bar.update(self._task, completed=done, text=text)


MeterFor = Callable[[str, int | None], Meter]
"""Makes the meter of a step, by what is done and how much there is."""
