"""The error bodies of real SGLang servers, word for word.

Three families, all recorded: the native API's `{"error":{"message":…}}`, the OpenAI API's flat
`{"object":"error",…}`, and FastAPI's `{"detail":…}`. Refusals by the scheduler (503, 500) are flat
on both APIs.
"""

from typing import Any, Literal

import msgspec

from workers.simulator.wire import Reply

Api = Literal["chat", "completions", "generate"]

_encode = msgspec.json.encode
_PLAIN = b"text/plain; charset=utf-8"

# Where the handlers stand in SGLang's http_server.py: their messages quote file and line.
_SOURCE = "/srv/sglang/lib/python3.11/site-packages/sglang/srt/entrypoints/http_server.py"
_HANDLERS: dict[Api, tuple[str, str, int, int]] = {
    "chat": ("/v1/chat/completions", "openai_v1_chat_completions", 1870, 1491),
    "completions": ("/v1/completions", "openai_v1_completions", 1858, 1479),
    "generate": ("/generate", "generate_request", 928, 674),
}
_CONTENT_TYPE_PROBLEM = {
    "loc": ["header", "content-type"],
    "msg": "Unsupported Media Type: Only 'application/json' is allowed",
    "type": "value_error",
}

NOT_FOUND = Reply(404, b'{"detail":"Not Found"}')
UNAUTHORIZED = Reply(401, b'{"error":"Unauthorized"}', headers=b"")
INTERNAL = Reply(500, b"Internal Server Error", _PLAIN, headers=b"")


def method_not_allowed(allowed: str) -> Reply:
    """405, with the methods that the route does take."""
    allow = f"allow: {allowed}\r\nvary: Origin\r\n".encode()
    return Reply(405, b'{"detail":"Method Not Allowed"}', headers=allow)


def flat(status: int, message: str, kind: str) -> Reply:
    """The OpenAI API's error object."""
    body = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return Reply(status, _encode(body))


def bad_request(api: Api, message: str) -> Reply:
    """400 for a request that was understood and refused, in the API's own shape."""
    if api == "generate":
        return Reply(400, _encode({"error": {"message": message}}))
    return flat(400, message, "BadRequestError")


def unknown_parameter(name: str, known: tuple[str, ...]) -> Reply:
    """400 of the newer servers for an unknown key in `sampling_params`."""
    listed = ", ".join(f"`{each}`" for each in known)
    return Reply(400, _encode({"error": f"unknown field `{name}`, expected one of {listed}"}))


def validation_error(api: Api, problem: dict[str, Any], *, new: bool) -> Reply:
    """400 for what the schema does not admit, quoting the source as SGLang does.

    Args:
        api: Which handler refused it.
        problem: Pydantic's account of it: type, loc, msg, input and perhaps ctx.
        new: Whether the server is of 0.5.13 or later; decides the quoted line number.
    """
    path, function, line_new, line_old = _HANDLERS[api]
    message = (
        f"1 validation error:\n  {problem}\n\n"
        f'  File "{_SOURCE}", line {line_new if new else line_old}, in {function}\n'
        f"    POST {path} [{problem}]"
    )
    return flat(400, message, "Bad Request")


def malformed_json(api: Api, position: int, error: str, *, new: bool) -> Reply:
    """400 for a body that is not JSON; `position` is the character where it stops being it."""
    problem = {
        "type": "json_invalid",
        "loc": ("body", position),
        "msg": "JSON decode error",
        "input": {},
        "ctx": {"error": error},
    }
    return validation_error(api, problem, new=new)


def missing_field(api: Api, name: str, body: dict[str, Any], *, new: bool) -> Reply:
    """400 for a required field that is not there."""
    shown = dict(body) | ({"tool_choice": "none"} if api == "chat" else {})
    problem = {
        "type": "missing",
        "loc": ("body", name),
        "msg": "Field required",
        "input": shown,
    }
    return validation_error(api, problem, new=new)


def wrong_type(api: Api, name: str, kind: str, value: object, *, new: bool) -> Reply:
    """400 for a field of the wrong type; `kind` is `integer` or `number`."""
    parsing = {"integer": "int_parsing", "number": "float_parsing"}[kind]
    article = "an" if kind == "integer" else "a"
    suffix = f", unable to parse string as {article} {kind}"
    problem = {
        "type": parsing,
        "loc": ("body", name),
        "msg": f"Input should be a valid {kind}{suffix}",
        "input": value,
    }
    return validation_error(api, problem, new=new)


def wrong_content_type() -> Reply:
    """400 for a body whose content-type is not JSON."""
    problem = _CONTENT_TYPE_PROBLEM
    return flat(400, f"1 validation error:\n  {problem} [{problem}]", "Bad Request")


def scheduler_refusal(status: int, message: str) -> Reply:
    """503 or 500 that the scheduler ends a request with; the same on all APIs."""
    return flat(status, message, str(status))


QUEUE_FULL = scheduler_refusal(503, "The request queue is full.")
WAITED_TOO_LONG = scheduler_refusal(503, "Request waiting timeout reached.")
RAN_TOO_LONG = scheduler_refusal(503, "Request running timeout reached.")
OUT_OF_MEMORY = scheduler_refusal(
    500,
    "Out of memory even after retracting all other requests in the decode batch. "
    "Aborting the last request.",
)


def too_long(api: Api, tokens: int, context_length: int) -> Reply:
    """400: the prompt alone fills the context."""
    return bad_request(
        api,
        f"The input ({tokens} tokens) is longer than the model's context length "
        f"({context_length} tokens).",
    )


def over_context(api: Api, tokens: int, max_tokens: int, context_length: int) -> Reply:
    """400: prompt and answer together would not fit."""
    return bad_request(
        api,
        f"Requested token count exceeds the model's maximum context length of {context_length} "
        f"tokens. You requested a total of {tokens + max_tokens} tokens: {tokens} tokens from the "
        f"input messages and {max_tokens} tokens for the completion. Please reduce the number of "
        "tokens in the input messages or the completion to fit within the limit.",
    )


def max_tokens_too_large(max_tokens: int, context_length: int) -> Reply:
    """400 of the chat API: max_tokens alone is more than the context."""
    return bad_request(
        "chat",
        f"max_completion_tokens is too large: {max_tokens}."
        f"This model supports at most {context_length} completion tokens.",
    )


def over_pool(api: Api, tokens: int, allowed: int) -> Reply:
    """400: the prompt fits the context, but not the KV pool."""
    return bad_request(
        api,
        f"Input length ({tokens} tokens) exceeds the maximum allowed length ({allowed} tokens). "
        "Use a shorter input or enable --allow-auto-truncate.",
    )


def duplicate_rid(api: Api, rid: str) -> Reply:
    """400: a request with this rid is still open."""
    return bad_request(api, f"Duplicate request ID detected: {rid}")
