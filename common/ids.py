"""Compute the identities of design.md §3: key, fingerprint, typed prompt id. Pure functions.

A prompt is its key, whatever its line, order or file. The typed id keeps 1, 1.0 and "1" apart; the
fingerprint tells a changed prompt from the same one, whatever the order of its members.
"""

import hashlib
from typing import Any

import msgspec

from common.names import KEY_BYTES

FINGERPRINT_BYTES = 8

_canonical = msgspec.json.Encoder(order="sorted")


def canonical_json(value: Any) -> bytes:
    """Encode JSON so that equal content gives equal bytes: members sorted, no blanks, UTF-8."""
    return _canonical.encode(value)


def key_of(run: str, id_json: bytes, sample: int = 0) -> bytes:
    """Hash (run name, typed prompt id, sample) to the 16-byte key.

    Args:
        run: Name of the run.
        id_json: The id as `typed_id` gives it.
        sample: Which of the prompt's samples, from 0.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    # The length goes first, so that ("ab", "c") and ("a", "bc") differ.
    digest.update(b"%d:%b%d:%b%d" % (len(run), run.encode(), len(id_json), id_json, sample))
    return digest.digest()


def typed_id(value: str | float, text: bytes | None = None) -> bytes:
    """Give the JSON text that stands for an id: strings re-encoded, numbers as they were written.

    Args:
        value: The decoded id.
        text: The id's own text in the input; needed for numbers, whose spelling is kept.
    """
    if isinstance(value, str):
        return msgspec.json.encode(value)
    return text if text is not None else msgspec.json.encode(value)


def fingerprint_of(endpoint: str, body: Any) -> bytes:
    """Hash the canonical request (endpoint, content, the row's own parameters) to 8 bytes."""
    digest = hashlib.blake2b(endpoint.encode(), digest_size=FINGERPRINT_BYTES)
    digest.update(canonical_json(body))
    return digest.digest()


def content_id(endpoint: str, body: Any, occurrence: int) -> str:
    """Name a row that brought no id: the hash of its canonical request and its occurrence number.

    Args:
        endpoint: Which of SGLang's routes the row asks for.
        body: The request as the row gives it, without the flags' parameters.
        occurrence: How many equal rows without id stood before this one.
    """
    digest = hashlib.blake2b(endpoint.encode(), digest_size=12)
    digest.update(canonical_json(body))
    return f"{digest.hexdigest()}-{occurrence}"


def rows_sha256(rows: bytes) -> str:
    """Hash the uncompressed rows of an object, as manifests and names carry it (64 hex digits)."""
    return hashlib.sha256(rows).hexdigest()
