"""Redis of a round: killed, frozen, behind a proxy; and what it forgot each time.

A canary writes a number every few milliseconds and remembers when each was answered. An
append-only file holds commands in the order in which they were carried out, so the first canary
that a restarted Redis lacks tells from when on it has forgotten everything.
"""

import contextlib
import threading
import time
from collections import deque
from typing import cast

import msgspec
import redis

from tests.chaos.kit import Fsync
from tests.support.redis_proxy import RedisProxy
from tests.support.redis_server import RedisServer

CANARY = "chaos:canary"
EVERY_S = 0.004
KEPT = 5_000


class Loss(msgspec.Struct, frozen=True):
    """What one death of Redis cost.

    Attributes:
        writes: Canaries that had been answered and were gone.
        since: Unix time of the first of them; None where nothing was lost.
        span_s: From then to the death.
    """

    writes: int = 0
    since: float | None = None
    span_s: float = 0.0


class RedisSide:
    """The server, the proxy that everybody but the judge comes through, and the canary."""

    def __init__(self, fsync: Fsync) -> None:
        self.server = RedisServer("valkey", appendonly=True, appendfsync=fsync).start()
        self.proxy = RedisProxy(self.server.port)
        self.client: redis.Redis = self.server.client()
        self.up = True
        self._answered: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._number = 0
        self._ended = threading.Event()
        self._canary = threading.Thread(target=self._sing, name="canary", daemon=True)
        self._canary.start()
        self._died = 0.0
        self.losses: list[Loss] = []

    def kill(self) -> None:
        """SIGKILL; nobody gets through the proxy until `back`."""
        self.up = False
        self.proxy.shut = True
        self._died = time.time()
        self.server.kill()
        self.proxy.cut()

    def end(self) -> None:
        """SIGTERM, as an operator's restart: it writes all that it has answered."""
        self.up = False
        self.proxy.shut = True
        self.server.stop()
        self._died = time.time()
        self.proxy.cut()

    def back(self) -> Loss:
        """Start it again, see what it has forgotten, and let everybody in."""
        self.server.start()
        self.proxy.target = self.server.port
        self.client.close()
        self.client = self.server.client()
        loss = self._loss(int(cast("bytes | None", self.client.get(CANARY)) or 0))
        self.losses.append(loss)
        self.up = True
        self.proxy.shut = False
        return loss

    def freeze(self) -> None:
        self.up = False
        self.server.freeze()

    def thaw(self) -> None:
        self.server.thaw()
        self.up = True

    def close(self) -> None:
        self._ended.set()
        self.proxy.close()
        self.server.remove()
        self._canary.join(10)
        self.client.close()

    def _loss(self, stands: int) -> Loss:
        gone = [answered for number, answered in list(self._answered) if number > stands]
        if not gone:
            return Loss()
        return Loss(len(gone), gone[0], max(self._died - gone[0], 0.0))

    def _sing(self) -> None:
        client = self.server.client()
        while not self._ended.wait(EVERY_S):
            if not self.up:
                continue
            with contextlib.suppress(redis.RedisError, OSError):
                self._number += 1
                client.set(CANARY, self._number)
                self._answered.append((self._number, time.time()))
        client.close()
