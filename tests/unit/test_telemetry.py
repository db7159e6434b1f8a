"""A sample as Redis holds it, as the store does, and how small it stays whatever it is made of."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.group_figures import GroupFigures
from common.telemetry import (
    MOST_RUNS,
    MOST_SAMPLE_BYTES,
    ServerCounters,
    decode,
    encode,
    end_of,
    object_name,
    row_of,
    sample_of,
)

UID = "0123456789abcdef0123456789abcdef"
FIGURES = GroupFigures(
    group="gpu0@host",
    epoch="a1b2c3d4e5f6",
    host="host",
    pid=7,
    server="http://host:30000",
    state="ready",
    in_flight=72,
    leased=80,
    bound=79,
    cap=72,
    running=71,
    queued=1,
    gen_tokens_per_s=1180.04,
    kv_usage=0.4712,
    mamba_usage=0.65,
    retracted=2,
    cached_share=0.123456,
    told_s=1.5,
    strategy="no_buffer",
    server_version="0.5.23",
    completed=1234,
)
COUNTERS = ServerCounters(
    gen_tokens_total=123_456_789.0,
    prompt_tokens_total=4_000_000.0,
    cached_tokens_total=500.0,
    retracted_total=2.0,
    prefill_tokens_per_s=99.96,
    counted_by="metrics",
)


def test_a_row_says_all_that_was_known_at_its_instant() -> None:
    sample = decode(encode(sample_of(FIGURES, COUNTERS, runs={UID: 70}, dropped=3)))
    row = row_of(sample, at_ms=1_793_361_600_123, group="gpu0@host", uid=UID)

    assert msgspec.to_builtins(row) == {
        "at": "2026-10-30T12:00:00.123Z", "at_ms": 1_793_361_600_123,
        "group": "gpu0@host", "epoch": "a1b2c3d4e5f6", "server": "http://host:30000",
        "state": "ready", "strategy": "no_buffer", "version": "0.5.23",
        "of_run": 70, "in_flight": 72, "leased": 80, "bound": 79, "cap": 72, "completed": 1234,
        "running": 71, "queued": 1, "gen_tokens_per_s": 1180.0, "prefill_tokens_per_s": 100.0,
        "kv_usage": 0.4712, "mamba_usage": 0.65, "cached_share": 0.1235,
        "gen_tokens_total": 123_456_789, "prompt_tokens_total": 4_000_000,
        "cached_tokens_total": 500, "retracted_total": 2, "counted_by": "metrics",
        "told_s": 1.5, "dropped": 3,
    }  # fmt: skip
    assert len(encode(sample)) < 160


def test_what_nobody_told_stays_nothing() -> None:
    silent = GroupFigures(group="g", epoch="e", host="h", pid=1, server="s", state="waiting")
    sample = decode(encode(sample_of(silent, ServerCounters(), runs={UID: 0}, dropped=0)))
    row = row_of(sample, at_ms=0, group="g", uid=UID)

    told = {name: value for name, value in msgspec.to_builtins(row).items() if value is not None}
    assert set(told) == {
        *("at", "at_ms", "group", "epoch", "server", "state", "of_run", "in_flight", "leased"),
        *("bound", "completed", "counted_by", "dropped"),
    }


def test_a_sample_without_a_prompt_of_the_run_is_no_row_of_it() -> None:
    sample = sample_of(FIGURES, COUNTERS, runs={UID: 1}, dropped=0)

    assert row_of(sample, at_ms=1, group="g", uid="f" * 32) is None
    assert row_of(sample, at_ms=1, group="g", uid=UID) is not None


def test_of_many_runs_those_with_the_most_requests_are_named() -> None:
    runs = {f"{n:032x}": n for n in range(100)} | {f"{n:x}" * 32: n for n in range(1, 10)}
    sample = sample_of(FIGURES, COUNTERS, runs=runs, dropped=0)

    assert len(sample.runs) <= MOST_RUNS
    assert min(sample.runs.values()) > 90


numbers = st.none() | st.floats() | st.floats(0, 1e30) | st.integers(0, 2**70)


@given(
    text=st.text(max_size=300),
    number=numbers,
    share=numbers,
    runs=st.dictionaries(st.text(max_size=40), st.integers(0, 2**70), max_size=20),
)
def test_no_text_and_no_figure_makes_a_sample_large_or_unreadable(
    text: str, number: float | None, share: float | None, runs: dict[str, int]
) -> None:
    figures = msgspec.structs.replace(
        FIGURES,
        epoch=text,
        server=text,
        state=text,
        strategy=text,
        server_version=text,
        gen_tokens_per_s=number,
        kv_usage=share,
        cached_share=share,
        told_s=number,
        in_flight=2**32,
        leased=2**32,
        bound=2**32,
        completed=2**60,
    )
    counters = ServerCounters(
        gen_tokens_total=number, prefill_tokens_per_s=number, counted_by="metrics"
    )
    data = encode(sample_of(figures, counters, runs=runs, dropped=2**60))

    assert len(data) <= MOST_SAMPLE_BYTES
    for uid in decode(data).runs:
        row = row_of(decode(data), at_ms=1, group="g", uid=uid)
        assert row is not None
        assert all(
            math.isfinite(value)
            for value in msgspec.to_builtins(row).values()
            if isinstance(value, float)
        )


def test_a_later_versions_sample_is_read_as_far_as_it_is_known() -> None:
    sample = sample_of(FIGURES, COUNTERS, runs={}, dropped=3)
    later = [*msgspec.to_builtins(sample), "something new"]

    assert decode(msgspec.msgpack.encode(later)) == sample
    with pytest.raises(msgspec.MsgspecError):
        decode(msgspec.msgpack.encode(later[:3]))


def test_an_objects_name_says_which_time_it_holds() -> None:
    name = object_name(1_793_361_600_000, 1_793_361_900_000, "0123456789abcdef")

    assert name == "telemetry/20261030T120000Z-20261030T120500Z-0123456789abcdef.jsonl.zst"
    assert end_of(name) == 1_793_361_900_000
    assert end_of("telemetry/20261030T120000Z-20269930T120500Z-0123456789abcdef.jsonl.zst") is None
    assert end_of("telemetry/notes.txt") is None
