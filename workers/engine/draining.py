"""Know whether this process's server is drained, and what that means for it.

    heard of it    no claim, no request is opened; what is ready or rests goes back
    what is open   ends by itself, conversations between two turns; at the deadline what is left
                   is aborted by its id and goes back, uncharged (`emptying`)
    over           Redis has said so: the server is asked for a token before anything is claimed

A drained server is about to be stopped, so that it goes away is no death, and nobody is alarmed. A
process that Redis does not answer opens nothing all the same, but aborts nothing and excuses
nothing any more once the drain would have run out without its owner.
"""

import logging
import time

from common.harmless import one_line
from common.queue.drains import DRAIN_TTL_MS
from common.queue.records import Drained
from workers.engine.desk import Bell

log = logging.getLogger(__name__)


class Draining:
    """What this process last heard of its server's drain.

    Attributes:
        token: Of the drain; empty while there is none. Nothing may be opened until Redis has said
            that it is over.
        bell: Rung when something was heard.
    """

    def __init__(self) -> None:
        self.token = ""
        self.bell = Bell()
        self._detail = ""
        self._stands_until_s = self._deadline_s = float("-inf")

    @property
    def stands(self) -> bool:
        """Whether it stands, as far as anybody can know who last heard of it then."""
        return bool(self.token) and time.monotonic() < self._stands_until_s

    @property
    def due(self) -> bool:
        """Whether what is open has had its time."""
        return self.stands and time.monotonic() >= self._deadline_s

    @property
    def detail(self) -> str:
        """Who drains the server and why, for people."""
        return self._detail if self.token else ""

    def hear(self, drain: Drained, asked_s: float) -> bool:
        """Take note of a drain.

        Args:
            drain: As Redis told of it.
            asked_s: Monotonic instant at which it was asked.

        Returns:
            Whether it is another one than before.
        """
        new = drain.token != self.token
        self.token = drain.token
        self._detail = one_line(f"for {drain.owner}: {drain.reason}")
        self._stands_until_s = asked_s + DRAIN_TTL_MS / 1000
        self._deadline_s = asked_s + drain.left_ms / 1000
        if new:
            log.info(
                "the server is drained %s; no claims, what is open gets %.0f s",
                self._detail,
                max(0.0, drain.left_ms / 1000),
            )
        self.bell.ring()
        return new

    def over(self) -> bool:
        """Take note that there is none; True when there was one."""
        was, self.token = bool(self.token), ""
        if was:
            log.info("the drain is over: claims go on when the server gives a token")
            self.bell.ring()
        return was
