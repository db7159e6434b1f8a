"""The ramp limits growth, not throughput; what is held ready lasts a fraction of a second."""

import pytest

from workers.pace import Ramp, Throughput, prefetch_target


def test_the_first_fill_grows_by_so_many_a_second() -> None:
    ramp = Ramp(8.0, now_s=100.0)

    assert ramp.wait_s(100.0, open_requests=0) == 0
    assert ramp.wait_s(100.0, open_requests=1) == pytest.approx(0.0)
    assert ramp.wait_s(100.0, open_requests=9) == pytest.approx(1.0)
    assert ramp.wait_s(101.0, open_requests=9) == pytest.approx(0.0)


def test_short_answers_are_not_held_back_by_the_ramp() -> None:
    ramp = Ramp(8.0, now_s=0.0)
    opened, now_s = 0, 2.0

    # Four requests end and are replaced every 10 ms, far above 8 a second; 12 stay open.
    for _ in range(100):
        now_s += 0.01
        for open_requests in (12, 13, 14, 15):
            opened += ramp.wait_s(now_s, open_requests=open_requests) == 0

    assert opened == 400


def test_a_cold_server_ramps_anew() -> None:
    ramp = Ramp(8.0, now_s=0.0)

    ramp.restart(1_000.0)

    assert ramp.wait_s(1_000.0, open_requests=72) == pytest.approx(71 / 8)


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
