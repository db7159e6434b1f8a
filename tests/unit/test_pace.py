"""The ramp limits growth, not throughput; what is held ready lasts a fraction of a second."""

import pytest

from workers.engine.pace import Ramp, Throughput, prefetch_target


def fill(ramp: Ramp, *, begin_s: float, seconds: float) -> list[float]:
    """Open as fast as the ramp lets, none of which ends; the instants."""
    opened: list[float] = []
    for tick in range(int(seconds * 100)):
        now_s = begin_s + tick / 100
        while ramp.wait_s(now_s, open_requests=len(opened)) == 0:
            opened.append(now_s)
    return opened


def test_the_first_fill_grows_by_so_many_a_second() -> None:
    ramp = Ramp(8.0, now_s=100.0)

    opened = fill(ramp, begin_s=100.0, seconds=3.0)

    assert len(opened) == pytest.approx(24, abs=1)
    for start in opened:
        assert sum(start <= at < start + 1.0 for at in opened) <= 9


def test_how_long_to_wait_is_told() -> None:
    ramp = Ramp(8.0, now_s=0.0)

    assert ramp.wait_s(0.0, open_requests=0) == 0
    assert ramp.wait_s(0.0, open_requests=1) == pytest.approx(1 / 8)
    assert ramp.wait_s(0.05, open_requests=1) == pytest.approx(1 / 8 - 0.05)
    assert ramp.wait_s(0.125, open_requests=1) == pytest.approx(0.0)


def test_short_answers_are_not_held_back_by_the_ramp() -> None:
    ramp = Ramp(8.0, now_s=0.0)
    opened = len(fill(ramp, begin_s=0.0, seconds=2.0))
    assert opened >= 16

    # Four requests end and are replaced every 10 ms, far above 8 a second; 12 stay open.
    replaced = 0
    for tick in range(1_000):
        for open_requests in (12, 13, 14, 15):
            now_s = 2.0 + tick / 100
            replaced += ramp.wait_s(now_s, open_requests=open_requests) == 0

    assert replaced == 4_000


@pytest.mark.parametrize("idle_s", [11.0, 3_600.0])
def test_a_server_that_stood_idle_is_filled_slowly_again(idle_s: float) -> None:
    ramp = Ramp(8.0, now_s=0.0)
    fill(ramp, begin_s=0.0, seconds=5.0)

    again = fill(ramp, begin_s=5.0 + idle_s, seconds=1.0)

    assert len(again) <= 10


def test_a_dip_of_a_second_is_filled_at_once() -> None:
    ramp = Ramp(8.0, now_s=0.0)
    fill(ramp, begin_s=0.0, seconds=5.0)

    assert all(ramp.wait_s(6.0, open_requests=already) == 0 for already in range(20, 39))


def test_a_cold_server_ramps_anew() -> None:
    ramp = Ramp(8.0, now_s=0.0)
    fill(ramp, begin_s=0.0, seconds=10.0)

    ramp.restart(1_000.0)

    assert ramp.wait_s(1_000.0, open_requests=72) == pytest.approx(72 / 8)


def test_the_rate_is_that_of_the_last_window() -> None:
    rate = Throughput(0.0)
    for tick in range(400):
        rate.note(tick / 100)

    assert rate.per_s(4.1) == pytest.approx(100, rel=0.1)
    assert rate.per_s(60.0) == pytest.approx(0, abs=10)


@pytest.mark.parametrize(
    ("slots", "open_requests", "per_s", "target"),
    [
        (72, 72, 0.3, 1),
        (72, 72, 40.0, 10),
        (256, 256, 5000.0, 256),
        (72, 0, 0.0, 16),
        (4, 0, 0.0, 4),
    ],
)
def test_held_jobs_last_a_quarter_second(
    slots: int, open_requests: int, per_s: float, target: int
) -> None:
    assert prefetch_target(slots=slots, open_requests=open_requests, per_s=per_s) == target
