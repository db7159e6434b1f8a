"""Wait for a store that is away: the loop outside boto3's own, which gives up within seconds."""

import random
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from common.errors import StoreUnusableError

T = TypeVar("T")

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0

FIRST_CALL_DELAY_S = 0.2
"""Within a call: some eight tries in its 20 s."""

CALL_S = 20.0
READERS_CALL_S = 300.0
"""A command that has read for an hour is not to be called again for a minute of SlowDown."""


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long one request of the store is repeated before its call fails.

    Attributes:
        limit_s: No try begins after so many seconds; 0 tries once.
        say: Is told, now and then, that and why a call waits.
    """

    limit_s: float = CALL_S
    say: Callable[[str], object] | None = None

    def tell(self, word: str, past_s: float) -> None:
        """Say that a call waits, once it has waited longer than most do."""
        if self.say is not None and past_s > CALL_S:
            self.say(
                f"the store does not answer ({word}), trying again for at most "
                f"{self.limit_s - past_s:.0f} s"
            )


DEFAULT = Patience()


def outer_retry(
    call: Callable[[], T],
    *,
    deadline_s: float | None = None,
    on_wait: Callable[[StoreUnusableError, float], None] | None = None,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Repeat a call of the store until it succeeds or nothing but a change can help.

    Args:
        call: Something that may be repeated: all calls of `ObjectStore` may.
        deadline_s: How long to go on after the first failure; None goes on for ever.
        on_wait: Told the error and the seconds until the next try, before each wait. It may raise
            to end the waiting.
        sleep: How to wait; it may raise to end the waiting, as when a process is to stop.
        clock: Seconds on a clock that never goes back.

    Returns:
        What `call` returned.

    Raises:
        StoreUnusableError: The last failure, when it is not retryable or time is over.
    """
    tries = 0
    end: float | None = None
    while True:
        try:
            return call()
        except StoreUnusableError as error:
            if not error.retryable:
                raise
            now = clock()
            if deadline_s is not None:
                end = now + deadline_s if end is None else end
                if now >= end:
                    raise
            delay_s = full_jitter_s(tries)
            delay_s = delay_s if end is None else min(delay_s, end - now)
            tries += 1
            if on_wait is not None:
                on_wait(error, delay_s)
        sleep(delay_s)


def full_jitter_s(tries: int, *, first_s: float = FIRST_DELAY_S) -> float:
    """Draw a delay between 0 and a bound that doubles with each try, up to 30 s.

    Many sinks that were stopped by one outage so come back one by one.
    """
    bound_s = min(LONGEST_DELAY_S, first_s * 2.0 ** min(tries, 16))
    return random.uniform(0.0, bound_s)  # noqa: S311 - spreading, not secrecy
