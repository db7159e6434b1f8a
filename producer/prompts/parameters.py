"""Know which members of a row are request parameters, and check the few that can do harm. Pure."""

from typing import Any

from common.models import Endpoint
from producer.prompts.addresses import check_elsewhere
from producer.prompts.verdicts import RowRejectedError

_OPENAI = frozenset(
    {
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "max_tokens",
        "model",
        "n",
        "presence_penalty",
        "response_format",
        "seed",
        "stop",
        "stream",
        "temperature",
        "top_p",
    }
)
_SGLANG = frozenset(
    {
        "custom_params",
        "ebnf",
        "ignore_eos",
        "lora_path",
        "min_p",
        "min_tokens",
        "no_stop_trim",
        "regex",
        "repetition_penalty",
        "skip_special_tokens",
        "stop_regex",
        "stop_token_ids",
        "top_k",
    }
)
_CHAT_ONLY = frozenset(
    {
        "chat_template_kwargs",
        "continue_final_message",
        "max_completion_tokens",
        "parallel_tool_calls",
        "reasoning_effort",
        "separate_reasoning",
        "tool_choice",
        "tools",
        "top_logprobs",
    }
)
_GENERATE_TOP = frozenset({"image_data", "lora_path", "return_logprob", "sampling_params"})
"""Members of /generate that stand beside `sampling_params`."""

_GENERATE_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_new_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "sampling_seed": "sampling_seed",
    "json_schema": "json_schema",
} | {
    name: name
    for name in (_OPENAI | _SGLANG)
    - {"logprobs", "lora_path", "max_tokens", "min_tokens", "model", "response_format", "seed"}
    - {"stream"}
}
"""OpenAI's name of a parameter -> its name in `sampling_params`."""

_NOT_IN_GENERATE = (_CHAT_ONLY | {"logprobs", "response_format"}) - {"max_completion_tokens"}

KNOWN: dict[Endpoint, frozenset[str]] = {
    "chat": _OPENAI | _SGLANG | _CHAT_ONLY | {"max_new_tokens"},
    "completions": _OPENAI | _SGLANG | {"best_of", "echo", "max_new_tokens", "suffix"},
    "generate": frozenset(_GENERATE_NAMES) | _GENERATE_TOP | {"model", "stream"},
}
"""Members of a plain row that are sent; every other one comes back in the result, unsent."""


def own_parameters(row: dict[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    """Pick a plain row's own parameters, in the endpoint's shape; a null means not given."""
    known = KNOWN[endpoint]
    own = {name: value for name, value in row.items() if name in known and value is not None}
    if own and own.get("stream") is False:
        del own["stream"]
    if endpoint == "generate":
        return _for_generate(row, own)
    if "max_new_tokens" in own:
        own.setdefault("max_tokens", own.pop("max_new_tokens"))
    return own


def _for_generate(row: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    unusable = sorted(name for name in _NOT_IN_GENERATE & row.keys() if row[name] is not None)
    if unusable:
        raise RowRejectedError(
            "endpoint", f"{unusable[0]} has no meaning with text or input_ids: use messages"
        )
    sampling = own.pop("sampling_params", {})
    if type(sampling) is not dict:
        raise RowRejectedError("bad_type", "sampling_params is no object")
    top = {name: own.pop(name) for name in [*own] if name not in _GENERATE_NAMES}
    sampling = {**{_GENERATE_NAMES[name]: value for name, value in own.items()}, **sampling}
    return {**top, **({"sampling_params": sampling} if sampling else {})}


def check_parameters(body: dict[str, Any], endpoint: Endpoint, *, private: bool = False) -> bool:
    """Check what could harm the run or its servers: streaming, the limit of tokens, addresses.

    Args:
        body: Of the request.
        endpoint: Where it goes.
        private: Its addresses may be of private networks.

    Returns:
        Whether the row has a limit of its own.
    """
    if body.get("stream"):
        raise RowRejectedError("stream", "asks for streaming: leave stream out")
    check_elsewhere(body, private=private)
    if endpoint == "generate":
        sampling = body.get("sampling_params")
        if sampling is None:
            return False
        if type(sampling) is not dict:
            raise RowRejectedError("bad_type", "sampling_params is no object")
        return _has_limit(sampling, "max_new_tokens")
    limited = _has_limit(body, "max_tokens")
    return _has_limit(body, "max_completion_tokens") or limited


def _has_limit(parameters: dict[str, Any], name: str) -> bool:
    value = parameters.get(name)
    if value is None:
        return False
    if type(value) is not int or value < 1:
        raise RowRejectedError("max_tokens", f"{name} is no whole number of at least 1")
    return True
