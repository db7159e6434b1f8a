"""Call Redis from the event loop: one thread a kind of call, and one memory of how Redis is.

Redis calls are few and carry many jobs each, so a thread for each costs little; the heartbeat has
its own, since a slow finish must not delay a renewal. While Redis is away nothing is claimed, what
is in flight goes on, and whoever called tries again with growing, jittered waits.

The threads are daemons, no executor's: a call to a frozen Redis may hang for a minute, and a
process that has been told to stop must not wait for it.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from common.connect import jittered
from common.errors import RedisFullError, RedisUnusableError

log = logging.getLogger(__name__)

T = TypeVar("T")

LONGEST_WAIT_S = 5.0
SAY_AGAIN_S = 60.0


class Bell:
    """Wakes one waiter; rung while nobody waits, it wakes the next wait at once."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Wake the waiter."""
        self._event.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait for the bell, at most so long."""
        if not self._event.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._event.wait()
        self._event.clear()


class _Call:
    """One call on its way through the thread."""

    __slots__ = ("call", "future", "loop")

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()

    def make(self) -> None:
        """Make the call, in the thread."""
        try:
            answer, error = self.call(), None
        except BaseException as raised:  # noqa: BLE001 - whoever asked gets it
            answer, error = None, raised
        # The loop has closed: nobody waits for the answer any more.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._tell, answer, error)

    def _tell(self, answer: object, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(answer)
        else:
            self.future.set_exception(error)


class RedisDesk:
    """Runs blocking Redis calls one after the other in a thread of their own.

    Attributes:
        away: Whether the last call failed, and how long the next should wait is known here.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._name = name
        self._failures = 0
        self._said_at_s = float("-inf")
        # Whether it was said that Redis is away, and not yet that it is back.
        self._said = False

    @property
    def away(self) -> bool:
        """Whether the last call failed."""
        return self._failures > 0

    async def ask(self, call: Callable[[], T]) -> T:
        """Run one call in the desk's thread; cancelled, it is made all the same.

        Raises:
            RedisUnusableError, RedisFullError: As the call raised it; counted and, at most once a
                minute, logged.
        """
        if not self._thread.is_alive():
            self._thread.start()
        asked = _Call(call)
        self._calls.put(asked)
        try:
            answer: T = await asked.future
        except RedisUnusableError as error:
            self._note(error)
            raise
        if self._failures and self._said:
            self._said = False
            log.warning(
                "%s: Redis answers again after %d failed calls", self._name, self._failures
            )
        self._failures = 0
        return answer

    def wait_s(self) -> float:
        """Say how long to wait before the next call after a failure, with jitter."""
        return jittered(min(0.1 * 2 ** min(self._failures, 6), LONGEST_WAIT_S))

    def close(self) -> None:
        """End the thread after what it has been asked; nobody waits for that."""
        self._calls.put(None)

    def _work(self) -> None:
        while (asked := self._calls.get()) is not None:
            asked.make()

    def _note(self, error: RedisUnusableError) -> None:
        self._failures += 1
        now_s = time.monotonic()
        if now_s - self._said_at_s >= SAY_AGAIN_S:
            self._said_at_s, self._said = now_s, True
            what = "is full, results are kept" if isinstance(error, RedisFullError) else "is away"
            log.warning("%s: Redis %s, going on when it answers: %s", self._name, what, error)
