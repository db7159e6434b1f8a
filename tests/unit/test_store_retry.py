"""Waiting for a store: how long, how often, and what ends it."""

import itertools
from collections.abc import Callable

import pytest

from common.errors import StoreUnusableError
from common.store import outer_retry
from common.store.retry import LONGEST_DELAY_S, full_jitter_s


def failing(times: int, *, retryable: bool = True) -> Callable[[], str]:
    """A call that fails so many times and then succeeds."""
    tries = itertools.count()

    def call() -> str:
        if next(tries) < times:
            raise StoreUnusableError("away", retryable=retryable)
        return "done"

    return call


def test_it_waits_as_long_as_it_takes_and_tells_each_wait() -> None:
    told: list[float] = []
    slept: list[float] = []

    result = outer_retry(
        failing(200), on_wait=lambda _, delay_s: told.append(delay_s), sleep=slept.append
    )

    assert result == "done"
    assert told == slept
    assert len(slept) == 200
    assert max(slept) <= LONGEST_DELAY_S


def test_what_no_waiting_can_help_is_raised_at_once() -> None:
    slept: list[float] = []

    with pytest.raises(StoreUnusableError):
        outer_retry(failing(1, retryable=False), sleep=slept.append)

    assert slept == []


def test_the_deadline_bounds_the_last_wait_too() -> None:
    now = [100.0]

    def sleep(delay_s: float) -> None:
        now[0] += delay_s

    with pytest.raises(StoreUnusableError):
        outer_retry(failing(10_000), deadline_s=50.0, sleep=sleep, clock=lambda: now[0])

    assert now[0] == pytest.approx(150.0)


def test_a_sleeper_that_raises_ends_the_waiting() -> None:
    def stopped(_: float) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        outer_retry(failing(1), sleep=stopped)


def test_delays_grow_to_their_bound_and_spread_over_all_of_it() -> None:
    late = [full_jitter_s(100) for _ in range(500)]
    first = [full_jitter_s(0) for _ in range(500)]

    assert max(first) <= 0.5
    assert min(late) < 5.0
    assert 25.0 < max(late) <= LONGEST_DELAY_S
