"""What a request costs in memory, worked out of config.json.

The figures expected are those that SGLang 0.5.23's own classes gave for the same members.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from workers.capacity.model_files import shape_at, weights_bytes
from workers.capacity.model_shape import shape_of

QWEN3_NEXT: dict[str, Any] = {
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
    "dtype": "bfloat16",
}
TINY = {
    **QWEN3_NEXT,
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "head_dim": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
NEMOTRON_H: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_hidden_layers": 52,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
}
FALCON_H1: dict[str, Any] = {
    "model_type": "falcon_h1",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
}
GRANITE: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba"] * 36 + ["attention"] * 4,
    "num_hidden_layers": 40,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "mamba_expand": 2,
    "mamba_n_heads": 64,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
}


@pytest.mark.parametrize(
    ("config", "tp", "state_bytes", "token_bytes"),
    [
        (QWEN3_NEXT, 1, 77_266_944, 24_576),
        (QWEN3_NEXT, 2, 38_633_472, 12_288),
        # Two KV heads for four GPUs: each keeps one.
        (QWEN3_NEXT, 4, 19_316_736, 12_288),
        ({**QWEN3_NEXT, "mamba_ssm_dtype": "bfloat16"}, 1, 39_518_208, 24_576),
        (
            {**QWEN3_NEXT, "num_hidden_layers": 40, "linear_num_value_heads": 64},
            1,
            128_040_960,
            20_480,
        ),
        (FALCON_H1, 1, 33_849_344, 131_072),
        (FALCON_H1, 4, 8_536_064, 32_768),
    ],
)
def test_a_state_and_a_token_take_what_sglang_says(
    config: dict[str, Any], tp: int, state_bytes: int, token_bytes: int
) -> None:
    shape = shape_of(config, tp=tp)

    assert (shape.recurrent, shape.why_not) == (True, "")
    assert (shape.state_bytes, shape.token_bytes) == (state_bytes, token_bytes)


def test_the_arithmetic_is_that_of_a_state_in_words() -> None:
    """36 layers of 32 heads of 128 by 128 in float32, and a window of 3 over 8,192 channels."""
    assert shape_of(QWEN3_NEXT).state_bytes == 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
    # 24 recurrent layers, of which each pattern letter M is one; 4 that attend.
    assert shape_of(NEMOTRON_H).state_bytes == 24 * (128 * 64 * 128 * 4 + (8192 + 2048) * 3 * 2)
    assert shape_of(NEMOTRON_H).token_bytes == 4 * 8 * 256 * 2
    assert shape_of(GRANITE).state_bytes == 36 * (64 * 64 * 128 * 4 + (4096 + 256) * 3 * 2)
    assert shape_of(GRANITE).token_bytes == 4 * 8 * (64 + 64) * 2


def test_a_models_text_part_may_be_nested() -> None:
    nested = {
        "model_type": "qwen3_5",
        "text_config": {**QWEN3_NEXT, "model_type": "qwen3_5_text"},
        "vision_config": {"num_hidden_layers": 27},
    }

    assert shape_of(nested).state_bytes == 77_266_944
    assert shape_of(nested).family == "qwen3_5"


def test_layers_may_be_listed_one_by_one() -> None:
    listed = {name: value for name, value in TINY.items() if name != "full_attention_interval"}
    listed["layer_types"] = ["linear_attention"] * 3 + ["full_attention"]

    assert shape_of(listed) == shape_of(TINY)


def test_the_launch_decides_the_types() -> None:
    half = shape_of(QWEN3_NEXT, ssm_dtype="bfloat16", kv_dtype="fp8_e4m3")

    assert (half.state_bytes, half.token_bytes) == (39_518_208, 12_288)
    assert shape_of(QWEN3_NEXT, kv_dtype="auto").token_bytes == 24_576


def test_a_model_without_recurrent_layers_keeps_no_states() -> None:
    dense = {
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    }
    shape = shape_of(dense)

    assert (shape.recurrent, shape.state_bytes) == (False, 0)
    assert shape.token_bytes == 36 * 8 * 256 * 2


@pytest.mark.parametrize(
    ("config", "recurrent", "says"),
    [
        ({"model_type": "kimi_linear", "linear_attn_config": {}}, True, "lays out its states"),
        ({"model_type": "bamba", "mamba_d_state": 128}, True, "lays out its states"),
        ({"model_type": "qwen3_next", "num_hidden_layers": 48}, None, "lacks what is needed"),
        ({}, None, "lacks what is needed"),
        ({**QWEN3_NEXT, "num_attention_heads": 0, "head_dim": 0}, True, "lacks what is needed"),
        (
            {"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512},
            False,
            "MLA",
        ),
        (
            {
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            False,
            "window",
        ),
        ({**QWEN3_NEXT, "dtype": "int3"}, True, "int3"),
    ],
)
def test_what_cannot_be_told_is_said_and_never_guessed(
    config: dict[str, Any], *, recurrent: bool | None, says: str
) -> None:
    shape = shape_of(config)

    assert shape.recurrent is recurrent
    assert None in {shape.state_bytes, shape.token_bytes}
    assert says in shape.why_not


# --- On this machine -----------------------------------------------------------------------------


def test_a_models_files_are_found_in_a_directory_and_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub" / "models--Owner--Name"
    folder = cached / "snapshots" / "abc"
    for each in (tmp_path / "model", folder, cached / "refs"):
        each.mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc\n")
    for each in (tmp_path / "model", folder):
        (each / "config.json").write_text(json.dumps(QWEN3_NEXT))
        for number in (1, 2):
            (each / f"model-{number}.safetensors").write_bytes(b"x" * 500)

    for model in (str(tmp_path / "model"), "Owner/Name"):
        assert shape_at(model, tp=2).state_bytes == 38_633_472
        assert weights_bytes(model) == 1_000
    assert weights_bytes("Owner/Other") is None


@pytest.mark.parametrize("text", ["", "[]", "{", "\udcff"])
def test_a_config_that_cannot_be_read_says_so(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    shape = shape_at(str(tmp_path))

    assert (shape.recurrent, shape.state_bytes) == (None, None)
    assert str(tmp_path) in shape.why_not


def test_a_model_that_is_not_here_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for model in (None, "", "Owner/Name", "/no/such/place"):
        assert shape_at(model).recurrent is None
        assert "no config.json" in shape_at(model).why_not
