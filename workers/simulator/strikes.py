"""What a fault of one request looks like on the wire."""

from workers.simulator import errors
from workers.simulator.answers import Outcome
from workers.simulator.errors import Api
from workers.simulator.faults import Fault
from workers.simulator.wire import Reply, frame

# Faults that act on an open request, not only on the reply to it.
NEEDS_REQUEST = frozenset({"abort", "half", "nan", "no_answer", "poison", "reset"})

_HTML = b"<html><head><title>Welcome</title></head><body><h1>It works!</h1></body></html>\n"


def outcome(fault: Fault, natural: Outcome) -> Outcome | None:
    """Give the outcome that a fault makes of a natural one; None when it is no outcome at all."""
    if fault.kind == "abort":
        return Outcome("abort", natural.tokens // 2)
    if fault.kind == "nan":
        return Outcome("stop", natural.tokens, "NaN happened")
    if fault.kind in {"half", "reset"}:
        return natural
    return None


def reply(fault: Fault, api: Api, rid: str) -> Reply:
    """Give the reply of a fault that does not depend on the request's answer."""
    given = _plain(fault, api, rid)
    if fault.retry_after is None:
        return given
    line = f"retry-after: {fault.retry_after}\r\n".encode()
    return given._replace(headers=given.headers + line)


def _plain(fault: Fault, api: Api, rid: str) -> Reply:
    kind = fault.kind
    if kind == "duplicate_rid":
        return errors.duplicate_rid(api, rid)
    if kind == "bad_params":
        return errors.bad_request(api, "top_p must be in (0, 1], got 7.0.")
    if kind == "status":
        return Reply(fault.status, b'{"detail":"status on request"}')
    if kind == "empty_choices":
        return Reply(200, _EMPTY[api])
    return _FIXED[kind]


def half(reply: Reply) -> bytes:
    """Cut a framed reply in the middle of its body."""
    framed = frame(reply)
    return framed[: len(framed) - (len(reply.body) + 1) // 2]


_EMPTY: dict[Api, bytes] = {
    "chat": b'{"id":"empty","object":"chat.completion","created":0,"model":"","choices":[],'
    b'"usage":{"prompt_tokens":0,"total_tokens":0,"completion_tokens":0}}',
    "completions": b'{"id":"empty","object":"text_completion","created":0,"model":"",'
    b'"choices":[],"usage":{"prompt_tokens":0,"total_tokens":0,"completion_tokens":0}}',
    "generate": b"[]",
}

_FIXED: dict[str, Reply] = {
    "queue_full": errors.QUEUE_FULL,
    "waited": errors.WAITED_TOO_LONG,
    "ran": errors.RAN_TOO_LONG,
    "oom": errors.OUT_OF_MEMORY,
    "error_500": errors.flat(500, "Internal server error: on request", "InternalServerError"),
    "internal": errors.INTERNAL,
    "unauthorized": errors.UNAUTHORIZED,
    "not_found": errors.NOT_FOUND,
    "error_200": Reply(200, errors.flat(500, "on request", "InternalServerError").body),
    "html_200": Reply(200, _HTML, b"text/html; charset=utf-8"),
    "empty_200": Reply(200, b"", None),
}
