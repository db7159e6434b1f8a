"""Rates and shares out of a server's readings, and when they say nothing."""

import pytest

from workers.readings.loads import ServerLoad
from workers.readings.log_lines import parse_line
from workers.servers.log_tail import Noted
from workers.servers.meter import SHARES_S, STALE_S, Meter
from workers.servers.telemetry import Telemetry


def metrics(tokens: float, **own: float) -> ServerLoad:
    counters = {"gen_tokens_total": tokens, "prompt_tokens_total": 0.0, **own}
    return ServerLoad(running=8, counted_by="metrics", **counters)  # type: ignore[arg-type]


def metered(*readings: tuple[float, ServerLoad], window_s: float = 16.0) -> Meter:
    meter = Meter(window_s)
    for at_s, load in readings:
        meter.note(load, at_s)
    return meter


def test_a_rate_is_over_the_window_not_over_the_last_step() -> None:
    # A server that brings its counter up to date every ten seconds.
    readings = [(4.0 * n, metrics(1000.0 * (4 * n // 10 * 10))) for n in range(10)]

    rates = [metered(*readings[: n + 1]).gen_tokens_per_s for n in range(5, 10)]

    assert all(rate is not None and 600 <= rate <= 1300 for rate in rates)
    assert metered(*readings[:1]).gen_tokens_per_s is None


def test_readings_farther_apart_than_the_window_give_a_rate_too() -> None:
    meter = metered((0.0, metrics(0.0)), (60.0, metrics(600.0)), (180.0, metrics(3000.0)))

    assert meter.gen_tokens_per_s == pytest.approx(20.0)


def test_the_counters_of_two_pages_are_not_compared() -> None:
    loads = ServerLoad(running=8, gen_tokens_total=5.0, counted_by="loads")
    one = metered((0.0, metrics(9000.0)), (4.0, loads))
    two = metered((0.0, metrics(1000.0)), (4.0, loads), (8.0, metrics(5000.0)))

    assert one.gen_tokens_per_s is None
    assert two.gen_tokens_per_s == pytest.approx(500.0)


def test_a_restart_of_the_server_begins_anew() -> None:
    meter = metered((0.0, metrics(90_000.0)), (4.0, metrics(94_000.0)), (8.0, metrics(100.0)))
    assert meter.gen_tokens_per_s is None
    meter.note(metrics(4100.0), 12.0)

    assert meter.gen_tokens_per_s == pytest.approx(1000.0)


def test_a_restart_soon_after_a_start_begins_anew_too() -> None:
    """By then it may have counted more than at the first reading of its earlier life."""
    young = ((0.0, metrics(100.0)), (4.0, metrics(4100.0)))
    meter = metered(*young, (8.0, metrics(500.0)))
    assert meter.gen_tokens_per_s is None, "and not nothing at all"
    meter.note(metrics(4500.0), 12.0)

    assert meter.gen_tokens_per_s == pytest.approx(1000.0)


def gauge(speed: float | None, running: int | None) -> ServerLoad:
    return ServerLoad(running=running, gen_throughput=speed)


def test_without_a_counter_the_servers_own_word_counts_while_it_is_of_now() -> None:
    changing = [(4.0 * n, gauge(900.0 + n, 8)) for n in range(20)]
    steady = [(4.0 * n, gauge(900.0, 8 + n % 2)) for n in range(20)]
    stale = [(4.0 * n, gauge(900.0, 8)) for n in range(20)]

    assert metered(*changing).gen_tokens_per_s == 919.0
    assert metered(*steady).gen_tokens_per_s == 900.0
    assert metered(*stale[:5]).gen_tokens_per_s == 900.0
    assert metered(*stale).gen_tokens_per_s is None
    assert metered((0.0, gauge(None, 8))).gen_tokens_per_s is None


def test_a_server_that_runs_nothing_generates_nothing_whatever_it_said_last() -> None:
    assert metered((0.0, gauge(900.0, 8)), (4.0, gauge(900.0, 0))).gen_tokens_per_s == 0.0
    assert metered((0.0, gauge(None, 0))).gen_tokens_per_s == 0.0


def test_the_rate_of_a_log_is_the_logs_own() -> None:
    # Its counter moves by whole lines; its mean is over the time that those stand for.
    def log(tokens: float) -> ServerLoad:
        return ServerLoad(
            running=8, gen_throughput=700.0, gen_tokens_total=tokens, counted_by="log"
        )

    assert metered((0.0, log(0.0)), (4.0, log(40_000.0))).gen_tokens_per_s == 700.0


def test_shares_and_retractions_are_over_minutes() -> None:
    def load(cached: float, computed: float, retracted: float | None) -> ServerLoad:
        return ServerLoad(
            prompt_tokens_total=computed,
            cached_tokens_total=cached,
            retracted_total=retracted,
            counted_by="metrics",
        )

    # A page has no line for what has not happened yet.
    readings = [(0.0, load(0, 0, None)), (100.0, load(30, 70, None)), (200.0, load(60, 140, 3))]
    meter = metered(*readings)
    assert meter.cached_share == pytest.approx(0.3)
    assert meter.retracted == 3
    assert meter.prefill_tokens_per_s == pytest.approx(0.7)
    for n in range(1, 3):
        meter.note(load(60, 140, 3), 200.0 + n * SHARES_S / 4)
    assert meter.retracted == 3
    meter.note(load(60, 140, 3), 210.0 + SHARES_S)

    assert (meter.cached_share, meter.retracted) == (None, 0)


def test_memory_is_bounded_however_often_a_server_is_read() -> None:
    meter = metered(*((n / 1000, metrics(n)) for n in range(5000)))

    assert len(meter._readings) < 1000
    assert meter.gen_tokens_per_s == pytest.approx(1000.0)


# --- Both sides ----------------------------------------------------------------------------------

DECODE = (
    "Decode batch, #running-req: 9, mamba usage: 0.65, gen throughput (token/s): 500.00, "
    "#queue-req: 3"
)
PREFILL = (
    "Prefill batch, #new-seq: 9, #new-token: 900, #cached-token: 100, #running-req: 0, "
    "#queue-req: 0"
)
STARTED = "max_total_num_tokens=450000, max_running_requests=72, context_len=9"
LINES = (STARTED, PREFILL, DECODE, DECODE, DECODE)


def noted(at_s: float) -> list[Noted]:
    """Lines a second apart, the last of which was written at an instant."""
    made = []
    for n, text in enumerate(LINES):
        line = parse_line(f"[2026-01-01 10:00:{n:02d}] {text}".encode())
        assert line is not None
        made.append(Noted(line, at_s - (len(LINES) - 1 - n)))
    return made


def test_a_log_alone_tells_all_but_who_the_server_is() -> None:
    telemetry = Telemetry(16.0)
    assert telemetry.figures(0.0).told_s is None
    telemetry.note_log(noted(100.0), 101.0)
    now = telemetry.figures(103.0)

    assert (now.load.running, now.load.queued, now.load.cap) == (9, 3, 72)
    assert (now.load.mamba_usage, now.told_s) == (0.65, 3.0)
    assert now.gen_tokens_per_s == pytest.approx(500.0)
    telemetry.note_log(noted(130.0)[1:], 131.0)
    assert telemetry.figures(131.0).cached_share == pytest.approx(0.1)


def test_pages_alone_tell_what_they_tell() -> None:
    telemetry = Telemetry(16.0)
    telemetry.note_pages(metrics(0.0, cached_tokens_total=0.0), 100.0)
    telemetry.note_pages(metrics(4000.0, cached_tokens_total=0.0), 104.0)
    now = telemetry.figures(105.0)

    assert (now.load.running, now.gen_tokens_per_s, now.told_s) == (8, 1000.0, 1.0)


def test_both_together_complete_each_other() -> None:
    telemetry = Telemetry(16.0)
    telemetry.note_log(noted(100.0), 100.5)
    telemetry.note_pages(metrics(0.0), 101.0)
    telemetry.note_pages(metrics(4000.0), 105.0)
    now = telemetry.figures(105.0)

    assert (now.load.running, now.load.cap, now.load.mamba_usage) == (8, 72, 0.65)
    assert (now.gen_tokens_per_s, now.load.counted_by) == (1000.0, "metrics")


def test_what_is_stale_looks_like_nothing_and_not_like_zero() -> None:
    telemetry = Telemetry(16.0)
    telemetry.note_log(noted(100.0), 100.0)
    telemetry.note_pages(metrics(0.0), 100.0)
    telemetry.note_pages(metrics(4000.0), 104.0)
    now = telemetry.figures(104.0 + STALE_S + 1)

    assert (now.load.running, now.load.queued, now.load.mamba_usage) == (None, None, None)
    assert (now.gen_tokens_per_s, now.cached_share, now.retracted) == (None, None, None)
    assert (now.load.cap, now.told_s) == (72, STALE_S + 1)


def test_a_log_that_goes_on_stands_in_for_pages_that_do_not_answer() -> None:
    telemetry = Telemetry(16.0)
    telemetry.note_log(noted(100.0), 100.0)
    telemetry.note_pages(metrics(0.0), 100.0)
    telemetry.note_log(noted(140.0)[1:], 141.0)
    now = telemetry.figures(142.0)

    assert (now.load.running, now.load.counted_by, now.told_s) == (9, "log", 2.0)
    assert now.gen_tokens_per_s == pytest.approx(500.0)


def test_of_a_server_that_has_come_back_nothing_of_before_is_shown() -> None:
    telemetry = Telemetry(16.0)
    telemetry.note_pages(metrics(0.0), 100.0)
    telemetry.note_pages(metrics(4000.0), 104.0)
    telemetry.begin_anew()
    telemetry.note_pages(metrics(9000.0), 106.0)

    assert telemetry.figures(107.0).gen_tokens_per_s is None
