"""What a worker group tells of its server's room."""

import json
from pathlib import Path

import msgspec
import pytest

from tests.support.server_process import wait_until
from workers.capacity.diagnosis import Diagnosis
from workers.engine.sizing import SETTLED, Sizing
from workers.readings.facts import ServerFacts
from workers.readings.loads import ServerLoad

QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def facts(**own: object) -> ServerFacts:
    known = {
        "version": "0.5.12.post1",
        "strategy": "extra_buffer",
        "recurrent": True,
        "states": 160,
        "cap": 32,
        "kv_tokens": 450_000,
    }
    return ServerFacts(**known | own)  # type: ignore[arg-type]


def full(**own: object) -> ServerLoad:
    # 32 requests of 3,250 tokens.
    return ServerLoad(**{"running": 32, "queued": 3, "token_usage": 0.2311} | own)  # type: ignore[arg-type]


def seen_long(sizing: Sizing, told: ServerFacts, load: ServerLoad) -> Diagnosis:
    """What it says when a load has stood for a while."""
    again = [msgspec.structs.replace(load) for _ in range(SETTLED + 1)]
    found = [sizing.diagnosis(told, each) for each in again]
    assert found[-1] is not None
    return found[-1]


def test_a_requests_tokens_are_measured_while_the_server_is_full_and_the_largest_counts() -> None:
    sizing = Sizing()
    few = seen_long(sizing, facts(), full(running=10, token_usage=0.9))
    assert few.fits is None  # so few hold what nobody can tell

    sizing.diagnosis(facts(), full())
    later = seen_long(sizing, facts(), full(token_usage=0.1))
    assert later.fits == 138
    assert later.better == "no_radix"


def test_one_reading_counts_once_however_often_it_is_asked_for() -> None:
    sizing, load = Sizing(), full()
    found = [sizing.diagnosis(facts(), load) for _ in range(5 * SETTLED)]
    assert {each and each.fits for each in found} == {None}


def test_while_a_ramp_goes_on_nothing_is_measured() -> None:
    sizing = Sizing()
    for step in range(1, 60):
        found = sizing.diagnosis(facts(), full(token_usage=step / 300))
        assert found is not None
        assert found.fits is None
        assert found.advice.startswith("no_radix gives up to 160")


def test_the_models_own_config_makes_it_exact(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_NEXT))
    sizing, told = Sizing(), facts(model_path=str(tmp_path))

    def advises(slots: str) -> bool:
        return slots in seen_long(sizing, told, full()).advice

    wait_until(lambda: advises("no_radix gives about 149"), "config.json to be read", 60)


def test_another_launch_is_measured_anew() -> None:
    sizing = Sizing()
    assert seen_long(sizing, facts(), full()).fits == 138
    changed = facts(strategy="no_buffer", states=216, cap=72)

    found = sizing.diagnosis(changed, ServerLoad(running=32, token_usage=0.23))
    assert found is not None
    assert (found.fits, found.per_request, found.cap) == (None, 3, 72)


@pytest.mark.parametrize(
    ("cached", "better"), [(0.0, "no_radix"), (60.0, None), (None, "no_radix")]
)
def test_prompts_found_in_the_cache_argue_for_keeping_it(
    cached: float | None, better: str | None
) -> None:
    load = full(prompt_tokens_total=100.0, cached_tokens_total=cached)
    found = Sizing().diagnosis(facts(), load)

    assert found is not None
    assert found.better == better


def test_figures_of_several_ranks_are_those_of_one() -> None:
    sizing = Sizing()
    both = full(running=64, cap=64, token_usage=0.2311)
    found = seen_long(sizing, facts(ranks=2), both)
    assert (found.cap, found.binds, found.fits) == (32, "mamba pool", 138)


def test_a_server_that_has_said_nothing_is_not_judged() -> None:
    assert Sizing().diagnosis(None, None) is None
    found = Sizing().diagnosis(facts(), None)
    assert found is not None
    assert found.binds == "mamba pool"
