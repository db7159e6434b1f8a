"""Say in a worker group's log what is odd about answers, once a run, and how many prompts fail.

Ten thousand failures are as many lines as minutes. A server's own words stand in the failure rows
and not here, since they may quote the prompt.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable

from common.models import Counts
from common.quality import FLAGS, LEAST_ANSWERS, oddities

log = logging.getLogger(__name__)

SAY_S = 60.0


class Noticing:
    """Counts what this process has recorded, by run.

    Args:
        where: Whose answers they are, for people.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._counted: dict[str, dict[str, int]] = {}
        self._said: set[tuple[str, str]] = set()

    def note(self, run: str, flags: tuple[str, ...]) -> None:
        """Take note of a completion, and now and then say what is odd."""
        counted = self._counted.setdefault(run, {"completed": 0})
        counted["completed"] += 1
        for flag in FLAGS.keys() & flags:
            counted[flag] = counted.get(flag, 0) + 1
        if counted["completed"] % LEAST_ANSWERS:
            return
        for flag, text in oddities(Counts(**counted, queued=1), run=run):
            if (run, flag) not in self._said:
                self._said.add((run, flag))
                log.warning("run %s, %s: %s", run, self._where, text)


class Tally:
    """Counts what happens to prompts, by run and word, and tells it once a minute.

    Args:
        what: As it is told: `prompts failed`.
        where: Whose they are, for people.
        level: Of the log.
        clock: Seconds on a clock that never goes back.
    """

    def __init__(
        self,
        what: str,
        where: str,
        *,
        level: int = logging.WARNING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._where = where
        self._level = level
        self._clock = clock
        # Run -> word -> what was not told yet.
        self._counted: dict[str, Counter[str]] = {}
        self._told_s: float | None = None

    def note(self, run: str, word: str) -> None:
        """Take note of one; the first is told at once, the next ones together."""
        self._counted.setdefault(run, Counter())[word] += 1
        self.tell()

    def tell(self, *, now: bool = False) -> None:
        """Tell what was not told, if a minute has passed.

        Args:
            now: Whether or not: there will be no later.
        """
        now_s, told_s = self._clock(), self._told_s
        if not self._counted or (told_s is not None and now_s - told_s < SAY_S and not now):
            return
        passed = "" if told_s is None else f" in the last {now_s - told_s:.0f} s"
        for run, counted in self._counted.items():
            words = ", ".join(f"{count:,} {word}" for word, count in counted.most_common())
            log.log(
                self._level,
                "run %s, %s: %s%s: %s",
                *(run, self._where, self._what, passed, words),
            )
        self._counted.clear()
        self._told_s = now_s
