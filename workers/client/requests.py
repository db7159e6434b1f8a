"""Merge a prompt with its run's parameters into the one request that is sent. Pure.

The row's value wins over the run's flags, zero and false included; null in a row counts as not
given only for the token limit. What the row brought is passed on byte for byte: its members stay
raw JSON from the input to the server and into the result, so nothing can change a number's
spelling, an image or a null on the way.

Ours in every request: `stream` false, `rid`, an explicit token limit, for the OpenAI routes
`model`, and in a run that keeps token ids the member that asks for them. `stream_options` goes
with `stream`.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from common.errors import ServerUnusableError
from common.ids import canonical_json, rows_sha256
from common.models import Endpoint, NonNegativeInt, Params

PATHS: Mapping[Endpoint, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "generate": "/generate",
}

CONTENT = frozenset({
    "messages", "prompt", "text", "input_ids", "tools",
    "image_data", "video_data", "audio_data", "input_embeds",
})  # fmt: skip
"""Members that are what was asked, not how: a result row keeps them beside its parameters."""

_NOT_PARAMS = CONTENT | {"stream", "rid"}

_CHAT_ONLY = frozenset({
    "chat_template_kwargs", "continue_final_message", "max_completion_tokens",
    "parallel_tool_calls", "reasoning_effort", "separate_reasoning", "stream_reasoning",
    "tool_choice", "tools",
})  # fmt: skip
"""Flags that the other two routes cannot carry; there they are left out."""

_GENERATE_TOP_LEVEL = {
    "logprobs": "return_logprob",
    "top_logprobs": "top_logprobs_num",
    **{
        name: name
        for name in (
            "extra_key", "lora_path", "priority", "return_hidden_states", "return_logprob",
            "return_prompt_token_ids", "return_token_ids", "top_logprobs_num",
        )
    },
}  # fmt: skip
"""OpenAI name of a flag -> member of /generate's body; all others go into `sampling_params`."""

_GENERATE_SAMPLING = {"min_tokens": "min_new_tokens", "seed": "sampling_seed"}

_TOKEN_IDS: Mapping[Endpoint, str] = {
    "chat": "return_token_ids",
    "completions": "return_token_ids",
    "generate": "return_prompt_token_ids",
}
"""Asks for the ids of prompt and answer; /generate tells those of the answer unasked."""

_FALSE, _TRUE = msgspec.Raw(b"false"), msgspec.Raw(b"true")
_encode = msgspec.json.encode


class RawPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A `models.Prompt` whose content stays the JSON text that it was accepted as."""

    id: msgspec.Raw
    line: NonNegativeInt
    endpoint: Endpoint
    body: dict[str, msgspec.Raw]
    source: str = ""
    sample: NonNegativeInt = 0
    extra: msgspec.Raw = msgspec.Raw(b"{}")
    turns: NonNegativeInt = 0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP call.

    Attributes:
        endpoint: Decides the path.
        members: The body's members as raw JSON.
        rid: Fixed width, so that aborting one never aborts another (the server matches prefixes).
        max_tokens: The limit that is sent; None when the row's own is no whole number.
        fits_context: The run asked for what the context leaves, so one smaller limit may follow.
        clamped: This is that second request.
        keeps_token_ids: The run keeps them, so an answer without them is none.
    """

    endpoint: Endpoint
    members: dict[str, msgspec.Raw]
    rid: str
    max_tokens: int | None
    fits_context: bool = False
    clamped: bool = False
    keeps_token_ids: bool = False

    @property
    def path(self) -> str:
        """Which of SGLang's routes it goes to."""
        return PATHS[self.endpoint]

    @property
    def content(self) -> bytes:
        """The body to send."""
        return _encode(self.members)

    @property
    def params(self) -> dict[str, msgspec.Raw]:
        """What is sent besides content, as the result row keeps it."""
        return {name: raw for name, raw in self.members.items() if name not in _NOT_PARAMS}

    @property
    def reads_output_ids(self) -> bool:
        """Whether the run or the row asks for the generated token ids."""
        own = self.members.get("return_token_ids", _FALSE)
        return self.keeps_token_ids or bytes(own) == b"true"


_prompt_decoder = msgspec.json.Decoder(RawPrompt)


def read_prompt(prompt: bytes) -> RawPrompt:
    """Read the JSON of a `models.Prompt` without touching what it asks.

    Raises:
        ValueError: If it is no such JSON: the job's hash in Redis has been damaged.
    """
    return _prompt_decoder.decode(prompt)


def build_request(
    prompt: RawPrompt, params: Params, *, model: str, rid: str, context_length: int | None
) -> Request:
    """Merge a prompt with its run's parameters.

    Args:
        prompt: As it was accepted.
        params: The run's.
        model: Served model name to send where the row has none.
        rid: Request id, of fixed width.
        context_length: The server's, in tokens; only needed for the limit "context".

    Raises:
        ServerUnusableError: If the limit is "context" and the server's length is unknown.
        ValueError: If the `sampling_params` of a row for /generate are no object.
    """
    if prompt.endpoint == "generate":
        members, sampling = _generate_members(prompt, params)
        home, name, limit = sampling, "max_new_tokens", _whole(sampling.get("max_new_tokens"))
    else:
        members = _openai_members(prompt, params, model=model)
        home, name = members, limit_member(members)
        limit = _whole(members.get(name))
        sampling = None
    fits_context = False
    if _missing(home.get(name)):
        limit, fits_context = _run_limit(params, context_length)
        home[name] = msgspec.Raw(b"%d" % limit)
    _add_sample(home, "sampling_seed" if sampling is not None else "seed", prompt.sample)
    if sampling is not None:
        members["sampling_params"] = msgspec.Raw(_encode(sampling))
    members.pop("stream_options", None)
    members["stream"] = _FALSE
    members["rid"] = msgspec.Raw(_encode(rid))
    if params.keep_token_ids:
        members[_TOKEN_IDS[prompt.endpoint]] = _TRUE
    return Request(
        endpoint=prompt.endpoint,
        members=members,
        rid=rid,
        max_tokens=limit,
        fits_context=fits_context,
        keeps_token_ids=params.keep_token_ids,
    )


def params_hash(params: Any) -> str:
    """Hash what was sent besides content: 16 hex digits of its canonical JSON."""
    return rows_sha256(canonical_json(params))[:16]


def _openai_members(prompt: RawPrompt, params: Params, *, model: str) -> dict[str, msgspec.Raw]:
    left_out = frozenset[str]() if prompt.endpoint == "chat" else _CHAT_ONLY
    members = {
        name: msgspec.Raw(_encode(value))
        for name, value in params.sampling.items()
        if name not in left_out
    }
    members.update(prompt.body)
    if _missing(members.get("model")):
        members["model"] = msgspec.Raw(_encode(model))
    return members


def _generate_members(
    prompt: RawPrompt, params: Params
) -> tuple[dict[str, msgspec.Raw], dict[str, msgspec.Raw]]:
    members: dict[str, msgspec.Raw] = {}
    sampling: dict[str, msgspec.Raw] = {}
    for name, value in params.sampling.items():
        if name in _GENERATE_TOP_LEVEL:
            members[_GENERATE_TOP_LEVEL[name]] = msgspec.Raw(_encode(value))
        elif name not in _CHAT_ONLY:
            sampling[_GENERATE_SAMPLING.get(name, name)] = msgspec.Raw(_encode(value))
    members.update(prompt.body)
    own = prompt.body.get("sampling_params")
    if own is not None and not _missing(own):
        sampling.update(json_object(own))
    return members, sampling


def json_object(raw: msgspec.Raw) -> dict[str, msgspec.Raw]:
    """Read the members of an object, each still as JSON."""
    return msgspec.json.decode(raw, type=dict[str, msgspec.Raw])


def limit_member(members: Mapping[str, msgspec.Raw]) -> str:
    """Say which member carries the token limit: a row may use the newer of the two names."""
    if _missing(members.get("max_tokens")) and not _missing(members.get("max_completion_tokens")):
        return "max_completion_tokens"
    return "max_tokens"


def _run_limit(params: Params, context_length: int | None) -> tuple[int, bool]:
    """Give the run's token limit, and whether it means "what the context leaves"."""
    if isinstance(params.max_tokens, int):
        return params.max_tokens, False
    # A run without a limit whose row has none either is refused by the producer; what slipped
    # through must not meet the server's own default of 16 or 128 tokens.
    if context_length is None:
        raise ServerUnusableError(
            "the server does not tell its context length, so `--max-tokens context` cannot be "
            "used with it; enqueue with --max-tokens N"
        )
    return max(context_length - 1, 1), True


def _add_sample(home: dict[str, msgspec.Raw], name: str, sample: int) -> None:
    seed = _whole(home.get(name)) if sample else None
    if seed is not None:
        home[name] = msgspec.Raw(b"%d" % (seed + sample))


def _missing(raw: msgspec.Raw | None) -> bool:
    return raw is None or bytes(raw) == b"null"


def _whole(raw: msgspec.Raw | None) -> int | None:
    if raw is None:
        return None
    try:
        return int(bytes(raw))
    except ValueError:
        return None
