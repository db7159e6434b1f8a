"""What the server refuses before it queues anything, and what it takes from a request.

Pure: a decoded body and the settings in, a plan or an error reply out.
"""

import math
from typing import Any, NamedTuple

from workers.simulator import errors
from workers.simulator.errors import Api
from workers.simulator.settings import Settings
from workers.simulator.wire import Reply

Body = dict[str, Any]

# Keys that `sampling_params` of /generate may hold (0.5.23, in the order its error lists them).
SAMPLING_KEYS = (
    "max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k",
    "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n",
    "json_schema", "regex", "ebnf", "structural_tag", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "no_stop_trim", "stream_interval", "logit_bias",
    "sampling_seed", "custom_params", "beam_width", "watermark", "choice",
)  # fmt: skip
_KNOWN = frozenset(SAMPLING_KEYS)
_RANGES: dict[str, tuple[float, float, str]] = {
    "min_p": (0.0, 1.0, "in [0, 1]"),
    "frequency_penalty": (-2.0, 2.0, "in [-2, 2]"),
    "presence_penalty": (-2.0, 2.0, "in [-2, 2]"),
    "repetition_penalty": (0.0, 2.0, "in [0, 2]"),
}
_INTEGERS = ("max_tokens", "max_completion_tokens", "min_tokens", "n", "top_k", "seed")
_NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty")
_TYPES = dict.fromkeys(_INTEGERS, "integer") | dict.fromkeys(_NUMBERS, "number")
_DEFAULT_COMPLETION_TOKENS = 16
_DEFAULT_GENERATE_TOKENS = 128
# First version with the strict gate for sampling_params, and with the newer wordings.
GATE_VERSION = (0, 5, 22)
NEW_VERSION = (0, 5, 13)
# First versions that tell the prompt's token ids (chat, /generate) and the answer's (/v1).
PROMPT_IDS_VERSION = (0, 5, 13)
TOKEN_IDS_VERSION = (0, 5, 17)


class Plan(NamedTuple):
    """What a well-formed request asks for.

    Attributes:
        rids: The rids that it names, one per prompt of a batch; empty when it names none.
        model: Model name to echo; the real server does not check it.
        prompt_tokens: Tokens of the prompt, by the simulator's estimate.
        max_tokens, min_tokens: Bounds of the answer's length.
        choices: Answers asked for (n, or the prompts of a batch).
        batch: Whether /generate must answer with a list.
        ignore_eos: Whether the answer runs to max_tokens.
        thinking: Whether a reasoning model would think first.
        prompt_ids, output_ids: Whether the answer tells the token ids of the prompt, and its own.
        own_ids: The prompt, where it is token ids.
    """

    rids: tuple[str, ...]
    model: str
    prompt_tokens: int
    max_tokens: int
    min_tokens: int
    choices: int
    batch: bool
    ignore_eos: bool
    thinking: bool
    prompt_ids: bool = False
    output_ids: bool = False
    own_ids: tuple[int, ...] = ()


def read_plan(api: Api, body: Body, settings: Settings) -> Plan | Reply:
    """Check a request as the real server does, in its order, and say what it asks for."""
    if api == "generate":
        return _generate(body, settings)
    return _openai(api, body, settings)


def _openai(api: Api, body: Body, settings: Settings) -> Plan | Reply:
    new = settings.version >= NEW_VERSION
    field = "messages" if api == "chat" else "prompt"
    refusal = _schema(api, field, body, new=new) or _sampling(api, body, new=new)
    if refusal is not None:
        return refusal
    limit = body.get("max_completion_tokens")
    max_tokens = body.get("max_tokens") if limit is None else limit
    if api == "chat":
        if not body["messages"]:
            return errors.bad_request(api, "Messages cannot be empty.")
        if max_tokens is not None and max_tokens > settings.context_length:
            return errors.max_tokens_too_large(max_tokens, settings.context_length)
        length, choices = _chat_length(body["messages"]), 1
    else:
        length, choices = _prompt_length(body["prompt"])
        max_tokens = _DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens
    template = body.get("chat_template_kwargs") or {}
    output_ids = _asks(body, "return_token_ids", settings, TOKEN_IDS_VERSION)
    prompt_ids = api == "chat" and _asks(
        body, "return_prompt_token_ids", settings, PROMPT_IDS_VERSION
    )
    rid = body.get("rid")
    plan = Plan(
        rids=(rid,) if isinstance(rid, str) else tuple(rid or ()),
        model=str(body.get("model") or settings.model),
        prompt_tokens=_tokens(length, settings),
        max_tokens=-1 if max_tokens is None else max_tokens,
        min_tokens=body.get("min_tokens") or 0,
        choices=choices * (body.get("n") or 1),
        batch=False,
        ignore_eos=bool(body.get("ignore_eos")),
        thinking=settings.reasoning and template.get("enable_thinking") is not False,
        prompt_ids=prompt_ids or output_ids,
        output_ids=output_ids,
        own_ids=_ids(body.get("prompt")),
    )
    return _fit(api, plan, settings)


def _generate(body: Body, settings: Settings) -> Plan | Reply:
    params = body.get("sampling_params") or {}
    params = params[0] if isinstance(params, list) else params
    unknown = next((key for key in params if key not in _KNOWN), None)
    if unknown is not None:
        gated = settings.version >= GATE_VERSION
        return errors.unknown_parameter(unknown, SAMPLING_KEYS) if gated else errors.INTERNAL
    source = body.get("text") if body.get("text") is not None else body.get("input_ids")
    if source is None:
        message = "Either text, input_ids or input_embeds should be provided."
        return errors.bad_request("generate", message)
    refusal = _sampling("generate", params, new=settings.version >= NEW_VERSION)
    if refusal is not None:
        return refusal
    length, prompts = _prompt_length(source)
    max_tokens = params.get("max_new_tokens", _DEFAULT_GENERATE_TOKENS)
    rid = body.get("rid")
    choices = prompts * (params.get("n") or 1)
    plan = Plan(
        rids=(rid,) if isinstance(rid, str) else tuple(rid or ()),
        model=settings.model,
        prompt_tokens=_tokens(length, settings),
        max_tokens=-1 if max_tokens is None else max_tokens,
        min_tokens=params.get("min_new_tokens") or 0,
        choices=choices,
        batch=choices > 1 or _is_batch(source),
        ignore_eos=bool(params.get("ignore_eos")),
        thinking=False,
        prompt_ids=_asks(body, "return_prompt_token_ids", settings, PROMPT_IDS_VERSION),
        output_ids=True,
        own_ids=_ids(source),
    )
    return _fit("generate", plan, settings)


def _schema(api: Api, field: str, body: Body, *, new: bool) -> Reply | None:
    if field not in body:
        return errors.missing_field(api, field, body, new=new)
    for name in body.keys() & _TYPES.keys():
        value, kind = body[name], _TYPES[name]
        fits = isinstance(value, int) or (kind == "number" and isinstance(value, float))
        if value is not None and not fits:
            return errors.wrong_type(api, name, kind, value, new=new)
    return None


def _sampling(api: Api, params: Body, *, new: bool) -> Reply | None:
    temperature = params.get("temperature")
    if temperature is not None and not (temperature >= 0 and math.isfinite(temperature)):
        rule = "a non-negative finite number" if new else "non-negative"
        # The OpenAI schema makes a float of it, the native API keeps what came.
        shown = temperature if api == "generate" else float(temperature)
        return errors.bad_request(api, f"temperature must be {rule}, got {shown}.")
    top_p = params.get("top_p")
    if top_p is not None and not 0 < top_p <= 1:
        return errors.bad_request(api, f"top_p must be in (0, 1], got {top_p}.")
    top_k = params.get("top_k")
    if top_k is not None and (top_k < -1 or top_k == 0):
        rule = "-1 (disable) or at least 1"
        return errors.bad_request(api, f"top_k must be {rule}, got {top_k}.")
    for name in params.keys() & _RANGES.keys():
        value, (low, high, rule) = params[name], _RANGES[name]
        if value is not None and not low <= value <= high:
            return errors.bad_request(api, f"{name} must be {rule}, got {value}.")
    return None


def _fit(api: Api, plan: Plan, settings: Settings) -> Plan | Reply:
    """Refuse what does not fit context or pool; replace an open max_tokens by what is left."""
    context = settings.context_length
    if plan.prompt_tokens >= context:
        return errors.too_long(api, plan.prompt_tokens, context)
    left = context - plan.prompt_tokens
    if plan.max_tokens > left:
        return errors.over_context(api, plan.prompt_tokens, plan.max_tokens, context)
    if plan.prompt_tokens > settings.max_input_tokens:
        return errors.over_pool(api, plan.prompt_tokens, settings.max_input_tokens)
    if plan.max_tokens < 0:
        return plan._replace(max_tokens=left)
    return plan


def _tokens(length: int, settings: Settings) -> int:
    """Tokens of a prompt: its characters by the ratio, or token ids (negative) as they are."""
    return -length if length < 0 else max(round(length * settings.tokens_per_char), 1)


def _chat_length(messages: list[Any]) -> int:
    """Characters of all contents, text parts included."""
    total = 0
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            total += len(content)
        elif isinstance(content, list):
            total += sum(len(part.get("text") or "") for part in content)
    return total


def _asks(body: Body, name: str, settings: Settings, since: tuple[int, ...]) -> bool:
    return bool(body.get(name)) and settings.version >= since


def _ids(source: Any) -> tuple[int, ...]:
    flat = isinstance(source, list) and not _is_batch(source)
    return tuple(source) if flat else ()


def _is_batch(source: object) -> bool:
    return isinstance(source, list) and bool(source) and not isinstance(source[0], int)


def _prompt_length(source: Any) -> tuple[int, int]:
    """Characters (or minus the number of token ids) of a prompt or batch, and its prompts."""
    if isinstance(source, str):
        return len(source), 1
    if not source:
        return 0, 1
    if isinstance(source[0], int):
        return -len(source), 1
    if isinstance(source[0], str):
        return sum(len(text) for text in source), len(source)
    return -sum(len(ids) for ids in source), len(source)
