"""The figures of a run: the status word, both rates, the time left."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.figures import ENDED, Status, exit_code, progress
from common.flow import BUCKET_MS, flow_of, rate_of
from common.group_figures import GroupFigures
from common.models import Counts
from common.standing import Standing

NOW_MS = 1_796_000_000_000
NOW_BUCKET = NOW_MS // BUCKET_MS


def group(**own: Any) -> GroupFigures:
    values: dict[str, Any] = {
        "group": "gpu0@host",
        "epoch": "e1",
        "host": "host",
        "pid": 1,
        "server": "http://127.0.0.1:30000",
        "state": "ready",
        "in_flight": 10,
        "running": 10,
        "queued": 0,
        "oldest_s": 60.0,
        "up_s": 3_600.0,
    }
    return GroupFigures(**(values | own))


def counts(**own: int) -> Counts:
    values = {"total": 100, "completed": 40, "in_flight": 10, "queued": 50}
    return Counts(**(values | own))


def steady(per_s: int = 1, *, silent_s: int = 0) -> dict[int, int]:
    """Completions at one rate over ten minutes, then none; somebody is at work all the time."""
    buckets = {NOW_BUCKET - back: 5 * per_s for back in range(120)}
    return buckets | {NOW_BUCKET - back: 0 for back in range(silent_s // 5)}


def figures(
    had: Counts,
    groups: list[GroupFigures] | None = None,
    per_bucket: dict[int, int] | None = None,
    **standing: Any,
) -> dict[str, Any]:
    return progress(
        had,
        standing=Standing(**standing),
        now_ms=NOW_MS,
        groups=[group()] if groups is None else groups,
        per_bucket=steady() if per_bucket is None else per_bucket,
    )


# --- The status word -----------------------------------------------------------------------------

DONE = counts(completed=100, in_flight=0, queued=0)
MIXED = counts(completed=60, failed=40, in_flight=0, queued=0)
NONE = counts(completed=0, failed=100, in_flight=0, queued=0)
IDLE = counts(in_flight=0, queued=60)

WORDS: list[tuple[Status, Counts, dict[str, Any]]] = [
    ("running", counts(), {}),
    ("completed", DONE, {"proven": True}),
    ("completed_with_failures", MIXED, {"proven": True}),
    ("failed", NONE, {"proven": True}),
    ("cancelled", counts(), {"cancelled": True}),
    ("cancelled", DONE, {"cancelled": True, "proven": True}),
    ("state_lost", DONE, {"lost": "3 batches", "proven": True}),
    # All has ended, and yet it is not done.
    ("running", DONE, {"proven": False}),
    ("running", msgspec.structs.replace(DONE, stream_entries=3), {"proven": True}),
    ("s3_error", DONE, {"s3_error": "denied"}),
    ("open", DONE, {"sealed": False, "proven": True}),
    ("open", Counts(), {"sealed": False}),
    ("s3_error", counts(), {"s3_error": "denied", "paused": "x", "redis_full": "y"}),
    ("paused", counts(), {"paused": "by hand", "redis_full": "y"}),
    ("paused", counts(), {"suspended": True}),
    ("redis_full", counts(), {"redis_full": "y"}),
    ("waiting_for_workers", counts(), {"groups": []}),
    ("waiting_for_server", counts(), {"groups": [group(state="waiting")]}),
    ("waiting_for_server", counts(), {"groups": [group(state="down"), group(state="starting")]}),
    ("wrong_model", counts(), {"groups": [group(state="down"), group(state="wrong_model")]}),
    ("running", counts(), {"groups": [group(state="wrong_model"), group()]}),
    ("queued", IDLE, {"per_bucket": {}}),
    ("running", IDLE, {}),
    ("ramping", counts(completed=0), {"per_bucket": {}}),
    ("stalled", counts(), {"per_bucket": steady(silent_s=150)}),
    ("running", counts(), {"per_bucket": steady(silent_s=60)}),
    ("stalled", counts(completed=0), {"per_bucket": {}, "groups": [group(oldest_s=700.0)]}),
    (
        "ramping",
        counts(completed=0),
        {"per_bucket": {}, "groups": [group(oldest_s=700.0)], "request_timeout_s": 800.0},
    ),
    # The servers generate: long answers are no stall.
    (
        "running",
        counts(),
        {"per_bucket": steady(silent_s=150), "groups": [group(gen_tokens_per_s=500.0)]},
    ),
]


@pytest.mark.parametrize(("word", "had", "known"), WORDS)
def test_the_status_word(word: Status, had: Counts, known: dict[str, Any]) -> None:
    assert figures(had, **known)["status"] == word


@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("completed", 0),
        ("running", 0),
        ("waiting_for_workers", 0),
        ("completed_with_failures", 1),
        ("failed", 1),
        ("cancelled", 1),
        ("stalled", 1),
        ("state_lost", 4),
        ("s3_error", 4),
        ("wrong_model", 4),
    ],
)
def test_the_exit_code_of_a_status(word: str, code: int) -> None:
    assert exit_code(word) == code


@given(
    completed=st.integers(0, 5),
    failed=st.integers(0, 5),
    cancelled=st.integers(0, 5),
    left=st.integers(0, 5),
    waiting=st.integers(0, 2),
    sealed=st.booleans(),
    proven=st.booleans(),
)
def test_nothing_passes_for_completed_that_is_not(
    *,
    completed: int,
    failed: int,
    cancelled: int,
    left: int,
    waiting: int,
    sealed: bool,
    proven: bool,
) -> None:
    had = Counts(
        total=completed + failed + cancelled + left,
        completed=completed,
        failed=failed,
        cancelled=cancelled,
        queued=left,
        stream_entries=waiting,
    )

    told = figures(had, sealed=sealed, proven=proven)

    # Nothing is sealed without a prompt: one that has none has lost them.
    done = sealed and proven and not left and not waiting and bool(had.total)
    assert (told["status"] in ENDED) == done
    assert (told["status"] == "completed") == (done and not failed + cancelled)
    assert exit_code(told["status"]) != 0 or told["status"] not in ENDED or completed == had.total


def test_a_sealed_run_without_a_prompt_is_never_called_done() -> None:
    told = figures(Counts(truncated=50), proven=True, run="r")

    assert told["status"] == "state_lost"
    assert "producer enqueue FILE --run r" in told["warnings"][0]
    assert figures(Counts(), redis_full="no room", proven=True)["status"] == "redis_full"


@pytest.mark.parametrize(("unready_s", "code"), [(10.0, 0), (61.0, 4)])
def test_servers_that_could_not_be_used_for_a_minute_end_with_4(
    unready_s: float, code: int
) -> None:
    down = group(state="down", unready_s=unready_s)

    told = figures(counts(), groups=[down, group(state="faulty", unready_s=900.0)])

    assert told["status"] == "waiting_for_server"
    assert exit_code(told["status"], told["unusable_sec"]) == code


def test_one_usable_server_is_no_outage() -> None:
    told = figures(counts(), groups=[group(), group(state="down", unready_s=900.0)])

    assert told["status"] == "running"
    assert exit_code(told["status"], told["unusable_sec"]) == 0


def test_figures_of_a_server_that_is_away_are_blank() -> None:
    away = group(state="down", gen_tokens_per_s=900.0, cap=32, kv_usage=0.5, occupancy=1.0)

    told = figures(counts(), groups=[away])

    (shown,) = told["worker_groups"]
    names = ("running", "queued", "cap", "gen_tokens_per_s", "kv_usage", "occupancy")
    assert {shown[name] for name in names} == {None}
    assert told["server_tokens_per_sec"] is None


def test_servers_that_are_down_alike_are_told_in_one_line() -> None:
    ports = {gpu: 30_000 + gpu for gpu in range(12)}
    down = [
        group(
            group=f"gpu{gpu}@host",
            server=f"http://127.0.0.1:{port}",
            state="down",
            detail=f"no connection to 127.0.0.1:{port}",
        )
        for gpu, port in ports.items()
    ]
    odd = group(group="gpu9@other", state="down", detail="no answer in time")

    assert figures(counts(), groups=[*down, odd])["warnings"] == [
        "gpu0@host: no connection to 127.0.0.1:30000 (11 more alike)",
        "gpu9@other: no answer in time",
    ]


def test_servers_of_another_model_are_told_in_one_line() -> None:
    others = [group(group=f"gpu{n}@host", server=f"http://s:{n}", model="big") for n in range(3)]

    (warning,) = figures(counts(in_flight=0), groups=others, model="small")["warnings"]

    assert warning.startswith("gpu0@host serves the model big")
    assert warning.endswith("(2 more alike)")


def test_a_young_group_is_starting_and_nothing_to_warn_of() -> None:
    told = figures(
        counts(), groups=[group(state="waiting", up_s=3.0, detail="not asked yet", unready_s=3.0)]
    )

    assert told["worker_groups"][0]["state"] == "starting"
    assert told["warnings"] == []


def test_another_runs_server_is_the_wrong_model_for_this_one_alone() -> None:
    other = group(model="big", server="http://s:1", gen_tokens_per_s=900.0)

    told = figures(counts(in_flight=0), groups=[other], run="mine", model="small")

    assert told["status"] == "wrong_model"
    (warning,) = told["warnings"]
    assert "serves the model big" in warning
    assert "run mine wants small" in warning
    assert "start an SGLang server of small at http://s:1" in warning
    assert figures(counts(), groups=[other], run="theirs", model="big")["status"] == "running"

    of_another = msgspec.structs.replace(
        other, state="wrong_model", detail="run x began otherwise"
    )
    told = figures(counts(in_flight=0), groups=[of_another], run="mine", model="small")
    assert told["worker_groups"][0]["detail"] == "", "run x is not asked for"


def test_a_server_of_the_right_model_that_was_started_otherwise_is_named() -> None:
    servers = [("small", "qwen3"), ("small", None), ("big", "qwen3")]
    groups = [
        group(group=f"gpu{gpu}@h", model=model, identity={"model": model, "reasoning_parser": own})
        for gpu, (model, own) in enumerate(servers)
    ]
    was = {"model": "small", "reasoning_parser": "qwen3"}

    told = figures(counts(), groups, run="mine", model="small", pinned=was)

    assert told["status"] == "running"
    states = [each["state"] for each in told["worker_groups"]]
    assert states == ["ready", "wrong_model", "wrong_model"]
    (warning,) = told["warnings"]
    assert warning.startswith("gpu1@h serves the right model otherwise than run mine began with")
    assert "reasoning_parser None instead of qwen3" in warning


def test_the_rate_of_a_run_that_is_over_is_that_of_all_its_work() -> None:
    done = msgspec.structs.replace(DONE, active_ms=20_000)

    long_ago = figures(done, proven=True, per_bucket={NOW_BUCKET - 500: 100})

    assert long_ago["rate_per_sec"] == 5.0
    assert figures(done, per_bucket={NOW_BUCKET - 20: 100})["rate_per_sec"] == 5.0


def test_failures_say_why_and_what_to_do() -> None:
    had = msgspec.structs.replace(MIXED, cancelled=1, failed=39)

    told = figures(had, proven=True, run="r", reasons={"bad_request": 30, "timeout": 9})

    (warning,) = told["warnings"]
    assert warning.startswith("39 failed, 1 were cancelled: 30 bad_request, 9 timeout")
    assert "producer export r --to FILE --partial --failures" in warning
    assert "producer retry r" in warning
    # Of a retry the earlier reasons are there too: then numbers would say something else.
    again = figures(had, proven=True, reasons={"bad_request": 60, "timeout": 9})
    assert "cancelled: bad_request, timeout;" in again["warnings"][0]


def test_shares_stay_below_one_where_totals_shrank() -> None:
    told = figures(counts(completed=50, truncated=60))

    assert told["truncated_share"] == 1.0
    assert "100% of the answers" in told["warnings"][0]


def test_a_run_that_has_ended_is_not_told_to_be_compared() -> None:
    assert figures(DONE, proven=True, unreconciled=True, paused="x")["warnings"] == []
    assert "not yet compared" in figures(counts(), unreconciled=True)["warnings"][0]


def test_a_run_that_waits_behind_another_is_queued() -> None:
    told = figures(IDLE, waits_behind="big2 (priority 5)")

    assert (told["status"], told["limited_by"]) == ("queued", "another run")
    assert told["waits_behind"] == "big2 (priority 5)"


# --- The client's rate (B88, B89) ----------------------------------------------------------------


@pytest.mark.cases
def test_b88_what_was_done_before_a_stop_does_not_count_for_now() -> None:
    """130 rows done in a sitting before; the first new one came 24 s after the start."""
    start = NOW_BUCKET - 5
    before = {start - 40 - back: 26 for back in range(5)}
    per_bucket = before | {start: 0, start + 2: 0, NOW_BUCKET: 1}

    told = figures(
        counts(total=1351, completed=131, in_flight=1, queued=1219),
        groups=[group(in_flight=1, running=None, oldest_s=0.5, up_s=None)],
        per_bucket=per_bucket,
    )

    assert told["status"] == "running"
    assert told["rate_per_sec"] == pytest.approx(0.0417, rel=0.2)
    assert told["eta_hours"] == pytest.approx(8.1, rel=0.2)


@pytest.mark.cases
def test_b88_a_quick_restart_is_told_by_how_long_the_groups_are_up() -> None:
    per_bucket = {NOW_BUCKET - 8 - back: 26 for back in range(5)}
    per_bucket |= {NOW_BUCKET - 4: 0, NOW_BUCKET: 1}

    rate = rate_of(per_bucket, now_ms=NOW_MS, since_ms=NOW_MS - 24_000)

    assert rate.per_s == pytest.approx(0.0417, rel=0.2)


def replay(at_s: int) -> dict[str, Any]:
    """Look at case B89 after `at_s` s: 10 rows/s for 60 s, none for 300 s, then 1 row/s."""
    begin = NOW_BUCKET - at_s // 5
    per_bucket: dict[int, int] = {}
    for bucket in range(begin, NOW_BUCKET + 1):
        second = (bucket - begin) * 5
        per_bucket[bucket] = 50 if second < 60 else 0 if second < 360 else 5
    done = sum(per_bucket.values())
    silent_s = min(max(at_s - 60, 0), 300) if at_s < 360 else 1
    return figures(
        counts(total=10_000, completed=done, in_flight=10, queued=9_990 - done),
        groups=[group(oldest_s=float(silent_s), up_s=float(at_s))],
        per_bucket=per_bucket,
    )


@pytest.mark.cases
@pytest.mark.parametrize("at_s", [200, 260, 300, 355])
def test_b89_a_stall_brings_the_rate_to_nothing_within_its_window(at_s: int) -> None:
    told = replay(at_s)

    assert told["rate_per_sec"] == 0
    assert told["eta_hours"] is None
    assert told["status"] == "stalled"


@pytest.mark.cases
def test_b89_before_it_and_one_window_after_it_the_rate_is_that_of_now() -> None:
    assert replay(59)["rate_per_sec"] == pytest.approx(10, rel=0.2)
    assert replay(360 + 120)["rate_per_sec"] == pytest.approx(1.0, rel=0.2)
    assert replay(360 + 120)["status"] == "running"


@pytest.mark.cases
@pytest.mark.parametrize("ramps", [False, True])
def test_b47_what_is_left_of_a_tail_takes_about_as_long_as_it_has_taken(*, ramps: bool) -> None:
    """99 answers in 20 s, and one that goes on: at 5 answers a second it would be 0.2 s."""
    tail = counts(total=100, completed=99, in_flight=1, queued=0, output_tokens=99 * 100)
    more: dict[str, Any] = {"gen_tokens_per_s": 30.0, "ages_s": 30.0} if ramps else {}

    told = figures(
        tail,
        groups=[group(in_flight=1, running=1, oldest_s=30.0, up_s=50.0, **more)],
        per_bucket=steady(5, silent_s=30),
    )

    assert told["eta_hours"] == pytest.approx(30 / 3600, rel=0.1)
    assert 0 < told["eta_hours_low"] <= told["eta_hours"]
    assert told["eta_hours_high"] == pytest.approx(570 / 3600, rel=0.1)


@given(left=st.integers(1, 10**8), rate=st.integers(1, 10**6), queued=st.integers(0, 10**8))
def test_the_time_left_is_nothing_only_when_nothing_is_left(
    left: int, rate: int, queued: int
) -> None:
    had = counts(total=10**9, completed=10**9 - left - queued, in_flight=left, queued=queued)

    told = figures(had, per_bucket=steady(rate))

    assert 0 < told["eta_hours_low"] <= told["eta_hours"] <= told["eta_hours_high"]


def test_a_slow_run_is_not_taken_for_a_stall() -> None:
    """One answer in 100 s: two minutes without one mean nothing."""
    per_bucket = {NOW_BUCKET - back: int(back % 20 == 5) for back in range(30, 120)}
    per_bucket |= {NOW_BUCKET - back: 0 for back in range(30)}

    told = figures(counts(), per_bucket=per_bucket)

    assert told["status"] == "running"
    assert told["rate_per_sec"] > 0


def test_the_window_is_short_where_there_is_enough_and_long_where_there_is_not() -> None:
    quick = {NOW_BUCKET - back: 100 if back < 24 else 500 for back in range(120)}
    slow = {NOW_BUCKET - back: int(back % 12 == 0) for back in range(120)}

    assert rate_of(quick, now_ms=NOW_MS).per_s == pytest.approx(20, rel=0.05)
    assert rate_of(slow, now_ms=NOW_MS).counted == 5
    assert rate_of(slow, now_ms=NOW_MS).per_s == pytest.approx(1 / 60, rel=0.1)


@given(
    st.dictionaries(st.integers(NOW_BUCKET - 200, NOW_BUCKET + 2), st.integers(0, 10**6)),
    st.integers(0, 10**6),
)
def test_a_rate_is_never_negative_or_infinite(per_bucket: dict[int, int], back_ms: int) -> None:
    rate = rate_of(per_bucket, now_ms=NOW_MS, since_ms=NOW_MS - back_ms)

    assert 0 <= rate.per_s <= sum(per_bucket.values())
    assert rate.missed >= 0
    assert rate.silent_s is None or rate.silent_s >= 0


# --- The servers' view ---------------------------------------------------------------------------


def test_the_mean_answer_counts_what_open_requests_have_generated() -> None:
    """A ramp: 10 short answers of 100 tokens are done, 90 requests have each generated 1,000."""
    ramp = group(
        in_flight=90, running=90, gen_tokens_per_s=900.0, ages_s=90 * 100.0, oldest_s=100.0
    )

    flow = flow_of(
        counts(completed=10, output_tokens=1_000), groups=[ramp], per_bucket={}, now_ms=NOW_MS
    )

    assert flow.open_tokens == 90_000
    assert flow.mean_tokens == pytest.approx((1_000 + 90_000) / 10)


def test_in_a_ramp_the_time_left_follows_the_servers() -> None:
    """8 GPUs at 1,180 tok/s after a change, 3,150 tokens an answer: 62 hours, whatever the client.

    The window still shows 1.7 answers a second, as the page of the born job did.
    """
    had = counts(
        total=653_929,
        completed=10_000,
        in_flight=576,
        queued=643_353,
        output_tokens=10_000 * 3_000,
    )
    groups = [
        group(
            group=f"gpu{number}@host",
            in_flight=72,
            running=72,
            gen_tokens_per_s=1_180.0,
            oldest_s=100.0,
            ages_s=72 * 50.0,
        )
        for number in range(8)
    ]
    slow = {NOW_BUCKET - back: 8 for back in range(120)}

    told = figures(had, groups=groups, per_bucket=slow)

    assert told["status"] == "ramping"
    assert told["eta_hours"] == pytest.approx(59, rel=0.1)
    assert told["eta_hours_low"] < told["eta_hours"] < told["eta_hours_high"]
    assert told["steady_in_sec"] > 60
    assert told["server_rate_per_sec"] == pytest.approx(3.0, rel=0.1)


def test_when_both_views_agree_it_is_no_ramp_though_all_requests_are_young() -> None:
    had = counts(completed=40, output_tokens=4_000)

    told = figures(had, groups=[group(gen_tokens_per_s=100.0, ages_s=5.0, oldest_s=1.0)])

    assert told["status"] == "running"


# --- The time left, and the rest -----------------------------------------------------------------


@pytest.mark.parametrize(
    "known",
    [
        {"groups": []},
        {"paused": "x"},
        {"redis_full": "x"},
        {"groups": [group(state="down")]},
        {"per_bucket": steady(silent_s=150)},
        {"lost": "x"},
    ],
)
def test_where_nothing_flows_nobody_knows_the_time_left(known: dict[str, Any]) -> None:
    assert figures(counts(), **known)["eta_hours"] is None


def test_where_nothing_is_left_it_takes_no_time() -> None:
    assert figures(DONE, groups=[], per_bucket={})["eta_hours"] == 0
    assert figures(Counts(), groups=[], per_bucket={})["eta_hours"] == 0


def test_all_figures_of_the_design_are_there() -> None:
    told = figures(counts())
    expected = (
        "total completed failed cancelled in_flight queued duplicates_dropped rate_per_sec "
        "eta_hours total_input_tokens total_output_tokens avg_output_tokens elapsed_hours "
        "s3_uploaded s3_bytes updated_at status retries truncated_share workers"
    )
    of_group = (
        "in_flight leased bound cap running queued gen_tokens_per_s kv_usage mamba_usage "
        "strategy server_version occupancy oldest_s"
    )

    assert set(expected.split()) <= told.keys()
    assert set(of_group.split()) <= told["worker_groups"][0].keys()
    assert msgspec.json.decode(msgspec.json.encode(told)) == told


def test_an_empty_run_has_no_figure_that_is_no_number() -> None:
    told = figures(Counts(), groups=[], per_bucket={})

    assert told["avg_output_tokens"] == 0
    assert told["rate_per_sec"] == 0
    assert "NaN" not in msgspec.json.encode(told).decode()


@pytest.mark.parametrize(("truncated", "warned"), [(10, False), (11, True)])
def test_many_cut_off_answers_are_warned_of(truncated: int, warned: bool) -> None:  # noqa: FBT001
    told = figures(counts(completed=50, truncated=truncated))

    assert told["truncated_share"] == truncated / 50
    assert any("length" in warning for warning in told["warnings"]) is warned


@pytest.mark.parametrize(
    ("limit", "own"),
    [
        ("mamba pool", {"mamba_usage": 0.95, "queued": 3}),
        ("KV pool", {"kv_usage": 0.97}),
        ("mamba pool", {"mamba_usage": 0.61, "running": 32, "cap": 32}),
        ("mamba pool", {"mamba_usage": 0.6, "running": 9, "cap": 9, "binds": "mamba pool"}),
        (None, {"mamba_usage": 0.61, "running": 32, "cap": 32, "binds": "requested"}),
        ("server queue", {"queued": 3, "running": 32, "cap": 32}),
        ("server queue", {"queued": 3}),
        ("prefill", {"queued": 3, "running": 8, "cap": 32}),
        ("client", {"occupancy": 0.5}),
        (None, {"occupancy": 0.99}),
    ],
)
def test_what_limits_a_run_is_named(limit: str | None, own: dict[str, Any]) -> None:
    assert figures(counts(), groups=[group(**own)])["limited_by"] == limit


FULL: dict[str, Any] = {
    "running": 32,
    "queued": 3,
    "cap": 32,
    "binds": "mamba pool",
    "strategy": "extra_buffer",
    "sizing": "32 requests at once: the mamba pool binds (160 states, 5 a request)",
    "advice": "no_radix gives about 149",
    "better": "no_radix",
}


def test_full_servers_that_could_hold_more_are_told_of_once_with_the_command() -> None:
    groups = [group(group=f"gpu{n}@h", **FULL) for n in range(3)]
    groups.append(group(group="gpu3@h", **FULL | {"running": 20, "queued": 0}))

    (warning,) = figures(counts(), groups=groups)["warnings"]
    assert warning == (
        "gpu0@h and 2 more: 32 requests at once: the mamba pool binds (160 states, 5 a request); "
        "no_radix gives about 149"
    )


@pytest.mark.parametrize(
    "own",
    [
        {"advice": ""},
        {"running": 31},
        {"queued": 0},
        {"state": "down"},
    ],
)
def test_servers_with_room_or_without_advice_are_not_told_of(own: dict[str, Any]) -> None:
    told = figures(counts(), groups=[group(**FULL | own), group()])

    assert not any("32 requests at once" in each for each in told["warnings"])


def test_one_odd_server_does_not_name_the_limit_of_all() -> None:
    groups = [group(kv_usage=0.99), group(), group()]

    assert figures(counts(), groups=groups)["limited_by"] is None
