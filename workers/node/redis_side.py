"""What a node's process knows by Redis: that it answers, and what its worker groups say.

In a thread of its own, since Redis may take its time; an embedded one that has died is started
again here, since nobody else watches it.
"""

import logging
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from common import connect
from common.embedded import embedded_redis, stop_embedded
from common.errors import HeadraceError, RedisUnusableError
from common.mishaps import surviving
from common.queue import Groups

if TYPE_CHECKING:
    from common.group_figures import GroupFigures

log = logging.getLogger(__name__)

LOOK_S = 1.0
LIMIT_S = 5.0


class RedisSide:
    """Looks at Redis every second.

    Args:
        url: Of the Redis, resolved.
        embedded: The directory of an embedded one; None for another.

    Attributes:
        state: starting, ready or away.
        since: Seconds since the epoch: when it came to this state.
        says: Why, for people.
        restarts: How often an embedded one had to be started again.
        figures: Of each worker group, by the pid of its process on this host.
    """

    def __init__(self, url: str, *, host: str, embedded: Path | None = None) -> None:
        self.state = "starting"
        self.since = time.time()
        self.says = ""
        self.restarts = 0
        self.figures: dict[int, GroupFigures] = {}
        self.address = connect.public_address(url)
        self.embedded = embedded
        self._host = host
        self._client = connect.impatient_client(url, LIMIT_S)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="redis", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self, *, stop_embedded_too: bool = False) -> None:
        """Look no more, and stop an embedded Redis that nobody else uses."""
        self._ended.set()
        self._thread.join(LIMIT_S)
        if stop_embedded_too and self.embedded is not None:
            self._stop_embedded(self.embedded)
        self._client.close()

    def _stop_embedded(self, home: Path) -> None:
        try:
            others = self._others()
        except connect.REDIS_ERRORS:
            others = 0
        if others:
            log.info("the Redis in %s goes on: %d others use it", home, others)
            return
        try:
            stop_embedded(home)
            self._note("ended", "")
        except RedisUnusableError as error:
            log.warning("%s", error)

    def _others(self) -> int:
        """Count the connections that are not this one."""
        return max(len(self._client.client_list()) - 1, 0)

    def _run(self) -> None:
        while not self._ended.is_set():
            with surviving("the look at Redis"):
                try:
                    self._look()
                except (HeadraceError, *connect.REDIS_ERRORS) as error:
                    self._note("away", str(error))
                except Exception:
                    self._note("away", "an error of ours, which the log places")
                    raise
            self._ended.wait(LOOK_S)

    def _look(self) -> None:
        if not self._answers() and self.embedded is not None:
            if self.state != "starting":
                log.warning("the Redis in %s does not run: starting it again", self.embedded)
                self.restarts += 1
            embedded_redis(self.embedded)
        fresh = Groups(self._client, where=self.address).fresh()
        self.figures = {each.pid: each for each in fresh if each.host == self._host}
        self._note("ready", self.address)

    def _answers(self) -> bool:
        with suppress(*connect.REDIS_ERRORS):
            return bool(self._client.ping())
        return False

    def _note(self, state: str, says: str) -> None:
        self.says = says
        if state != self.state:
            self.state, self.since = state, time.time()
