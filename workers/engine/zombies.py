"""See that what a dead process left open at the server has ended, and end it where it has not.

An abort may be lost: its answer comes too late, or the server takes it for an id that it does not
know yet. Then a request runs on for minutes that nobody waits for, in the place of another. So
after each takeover the server's own count is held against what living processes may have open;
while it has more, the ids are aborted again. Requests of which nobody here knows the ids are other
clients' and are only told of.
"""

import logging
from collections.abc import Mapping

from common.errors import HeadraceError
from common.queue.jobs import Holder
from workers.client.faults import AttemptError
from workers.engine.aborts import abort_all
from workers.engine.core import Core
from workers.readings.loads import ServerLoad
from workers.rids import possible_rids

log = logging.getLogger(__name__)

MOST_TRIES = 4
"""Looks, 15 s apart as a rule, after which somebody has to look himself."""

LEAST_STRANGERS = 3
"""So many, or a tenth of what the server runs at once, are worth a line: one may be anybody's."""


class Zombies:
    """What dead processes may have left at one server.

    Args:
        core: Of this process.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        # Prefix of a dead process's ids -> how many slots it ever had.
        self._dead: dict[str, int] = {}
        self._tries = 0
        self._strange = 0
        self._said = False

    def note(self, rid_prefix: str, most: int) -> None:
        """Take note of a dead process whose requests were aborted just now."""
        self._dead[rid_prefix] = max(most, self._dead.get(rid_prefix, 0))
        self._tries = 0

    async def look(self) -> None:
        """Compare what the server runs with what living processes hold.

        Raises:
            RedisUnusableError: Who holds slots is not known now.
        """
        if not self._core.watch.ready:
            return
        load = await self._load()
        if load is None or load.running is None:
            return
        more = load.running + (load.queued or 0) - self._ours()
        if self._dead or more > 0:
            holders = await self._core.beat.ask(self._core.jobs.holders)
            more -= self._others(holders)
        if self._dead:
            await self._end(more)
        else:
            self._tell_strangers(more)

    async def _load(self) -> ServerLoad | None:
        """Read the load now where it decides something, else take what was read last."""
        if not self._dead:
            return self._core.watch.load
        try:
            return await self._core.client.load(self._core.timing.load_s)
        except (AttemptError, HeadraceError):
            return None

    def _ours(self) -> int:
        return sum(bool(job.rid) for job in self._core.holdings.open.values())

    def _others(self, holders: Mapping[str, Holder]) -> int:
        own = self._core.jobs.epoch
        return sum(holder.slots for epoch, holder in holders.items() if epoch != own)

    async def _end(self, more: int) -> None:
        if more <= 0:
            log.info("what %d dead processes left at the server has ended", len(self._dead))
            self._dead.clear()
            return
        self._tries += 1
        if self._tries > MOST_TRIES:
            log.warning(
                "server %s has %d requests open that no worker group holds, though those of dead "
                "processes were aborted %d times: another client's, or the server has to be "
                "restarted",
                self._core.client.url,
                more,
                MOST_TRIES,
            )
            self._dead.clear()
            return
        log.info("the server has %d requests too many: aborting those of dead processes", more)
        for prefix, most in self._dead.items():
            await abort_all(self._core.client, possible_rids(prefix, most))

    def _tell_strangers(self, more: int) -> None:
        many = max(LEAST_STRANGERS, (self._core.cap or 0) // 10)
        self._strange = self._strange + 1 if more >= many else 0
        if not self._strange:
            self._said = False
        elif self._strange >= MOST_TRIES and not self._said:
            self._said = True
            log.warning(
                "server %s has %d requests open that no worker group holds: whoever else uses it "
                "takes the place of prompts",
                self._core.client.url,
                more,
            )
