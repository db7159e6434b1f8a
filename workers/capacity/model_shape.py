"""Work out of a model's config.json what a request costs in memory: a state, a token. Pure.

Two pools share a GPU's memory beside the weights. A recurrent layer (Gated DeltaNet, Mamba-2)
keeps one state a request, whatever its length; an attention layer keeps a key and a value a token.
A hybrid model has both, so that the one pool may be full while the other is nearly empty.

    state   layers * (heads * head_dim * state_size * bytes of the SSM type
                      + conv channels * (kernel - 1) * bytes of the convolution's type)
    token   attention layers * KV heads * (head_dim + value head_dim) * bytes of the KV type

each of one GPU's part: heads are split over tensor parallelism. What cannot be told (attention
with a sliding window, compressed KV, families whose states are laid out otherwise) is None and
never guessed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "bf16": 2, "fp8_e5m2": 1, "fp8_e4m3": 1}
_CONV_BYTES = 2
"""The convolution's state is bfloat16 unless an environment variable says otherwise."""

Config = Mapping[str, Any]


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's requests cost, of one GPU's memory.

    Attributes:
        family: `model_type` of its config.json; empty when it has none.
        recurrent: Whether it has layers with states; None when that cannot be told.
        state_bytes: Of one state over all recurrent layers; 0 without any, None: cannot be told.
        token_bytes: Of one token over all attention layers, key and value; None: cannot be told.
        why_not: Why a figure cannot be told, for people; empty when all can.
    """

    family: str
    recurrent: bool | None
    state_bytes: int | None
    token_bytes: int | None
    why_not: str = ""


class _Recurrent(msgspec.Struct, frozen=True):
    layers: int
    heads: int
    head_dim: int
    state_size: int
    groups: int
    kernel: int
    intermediate: int


def shape_of(
    config: Config, *, tp: int = 1, ssm_dtype: str | None = None, kv_dtype: str | None = None
) -> ModelShape:
    """Work out what a model's requests cost.

    Args:
        config: Its config.json; text members may lie in `text_config` or `llm_config`.
        tp: GPUs that one server spans.
        ssm_dtype: --mamba-ssm-dtype; None leaves it to the model.
        kv_dtype: --kv-cache-dtype; None or `auto` leaves it to the model.
    """
    family = str(config.get("model_type") or "")
    nested = next((config[n] for n in ("text_config", "llm_config") if n in config), None)
    text: Config = {**config, **nested} if isinstance(nested, Mapping) else config
    recurrent, state, token, attending = None, None, None, 0
    known, why_not = False, []
    try:
        recurrent, attending = _layers(str(text.get("model_type") or family), text)
        known = True
        state = _state_bytes(recurrent, text, tp, ssm_dtype) if recurrent else 0
    except _WRONG as error:
        why_not.append(_why(error, family))
    try:
        token = _token_bytes(text, attending, tp, kv_dtype) if known else None
    except _WRONG as error:
        why_not.append(_why(error, family))
    return ModelShape(
        family=family,
        recurrent=recurrent is not None if known else (_looks_recurrent(text) or None),
        state_bytes=state,
        token_bytes=token,
        why_not="; ".join(why_not),
    )


class _CannotTellError(Exception):
    """A figure cannot be told; the text says why."""


_WRONG = (_CannotTellError, KeyError, TypeError, ValueError, ZeroDivisionError)


def _why(error: Exception, family: str) -> str:
    if isinstance(error, _CannotTellError):
        return str(error)
    return f"config.json of {family or 'the model'} lacks what is needed ({error})"


def _layers(kind: str, text: Config) -> tuple[_Recurrent | None, int]:
    """Give the recurrent layers, None without any, and how many attention layers there are."""
    read = _FAMILIES.get(kind)
    if read is not None:
        return read(text)
    if _looks_recurrent(text):
        raise _CannotTellError(f"how {kind or 'this model'} lays out its states is not known here")
    return None, int(text["num_hidden_layers"])


def _looks_recurrent(text: Config) -> bool:
    begins = ("mamba_", "ssm_", "linear_num_", "linear_conv_", "linear_key_", "time_step_")
    if any(name.startswith(begins) for name in text):
        return True
    marks = {"linear_attn_config", "hybrid_override_pattern", "conv_L_cache", "layers_block_type"}
    return bool(marks & set(text))


def _gated_delta_net(text: Config) -> tuple[_Recurrent, int]:
    """Qwen3-Next and its kin: each n-th layer attends, the others are recurrent."""
    layers = int(text["num_hidden_layers"])
    if "full_attention_interval" in text:
        attending = layers // int(text["full_attention_interval"])
    else:
        attending = list(text["layer_types"]).count("full_attention")
    heads, head_dim = int(text["linear_num_value_heads"]), int(text["linear_value_head_dim"])
    return _Recurrent(
        layers=layers - attending,
        heads=heads,
        head_dim=head_dim,
        state_size=int(text["linear_key_head_dim"]),
        groups=int(text["linear_num_key_heads"]),
        kernel=int(text["linear_conv_kernel_dim"]),
        intermediate=heads * head_dim,
    ), attending


def _nemotron_h(text: Config) -> tuple[_Recurrent, int]:
    pattern: Sequence[str] = text.get("layers_block_type") or text["hybrid_override_pattern"]
    heads, head_dim = int(text["mamba_num_heads"]), int(text["mamba_head_dim"])
    return _Recurrent(
        layers=sum(each in {"M", "mamba"} for each in pattern),
        heads=heads,
        head_dim=head_dim,
        state_size=int(text["ssm_state_size"]),
        groups=int(text["n_groups"]),
        kernel=int(text["conv_kernel"]),
        intermediate=heads * head_dim,
    ), sum(each in {"*", "attention"} for each in pattern)


def _falcon_h1(text: Config) -> tuple[_Recurrent, int]:
    """Every layer attends and is recurrent."""
    layers = int(text["num_hidden_layers"])
    return _mamba2(text, layers, int(text.get("mamba_d_ssm") or _expanded(text))), layers


def _granite(text: Config) -> tuple[_Recurrent | None, int]:
    kinds = list(text["layer_types"])
    recurrent = sum(kind in {"mamba", "linear_attention"} for kind in kinds)
    if not recurrent:
        return None, len(kinds)
    return _mamba2(text, recurrent, _expanded(text)), len(kinds) - recurrent


def _mamba2(text: Config, layers: int, intermediate: int) -> _Recurrent:
    heads, head_dim = int(text["mamba_n_heads"]), text["mamba_d_head"]
    return _Recurrent(
        layers=layers,
        heads=heads,
        head_dim=intermediate // heads if head_dim == "auto" else int(head_dim),
        state_size=int(text["mamba_d_state"]),
        groups=int(text["mamba_n_groups"]),
        kernel=int(text["mamba_d_conv"]),
        intermediate=intermediate,
    )


def _expanded(text: Config) -> int:
    return int(text["mamba_expand"] * text["hidden_size"])


_FAMILIES: dict[str, Callable[[Config], tuple[_Recurrent | None, int]]] = {
    **dict.fromkeys(
        (
            "qwen3_next",
            *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        ),
        _gated_delta_net,
    ),
    "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granite,
}


def _state_bytes(found: _Recurrent, text: Config, tp: int, ssm_dtype: str | None) -> int:
    ssm_bytes = _BYTES.get(ssm_dtype or str(text.get("mamba_ssm_dtype") or "float32"), 4)
    # Groups that do not divide are repeated until each GPU has one.
    groups = found.groups + (tp - found.groups if found.groups % tp else 0)
    channels = (found.intermediate + 2 * groups * found.state_size) // tp
    recurrent = found.heads // tp * found.head_dim * found.state_size * ssm_bytes
    return found.layers * (recurrent + channels * (found.kernel - 1) * _CONV_BYTES)


def _token_bytes(text: Config, layers: int, tp: int, kv_dtype: str | None) -> int:
    if text.get("kv_lora_rank"):
        raise _CannotTellError("its KV cache is compressed (MLA), which is not worked out here")
    kinds = text.get("layer_types") or ()
    if any("sliding" in str(kind) or "chunked" in str(kind) for kind in kinds) or (
        text.get("sliding_window") and text.get("use_sliding_window", True)
    ):
        raise _CannotTellError("some of its layers attend to a window, so that two pools hold KV")
    heads = int(text["num_attention_heads"])
    kv_heads = max(1, int(text.get("num_key_value_heads") or heads) // tp)
    head_dim = int(text.get("head_dim") or text["hidden_size"] // heads)
    value_dim = int(text.get("v_head_dim") or head_dim)
    return layers * kv_heads * (head_dim + value_dim) * _kv_bytes(text, kv_dtype)


def _kv_bytes(text: Config, kv_dtype: str | None) -> int:
    kind = kv_dtype if kv_dtype and kv_dtype != "auto" else None
    kind = kind or str(text.get("dtype") or text.get("torch_dtype") or "bfloat16")
    if kind not in _BYTES:
        raise _CannotTellError(f"what a token of {kind} takes is not known here")
    return _BYTES[kind]
