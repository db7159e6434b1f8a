"""What binds a server's concurrency, and what each strategy would give instead."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.capacity.binding import pools_of
from workers.capacity.capacity import default_cap, kv_cap, states_per_request
from workers.capacity.diagnosis import before_launch, diagnose
from workers.capacity.model_shape import ModelShape
from workers.capacity.strategies import (
    Pools,
    Prompts,
    best_of,
    options_of,
    pool_bytes_of,
    pools_before_launch,
)
from workers.readings.facts import GIB, ServerFacts, facts_of_info, with_log
from workers.releases import STRATEGIES, Strategy, is_offered, release_or_newest, resolved

DATA = Path(__file__).parents[1] / "data" / "sglang"
RECORDED: dict[str, dict[str, Any]] = json.loads((DATA / "server_info.json").read_text())
LIMITED_LOG = (DATA / "0.5.23" / "mamba_limited_lines.txt").read_text()

QWEN3_NEXT = ModelShape(
    family="qwen3_next", recurrent=True, state_bytes=77_266_944, token_bytes=24_576
)
DENSE = ModelShape(family="qwen3", recurrent=False, state_bytes=0, token_bytes=147_456)
JOB = ServerFacts(
    version="0.5.12.post1",
    strategy="extra_buffer",
    recurrent=True,
    states=160,
    cap=32,
    kv_tokens=450_000,
    context_length=32_768,
    ratio=0.9,
)
"""A GPU of the job that Headrace was born from, as it began; 3,250 tokens a prompt and answer."""


TWO_STARTS = (
    "max_total_num_tokens=1, max_running_requests=9, context_len=1\n"
    "max_total_num_tokens=1, max_running_requests=49, context_len=1"
)


def facts(page: dict[str, Any]) -> ServerFacts:
    return facts_of_info(json.dumps(page).encode())


def slots(found: Any) -> dict[Strategy, int | None]:
    return {each.strategy: each.slots for each in found.options}


# --- States a request ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "told", "states"),
    [
        ("no_radix", {}, 1),
        ("no_buffer", {}, 3),
        ("no_buffer", {"skip_decode_lock": True}, 3),
        ("extra_buffer", {}, 5),
        ("extra_buffer", {"overlap": False}, 4),
        ("extra_buffer", {"skip_decode_lock": True}, 4),
        ("extra_buffer", {"skip_decode_lock": True, "version": "0.5.13"}, 5),
        ("extra_buffer_lazy", {}, 4),
        ("extra_buffer_lazy", {"skip_decode_lock": True}, 3),
        # Before 0.5.10 speculation decided, not the overlap scheduler.
        ("extra_buffer", {"overlap": False, "version": "0.5.9"}, 5),
        ("extra_buffer", {"speculative": True, "version": "0.5.9"}, 4),
        ("extra_buffer", {"speculative": True, "version": "0.5.10"}, 5),
    ],
)
def test_a_running_request_reserves_states_by_strategy_and_version(
    strategy: Strategy, told: dict[str, Any], states: int
) -> None:
    assert states_per_request(strategy, **told) == states


@pytest.mark.parametrize(
    ("told", "version", "overlap", "strategy"),
    [
        ("auto", "0.5.12.post1", True, "no_buffer"),
        ("auto", "0.5.13.post1", True, "no_buffer"),
        ("auto", "0.5.14", True, "extra_buffer"),
        ("auto", "0.5.23", False, "no_buffer"),
        ("extra_buffer_lazy", "0.5.23", True, "extra_buffer_lazy"),
        ("no_radix", "0.5.23", True, "no_radix"),
        ("something_new", "0.6.0", True, None),
        (None, "0.5.23", True, None),
    ],
)
def test_auto_means_another_strategy_since_0_5_14(
    told: str | None, version: str, *, overlap: bool, strategy: str | None
) -> None:
    assert resolved(told, version=version, overlap=overlap) == strategy


def test_a_strategy_is_offered_from_its_version_on() -> None:
    assert not is_offered("extra_buffer_lazy", "0.5.12.post1")
    assert is_offered("extra_buffer_lazy", "0.5.13.post1")
    assert not is_offered("no_buffer", "0.5.6.post2")
    assert all(is_offered(each, "") for each in STRATEGIES)
    assert is_offered("no_radix", "0.5.4")
    assert release_or_newest("0.5.12.post1") == (0, 5, 12)
    assert release_or_newest("main") > release_or_newest("0.9.9")


@pytest.mark.parametrize(
    ("asked", "version", "cap"),
    [
        (None, "0.5.23", 2_048),
        (None, "0.5.9", 2_048),
        (5_000, "0.5.9", 5_000),
        (5_000, "0.5.12.post1", 2_048),
        (5_000, "0.5.14", 5_000),
        (50, "0.5.12.post1", 50),
    ],
)
def test_what_is_asked_is_clipped_by_version(asked: int | None, version: str, cap: int) -> None:
    assert kv_cap(asked, kv_tokens=100_000, context_length=32_768, version=version) == cap


def test_the_default_lies_between_two_bounds_and_within_half_the_tokens() -> None:
    assert default_cap(16_384, 2_048) == 4_096
    assert default_cap(1_500, 2_048) == 750
    assert default_cap(1_500, 2_048, version="0.5.9") == 2_048
    assert kv_cap(10_000, kv_tokens=1_500, context_length=2_048) == 750
    assert kv_cap(None, kv_tokens=None, context_length=2_048) is None
    assert kv_cap(9, kv_tokens=None, context_length=None) == 9


# --- The job, and real servers -------------------------------------------------------------------


def test_the_job_with_extra_buffer_runs_32_and_the_states_bind() -> None:
    found = diagnose(JOB)

    assert (found.binds, found.per_request) == ("mamba pool", 5)
    assert slots(found) == {
        "no_buffer": 53,
        "extra_buffer": 32,
        "extra_buffer_lazy": 40,
        "no_radix": 160,
    }
    assert found.words == "32 requests at once: the mamba pool binds (160 states, 5 a request)"


def test_the_job_with_no_buffer_runs_72() -> None:
    changed = msgspec.structs.replace(JOB, strategy="no_buffer", states=216, cap=72)
    found = diagnose(changed, prompts=Prompts(tokens=3_250))

    assert slots(found)["no_buffer"] == 72
    assert (found.binds, found.per_request, found.fits) == ("mamba pool", 3, 138)


def test_on_its_own_memory_split_for_it_no_buffer_gives_what_it_gave() -> None:
    """72 were measured; SGLang had split the memory a little otherwise."""
    found = diagnose(JOB, shape=QWEN3_NEXT, prompts=Prompts(tokens=3_250))
    option = next(each for each in found.options if each.strategy == "no_buffer")

    assert (option.slots, option.resized, option.states) == (53, 75, 225)
    assert option.states == 3 * (option.resized or 0)


def test_independent_prompts_are_advised_to_do_without_the_prefix_cache_at_its_price() -> None:
    found = diagnose(JOB, shape=QWEN3_NEXT, prompts=Prompts(tokens=3_250, cached_share=0.0))

    assert found.advice.startswith("no_radix gives about 149 on the same memory (no_buffer 75)")
    assert "`workers restart --strategy no_radix -- --max-running-requests 149`" in found.advice
    assert "no prefix is found" in found.advice
    # The memory holds them: one state and 3,250 tokens each.
    memory = 160 * 77_266_944 + 450_000 * 24_576
    assert 149 * (77_266_944 + 3_250 * 24_576) <= memory < 150 * (77_266_944 + 3_250 * 24_576)


def test_prompts_that_share_prefixes_are_not_advised_to_do_without_the_cache() -> None:
    for prompts in (Prompts(tokens=3_250, cached_share=0.4), Prompts(tokens=3_250, shares=True)):
        found = diagnose(JOB, shape=QWEN3_NEXT, prompts=prompts)

        assert "no_radix" not in found.advice
        assert found.advice == (
            "about 50 would fit into the same memory, split otherwise: "
            "`workers restart -- --max-mamba-cache-size 250`"
        )


def test_the_real_servers_tell_what_they_are() -> None:
    old, new = facts(RECORDED["0.5.12.post1-hybrid"]), facts(RECORDED["0.5.23-hybrid"])

    for told in (old, new):
        assert (told.strategy, told.recurrent, told.overlap) == ("no_buffer", True, False)
        assert (told.states, told.cap, told.asked, told.kv_tokens) == (96, 32, 32, 16_384)
    assert (old.version, new.version) == ("0.5.12.post1", "0.5.23")
    found = diagnose(new)
    assert found.binds == "requested"
    assert slots(found)["no_buffer"] == 32
    assert found.words == (
        "32 requests at once: as many as --max-running-requests asks (96 states, 3 a request)"
    )


def test_a_real_dense_server_has_no_states_and_no_alternatives() -> None:
    told = facts(RECORDED["0.5.23-dense"])
    found = diagnose(told)

    assert told.recurrent is False
    assert (found.options, found.strategy, found.binds) == ([], None, "requested")
    assert "no_buffer" not in found.words


def test_the_real_server_with_twelve_states_is_diagnosed_in_words() -> None:
    """Of its log alone, and with its page."""
    from_log = with_log(ServerFacts(version="0.5.23", strategy="no_buffer"), LIMITED_LOG)
    page = json.loads(json.dumps(RECORDED["0.5.23-hybrid"]))
    page["internal_states"][0] |= {
        "effective_max_running_requests_per_dp": 4,
        "max_mamba_cache_size": 12,
    }
    assert (from_log.states, from_log.cap, from_log.kv_tokens) == (12, 4, 16_384)
    assert (from_log.context_length, from_log.recurrent) == (2_048, True)

    assert diagnose(from_log).words == (
        "4 requests at once: the mamba pool binds (12 states, 3 a request)"
    )
    found = diagnose(facts(page))
    assert found.words == (
        "4 requests at once: the mamba pool binds (12 states, 3 a request), 32 were asked for"
    )
    # The pool's size was asked for, and would stand.
    assert found.advice.startswith(
        "no_radix gives up to 12 on the same memory (extra_buffer 2, extra_buffer_lazy 3): "
        "`workers restart --strategy no_radix -- --max-running-requests 12 "
        "--max-mamba-cache-size 12`"
    )
    assert slots(found) == {
        "no_buffer": 4,
        "extra_buffer": 2,
        "extra_buffer_lazy": 3,
        "no_radix": 12,
    }


def test_a_log_tells_what_the_states_take_and_the_last_start_counts() -> None:
    log = (
        "Mamba Cache is allocated. max_mamba_cache_size: 47, conv_state size: 0.07GB, "
        "ssm_state size: 3.30GB \n"
        "max_total_num_tokens=399104, chunked_prefill_size=8192, max_prefill_tokens=16384, "
        "max_running_requests=9, context_len=262144, available_gpu_mem=9.80 GB\n"
    )
    found = with_log(ServerFacts(cap=8), log.replace("47", "11").replace("9,", "2,") + log)

    assert (found.states, found.kv_tokens, found.context_length) == (47, 399_104, 262_144)
    assert found.states_bytes == pytest.approx(3.37 * GIB)
    assert found.cap == 8  # what it says itself comes first
    assert with_log(ServerFacts(), "") == ServerFacts()


@pytest.mark.parametrize(
    ("log", "cap"),
    [
        ("max_total_num_tokens=1, max_running_requests=9, context_len=262144, available", 9),
        ("server_args=ServerArgs(max_running_requests=32, max_queued_requests=None)", None),
        (TWO_STARTS, 49),
        ("max_running_requests is capped to 4 by the mamba state cache (…)", 4),
        ("max_running_requests was reduced from the requested 32 to 9 (per dp worker)", 9),
        ("max_running_requests is capped to 4 by\nmax_total_num_tokens=9, …", 4),
        ("", None),
    ],
)
def test_the_cap_is_read_from_the_log_of_the_last_start(log: str, cap: int | None) -> None:
    assert with_log(ServerFacts(), log).cap == cap


# --- What else binds -----------------------------------------------------------------------------


def test_an_environment_that_frees_a_state_shows_in_the_cap() -> None:
    told = msgspec.structs.replace(JOB, version="0.5.23", cap=40)

    assert diagnose(told).per_request == 4
    assert diagnose(told).binds == "mamba pool"


def test_requests_too_long_for_the_kv_pool_are_said_to_bind() -> None:
    found = diagnose(JOB, prompts=Prompts(tokens=20_000))

    assert (found.binds, found.fits) == ("KV pool", 22)
    assert "the KV pool holds 22 at their 20,000 tokens" in found.words
    assert "--mem-fraction-static" in found.advice


@pytest.mark.parametrize(
    ("asked", "cap", "kv_tokens", "binds"),
    [
        (None, 4_096, 500_000, "default"),
        (64, 64, 500_000, "requested"),
        (900, 750, 1_500, "KV pool"),
        (900, 800, 500_000, "unknown"),
        (None, None, 500_000, "unknown"),
    ],
)
def test_what_binds_without_a_pool_of_states(
    asked: int | None, cap: int | None, kv_tokens: int, binds: str
) -> None:
    told = ServerFacts(
        version="0.5.23",
        recurrent=False,
        asked=asked,
        cap=cap,
        kv_tokens=kv_tokens,
        context_length=32_768,
    )
    assert diagnose(told).binds == binds


def test_a_number_that_was_asked_for_below_what_fits_is_named_first() -> None:
    told = msgspec.structs.replace(JOB, asked=16, cap=16)
    found = diagnose(told)

    assert found.binds == "requested"
    assert found.advice == (
        "its memory holds up to 32, ask for more: `workers restart -- --max-running-requests 32`"
    )


def test_slots_beyond_the_captured_graphs_are_warned_of() -> None:
    told = msgspec.structs.replace(JOB, graph_cap=128)

    assert "above 128 it decodes without captured graphs" in diagnose(told).advice
    # A limit that was lowered to what was asked rises with what is asked.
    asked = msgspec.structs.replace(JOB, graph_cap=32, asked=48)
    assert "captured graphs" not in diagnose(asked).advice


def test_a_states_size_is_taken_from_the_ratio_where_sglang_split_the_memory() -> None:
    kv_bytes = 450_000 * 24_576
    pools = pools_of(msgspec.structs.replace(JOB, kv_bytes=kv_bytes), None)

    assert pools.token_bytes == 24_576
    assert pools.state_bytes == pytest.approx(0.9 * kv_bytes / 160)
    explicit = msgspec.structs.replace(JOB, kv_bytes=kv_bytes, asked_states=160)
    assert pools_of(explicit, None).state_bytes is None
    from_log = msgspec.structs.replace(explicit, states_bytes=160 * 70e6)
    assert pools_of(from_log, None).state_bytes == 70e6


def test_what_a_server_says_of_its_pools_counts_where_config_json_says_something_else() -> None:
    """Weights that bring their own type of KV, which --kv-cache-dtype auto takes."""
    half = msgspec.structs.replace(JOB, kv_bytes=450_000 * 12_288.0)
    assert pools_of(half, QWEN3_NEXT).token_bytes == 12_288
    alike = msgspec.structs.replace(JOB, kv_bytes=450_000 * 24_576 * 1.04)
    assert pools_of(alike, QWEN3_NEXT).token_bytes == 24_576
    # A tiny pool's size is mostly rounding.
    tiny = msgspec.structs.replace(JOB, kv_bytes=4e6)
    assert pools_of(tiny, QWEN3_NEXT).token_bytes == 24_576
    bfloat16 = msgspec.structs.replace(JOB, states_bytes=160 * 39_518_208.0)
    assert pools_of(bfloat16, QWEN3_NEXT).state_bytes == 39_518_208


def test_with_speculative_decoding_only_the_pool_as_it_is_split_is_known() -> None:
    found = diagnose(
        msgspec.structs.replace(JOB, speculative=True, version="0.5.23"),
        shape=QWEN3_NEXT,
        prompts=Prompts(tokens=3_250),
    )
    assert {each.strategy: each.most for each in found.options} == {
        "no_buffer": 53,
        "extra_buffer": 32,
        "extra_buffer_lazy": 40,
        "no_radix": 138,
    }


def test_a_server_without_radix_cache_is_told_what_its_memory_holds() -> None:
    told = msgspec.structs.replace(JOB, strategy="no_radix", states=100, asked=100, cap=100)
    found = diagnose(told, shape=QWEN3_NEXT, prompts=Prompts(tokens=3_250))

    assert (found.binds, found.per_request) == ("requested", 1)
    assert found.advice == ""  # about 119: no gain that is worth a restart
    fuller = msgspec.structs.replace(told, states=60, asked=60, cap=60)
    assert diagnose(fuller, shape=QWEN3_NEXT, prompts=Prompts(tokens=3_250)).advice == (
        "its memory holds about 99, ask for more: `workers restart -- --max-running-requests 99`"
    )


def test_a_pool_whose_size_was_asked_for_is_said_to_bind_without_radix_cache_too() -> None:
    """As `workers restart --strategy no_radix` leaves it, where its size stood in the flags."""
    told = msgspec.structs.replace(
        JOB, strategy="no_radix", states=60, asked_states=60, asked=100, cap=60
    )
    found = diagnose(told, shape=QWEN3_NEXT, prompts=Prompts(tokens=3_250))

    assert found.binds == "mamba pool"
    assert found.advice == (
        "about 99 would fit into the same memory, split otherwise: "
        "`workers restart -- --max-running-requests 99 --max-mamba-cache-size 99`"
    )


# --- Before a launch -----------------------------------------------------------------------------


def test_best_is_the_strategy_with_most_slots_in_words() -> None:
    choice = before_launch(QWEN3_NEXT, version="0.5.23", prompts=Prompts(tokens=3_250))

    assert (choice.strategy, choice.slots) == ("no_radix", None)
    assert choice.words.startswith(
        "no_radix: 1 state a running request, instead of no_buffer 3, extra_buffer 5, "
        "extra_buffer_lazy 4"
    )
    assert "no prefix is found" in choice.words


def test_best_says_how_many_where_the_gpu_is_known() -> None:
    choice = before_launch(
        QWEN3_NEXT, version="0.5.23", prompts=Prompts(tokens=3_250), pool_bytes=22e9
    )

    assert (choice.strategy, choice.slots) == ("no_radix", 139)
    assert "about 139 requests at once" in choice.words


@pytest.mark.parametrize(
    ("version", "strategy"), [("0.5.23", "extra_buffer_lazy"), ("0.5.12.post1", "extra_buffer")]
)
def test_best_for_prompts_that_share_prefixes_finds_them(version: str, strategy: str) -> None:
    choice = before_launch(QWEN3_NEXT, version=version, prompts=Prompts(shares=True))

    assert choice.strategy == strategy


def test_best_of_a_model_without_states_gives_no_strategy() -> None:
    assert before_launch(DENSE).strategy is None
    assert "no states" in before_launch(DENSE).words


def test_best_of_a_model_that_cannot_be_told_is_left_to_sglang_and_says_why() -> None:
    unknown = ModelShape(
        family="", recurrent=None, state_bytes=None, token_bytes=None, why_not="no config.json"
    )
    choice = before_launch(unknown)

    assert choice.strategy is None
    assert "no config.json" in choice.words
    hidden = msgspec.structs.replace(unknown, recurrent=True, why_not="of an unknown family")
    assert before_launch(hidden).strategy == "no_radix"
    assert "of an unknown family" in before_launch(hidden).words


def test_a_memory_is_split_as_sglang_splits_it() -> None:
    pools = pools_before_launch(pool_bytes=19e9, state_bytes=100_000_000, token_bytes=20_000)

    assert (pools.states, pools.kv_tokens) == (90, 500_000)
    assert pool_bytes_of(80e9, 40e9) == 30e9
    assert pool_bytes_of(80e9, 40e9, mem_fraction=0.9) == 32e9
    assert pool_bytes_of(24e9, 24e9) is None
    assert pool_bytes_of(48e9, 10e9) == pytest.approx(32.24e9)


# --- What must hold for all ----------------------------------------------------------------------


@given(
    states=st.integers(1, 5_000),
    kv_tokens=st.integers(1, 5_000_000),
    state_bytes=st.integers(1, 1_000_000_000),
    token_bytes=st.integers(1, 1_000_000),
    tokens=st.floats(1, 200_000),
    shares=st.booleans(),
)
def test_no_option_needs_more_memory_than_there_is(
    states: int, kv_tokens: int, state_bytes: int, token_bytes: int, tokens: float, *, shares: bool
) -> None:
    pools = Pools(
        states=states, kv_tokens=kv_tokens, state_bytes=state_bytes, token_bytes=token_bytes
    )
    options = options_of(pools, tokens=tokens)
    memory = pools.memory_bytes
    assert memory is not None
    for option in options:
        assert option.slots is not None
        needs = option.per_request * state_bytes + tokens * token_bytes
        assert option.slots * needs <= memory * 1.000001
        assert (option.resized or 0) * needs <= memory * 1.000001
    best = best_of(options, Prompts(shares=shares))
    assert shares is (best.strategy.startswith("extra"))


@given(
    page=st.dictionaries(
        st.sampled_from(sorted(RECORDED["0.5.23-hybrid"])),
        st.none() | st.integers() | st.text(max_size=5) | st.booleans(),
    )
)
def test_any_page_is_read_or_refused_with_a_value_error(page: dict[str, Any]) -> None:
    body = json.dumps(RECORDED["0.5.23-hybrid"] | page).encode()
    try:
        told = facts_of_info(body)
    except ValueError:
        return
    diagnose(told, shape=QWEN3_NEXT, prompts=Prompts(tokens=100))
