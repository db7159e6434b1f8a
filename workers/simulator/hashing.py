"""Name a request by its content, the same way in the simulator and in the tests."""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

# They tell one attempt or server from another, not one prompt from another.
NOT_CONTENT = frozenset({"rid", "model"})

_encode = msgspec.json.Encoder(order="sorted").encode


def request_hash(body: Mapping[str, Any]) -> str:
    """Hash the JSON body of a request, without `rid` and `model`.

    Args:
        body: The decoded body of a POST to /generate, /v1/completions or /v1/chat/completions.
            The seed belongs to it: two samples of one prompt have two hashes.

    Returns:
        32 hex digits: blake2b-128 of the canonical JSON (keys sorted at every level, no blanks).
        Every simulated answer to this body starts with `sim:` and these digits.

    Raises:
        TypeError, UnicodeEncodeError: If the body cannot be written as JSON.
    """
    content = {key: value for key, value in body.items() if key not in NOT_CONTENT}
    return hashlib.blake2b(_encode(content), digest_size=16).hexdigest()


def share(digest: str, salt: int) -> float:
    """Draw a number from a request's hash.

    Args:
        digest: What `request_hash` gave.
        salt: 0, 1 or 2: which of the hash's independent numbers.

    Returns:
        A number in (0, 1), evenly spread over hashes and always the same for one hash.
    """
    start = salt * 10
    return (int(digest[start : start + 10], 16) + 0.5) / 16**10
