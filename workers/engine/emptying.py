"""Empty a process whose server is drained: at once what is not open, at the deadline the rest."""

import logging

from workers.engine.core import Core
from workers.engine.endings import Endings
from workers.engine.returns import Returns

log = logging.getLogger(__name__)

LOOK_S = 0.2
IDLE_S = 60.0


class Emptying:
    """Empties one process while its server is drained."""

    def __init__(self, core: Core, endings: Endings, returns: Returns) -> None:
        self._draining = core.draining
        self._holdings = core.holdings
        self._endings = endings
        self._returns = returns

    async def run(self) -> None:
        """Empty it as often as its server is drained, for ever."""
        while True:
            await self._draining.bell.wait(LOOK_S if self._draining.token else IDLE_S)
            if self._draining.token:
                self._empty()

    def _empty(self) -> None:
        self._returns.add_ready()
        jobs = list(self._holdings.open.values())
        if not self._draining.due:
            # A slot that rests has nothing open, and would have to wait for the server's return.
            jobs = [job for job in jobs if job.resting]
        elif jobs:
            log.warning("the time of the drain is over: %d open requests go back", len(jobs))
        self._endings.stop(jobs)
