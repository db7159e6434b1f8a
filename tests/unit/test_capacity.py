"""The bound of a server, and what is read from its own pages."""

import json
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.capacity.capacity import DEFAULT_CAP, backlog_of, bound_of
from workers.readings.loads import (
    ServerLoad,
    combined,
    load_of_get_load,
    load_of_info,
    load_of_loads,
    read_identity,
)
from workers.readings.metrics_page import load_of_metrics

RECORDED = Path(__file__).parents[1] / "data" / "sglang_errors" / "pages.json"
PAGES = {
    version: {path: body.encode() for path, body in pages.items()}
    for version, pages in json.loads(RECORDED.read_text()).items()
}
NEW, OLD = PAGES["0.5.23"], PAGES["0.5.12.post1"]


@pytest.mark.parametrize(
    ("concurrency", "cap", "bound"),
    [
        ("auto", 72, 79),
        ("auto", 32, 35),
        ("auto", 9, 11),
        ("auto", 1, 3),
        ("auto", None, DEFAULT_CAP + 3),
        (64, 72, 64),
        (79, 72, 79),
        (100, 72, 79),
        (1, 72, 1),
        (500, None, 500),
    ],
)
def test_the_bound_is_the_cap_and_a_small_backlog_never_more_than_asked(
    concurrency: int | Literal["auto"], cap: int | None, bound: int
) -> None:
    assert bound_of(concurrency, cap) == bound


@given(concurrency=st.integers(1, 5_000), cap=st.none() | st.integers(0, 5_000))
def test_an_explicit_number_is_never_exceeded(concurrency: int, cap: int | None) -> None:
    assert 1 <= bound_of(concurrency, cap) <= concurrency


@given(cap=st.integers(1, 10_000))
def test_the_backlog_is_a_tenth_of_the_cap_or_two(cap: int) -> None:
    assert backlog_of(cap) == max(2, cap // 10)
    assert bound_of("auto", cap) == cap + backlog_of(cap)


@pytest.mark.parametrize("concurrency", [0, -1])
def test_a_bound_below_one_is_refused(concurrency: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        bound_of(concurrency, 32)


def test_a_loads_page_tells_running_queued_and_the_effective_cap() -> None:
    load = load_of_loads(NEW["/v1/loads busy"])

    assert (load.running, load.queued, load.cap) == (1, 1, 8)
    assert load.token_usage == 0.3687
    assert load.gen_tokens_total == 5268
    assert load.counted_by == "loads"


def test_data_parallel_ranks_are_summed() -> None:
    page = json.loads(NEW["/v1/loads busy"])
    page["loads"] *= 2
    load = load_of_loads(json.dumps(page).encode())

    assert (load.running, load.queued, load.cap) == (2, 2, 16)
    assert load.token_usage == 0.3687


def test_a_loads_page_before_the_counters_has_no_totals() -> None:
    page = {"loads": [{"num_running_reqs": 3, "num_waiting_reqs": 1, "max_running_requests": 9}]}
    load = load_of_loads(json.dumps(page).encode())

    assert (load.running, load.queued, load.cap, load.counted_by) == (3, 1, 9, "")


def test_a_metrics_page_tells_the_mamba_pool_and_the_tokens() -> None:
    load = load_of_metrics(OLD["/metrics"])

    assert (load.running, load.queued, load.cap) == (29, 0, None)
    assert load.token_usage == 0.7283935546875
    assert load.mamba_usage == 0.6041666666666666
    assert load.gen_tokens_total == 9737
    assert load.prompt_tokens_total == 49512


def test_other_ranks_and_priorities_do_not_count_twice() -> None:
    page = (
        b'sglang:num_running_reqs{tp_rank="0",dp_rank="0"} 3.0\n'
        b'sglang:num_running_reqs{tp_rank="1",dp_rank="0"} 3.0\n'
        b'sglang:num_running_reqs{tp_rank="0",dp_rank="1"} 4.0\n'
        b'sglang:num_running_reqs{tp_rank="0",dp_rank="1",priority="5"} 4.0\n'
        b'sglang:token_usage{tp_rank="0",dp_rank="0",model_name="a\\"}b"} 0.2\n'
        b'sglang:token_usage{tp_rank="0",dp_rank="1"} 0.4\n'
    )
    load = load_of_metrics(page)

    assert load.running == 7
    assert load.token_usage == 0.4


def test_the_info_page_tells_the_effective_cap_not_what_was_asked() -> None:
    info = json.loads(NEW["/server_info"])
    info["internal_states"][0]["effective_max_running_requests_per_dp"] = 9

    assert load_of_info(json.dumps(info).encode()).cap == 9
    assert load_of_info(b'{"max_running_requests":32}').cap is None


def test_the_oldest_page_counts_what_waits_among_all() -> None:
    load = load_of_get_load(b'[{"dp_rank":0,"num_reqs":12,"num_waiting_reqs":3}]')

    assert (load.running, load.queued) == (9, 3)


@pytest.mark.parametrize(
    ("read", "page"),
    [
        (load_of_loads, b"Internal Server Error"),
        (load_of_loads, b'{"loads":[]}'),
        (load_of_metrics, b"<html></html>"),
        (load_of_info, b"[]"),
        (load_of_get_load, b"{}"),
    ],
)
def test_what_is_no_such_page_is_a_value_error(read: object, page: bytes) -> None:
    assert callable(read)
    with pytest.raises(ValueError):  # noqa: PT011 - ours or msgspec's
        read(page)


def test_pages_are_combined_each_figure_from_the_first_that_has_it() -> None:
    loads = ServerLoad(
        running=5, queued=0, cap=9, gen_tokens_total=10, prompt_tokens_total=1, counted_by="loads"
    )
    metrics = ServerLoad(
        running=4,
        mamba_usage=0.6,
        gen_tokens_total=11,
        prompt_tokens_total=2,
        counted_by="metrics",
    )
    info = ServerLoad(cap=8, gen_throughput=100.0)

    found = combined([loads, metrics, info])

    assert found == ServerLoad(
        running=5,
        queued=0,
        cap=9,
        mamba_usage=0.6,
        gen_throughput=100.0,
        gen_tokens_total=11,
        prompt_tokens_total=2,
        counted_by="metrics",
    )
    assert combined([loads, info]).gen_tokens_total == 10
    assert combined([info]).counted_by == ""


def test_progress_is_seen_only_between_readings_of_one_page() -> None:
    def load(tokens: int, by: str = "metrics") -> ServerLoad:
        return ServerLoad(gen_tokens_total=tokens, counted_by=by)

    assert load(11).moved_since(load(10))
    assert not load(10).moved_since(load(10))
    assert not load(3).moved_since(load(10))
    assert not load(11).moved_since(load(10, "loads"))
    assert not ServerLoad().moved_since(ServerLoad())


@pytest.mark.parametrize(("pages", "version"), [(NEW, "0.5.23"), (OLD, "0.5.12.post1")])
def test_a_server_says_who_it_is(pages: dict[str, bytes], version: str) -> None:
    identity = read_identity(pages["/v1/models"], pages["/server_info"])

    assert identity.version == version
    assert identity.model_path == "models/tiny-qwen3next"
    assert identity.strategy == "no_buffer"
    assert (identity.cap, identity.context_length) == (32, 2048)
    assert identity.sampling_defaults == "model null"


@pytest.mark.parametrize(
    ("member", "value", "differs"),
    [
        ("chat_template", "other.jinja", "template_hash"),
        ("default_chat_template_kwargs", {"enable_thinking": False}, "template_hash"),
        ("reasoning_parser", "qwen3", "reasoning_parser"),
        ("preferred_sampling_params", {"top_k": 20}, "sampling_defaults"),
        ("disable_radix_cache", True, "strategy"),
        ("model_path", "models/other", "model_path"),
    ],
)
def test_a_server_that_answers_otherwise_differs(member: str, value: object, differs: str) -> None:
    info = json.loads(NEW["/server_info"])
    mine = read_identity(NEW["/v1/models"], json.dumps(info).encode())
    info[member] = value
    other = read_identity(NEW["/v1/models"], json.dumps(info).encode())

    assert getattr(mine, differs) != getattr(other, differs)


def test_a_server_without_a_model_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="no model"):
        read_identity(b'{"data":[]}', None)
