"""Find a model's config.json and the size of its weights, as the server that loads it would.

A model is a directory, or a name whose files lie in Hugging Face's cache. Nothing is fetched.
"""

import json
import os
from pathlib import Path
from typing import Any

from workers.capacity.model_shape import ModelShape, shape_of

MOST_CONFIG_BYTES = 4 << 20


def model_folder(model: str) -> Path | None:
    """Find where a model's files lie on this machine; None where they don't.

    Args:
        model: As the server is given it: a directory, or `owner/name`.
    """
    given = Path(model).expanduser()
    if (given / "config.json").is_file():
        return given
    cached = _cache() / f"models--{model.replace('/', '--')}"
    try:
        revision = (cached / "refs" / "main").read_text().strip()
    except (OSError, ValueError):
        return None
    folder = cached / "snapshots" / revision
    return folder if (folder / "config.json").is_file() else None


def shape_at(
    model: str | None, *, tp: int = 1, ssm_dtype: str | None = None, kv_dtype: str | None = None
) -> ModelShape:
    """Work out what a model's requests cost, of its files.

    Args:
        model: As the server is given it.
        tp: GPUs that one server spans.
        ssm_dtype: See `shape_of`.
        kv_dtype: See `shape_of`.

    Returns:
        With all unknown, and why, where there is no config.json that can be read.
    """
    folder = model_folder(model) if model else None
    if folder is None:
        return _unknown(f"no config.json of {model or 'the model'} on this machine")
    path = folder / "config.json"
    try:
        with path.open("rb") as file:
            config: Any = json.loads(file.read(MOST_CONFIG_BYTES))
    except (OSError, ValueError) as error:
        return _unknown(f"{path} cannot be read ({type(error).__name__})")
    if not isinstance(config, dict):
        return _unknown(f"{path} is no object")
    return shape_of(config, tp=tp, ssm_dtype=ssm_dtype, kv_dtype=kv_dtype)


def weights_bytes(model: str) -> int | None:
    """Add up a model's weights; None where its files are not on this machine."""
    folder = model_folder(model)
    if folder is None:
        return None
    try:
        return sum(path.stat().st_size for path in folder.glob("*.safetensors")) or None
    except OSError:
        return None


def _unknown(why: str) -> ModelShape:
    return ModelShape(family="", recurrent=None, state_bytes=None, token_bytes=None, why_not=why)


def _cache() -> Path:
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
