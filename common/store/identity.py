"""Judge names and contents of objects: what every store asks before it writes. Pure."""

import unicodedata

import msgspec

from common.errors import StoreDamagedError, UsageError
from common.ids import rows_sha256
from common.store.frames import DIGEST_DIGITS, decompress

LONGEST_NAME_BYTES = 900
"""S3 allows 1,024 for prefix and name together; some servers stop at about 900."""

_PARQUET = b"PAR1"
"""What a Parquet file begins and ends with."""

LONGEST_SEGMENT_BYTES = 240
"""A file system's 255, less what a temporary name adds."""


def checked_name(name: str) -> str:
    """Return the name if every kind of store can keep it.

    Raises:
        UsageError: Empty, absolute, with an empty or dot segment, a control character, a backslash
            or too many bytes. Real servers mangle or refuse exactly these.
    """
    segments = name.encode(errors="replace").split(b"/")
    if (
        any(segment in {b"", b".", b".."} for segment in segments)
        or any(len(segment) > LONGEST_SEGMENT_BYTES for segment in segments)
        or sum(map(len, segments)) + len(segments) - 1 > LONGEST_NAME_BYTES
        or any(unicodedata.category(c) in {"Cc", "Cs"} or c == "\\" for c in name)
    ):
        raise UsageError(
            f"{name[:200]!r} cannot name an object: relative, parts between single slashes, "
            "no '.' or '..', no control characters or backslashes, not too long"
        )
    return name


def identity_of(data: bytes, rows_sha256_given: str) -> str:
    """Give what tells one content from another: the rows' hash, else that of the bytes."""
    return rows_sha256_given or rows_sha256(data)


def holds_same(name: str, stored: bytes, data: bytes, identity: str) -> bool:
    """Tell whether what is stored is what a write of `data` under this name would have left.

    Compressed bytes may differ after an upgrade of the codec; the rows decide.

    Args:
        name: Name of the object.
        stored: What the store holds.
        data: What was to be written.
        identity: As `identity_of` gives it for `data`.
    """
    if stored == data:
        return True
    if name.endswith(".zst"):
        try:
            return rows_sha256(decompress(stored)) == identity
        except StoreDamagedError:
            return False
    # Parquet: its rows cannot be hashed here, but a name that ends in their hash holds no others.
    named = name.endswith(f"-{identity[:DIGEST_DIGITS]}.parquet")
    return named and looks_whole(name, stored, identity)


def looks_whole(name: str, stored: bytes, identity: str) -> bool:
    """Tell whether an object that is said to hold what `identity` names does hold it.

    Said by its metadata, or by its name: an upload that broke off may have left both.
    """
    if name.endswith(".zst"):
        try:
            return rows_sha256(decompress(stored)) == identity
        except StoreDamagedError:
            return False
    if name.endswith(".parquet"):
        return stored.startswith(_PARQUET) and stored.endswith(_PARQUET)
    if name.endswith(".json"):
        try:
            msgspec.json.decode(stored)
        except msgspec.MsgspecError:
            return False
    return True
