"""Say in the log of a worker group what is odd about the answers of its server, once a run."""

import logging

from common.models import Counts
from common.quality import FLAGS, LEAST_ANSWERS, oddities

log = logging.getLogger(__name__)


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
