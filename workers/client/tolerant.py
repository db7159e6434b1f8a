"""Read JSON that strict readers refuse, and errors whatever their shape. Pure.

Servers, gateways and Python's own encoder send things that are no JSON: NaN, lone surrogates,
bytes that are no UTF-8, plain text, HTML. What is in them is kept all the same, in a form that can
be written as UTF-8 again.
"""

import json
import re
from typing import Any

import msgspec

MESSAGE_CHARS = 2_000
"""How much of a server's text is kept with a failure."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def read_tolerantly(body: bytes) -> Any:
    """Decode what Python's own reader takes; what cannot be written as UTF-8 becomes U+FFFD.

    Raises:
        ValueError: If that reader refuses it too.
        RecursionError: If it is nested too deeply.
    """
    return _clean(json.loads(body.decode("utf-8", "replace")))


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_clean(each) for each in value]
    if isinstance(value, dict):
        return {_clean(name): _clean(each) for name, each in value.items()}
    return value


def error_text(body: bytes) -> str:
    """Find the server's own words in an error's body, whatever its shape; may be empty.

    Known shapes: `{"error": {"message": …}}`, `{"error": "…"}`, `{"message": …}`,
    `{"detail": …}`, plain text, HTML. At most `MESSAGE_CHARS`.
    """
    # A page of megabytes is not worth a parser's time for 2,000 characters.
    head = body[: 64 * MESSAGE_CHARS]
    try:
        found = _message_of(read_tolerantly(head))
    except (ValueError, RecursionError):
        found = None
    if found is None:
        found = head.decode("utf-8", "replace").strip()
    return _SURROGATE.sub("\ufffd", found)[:MESSAGE_CHARS]


def error_code(body: bytes) -> str | None:
    """Find the machine-readable code of an OpenAI error object, for example model_not_found."""
    try:
        value = read_tolerantly(body)
    except (ValueError, RecursionError):
        return None
    error = value.get("error") if isinstance(value, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) else None


def _message_of(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        for name in ("error", "message", "detail"):
            if name in value:
                inner = _message_of(value[name])
                return inner if inner is not None else msgspec.json.encode(value[name]).decode()
    return None
