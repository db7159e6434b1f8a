"""Write the record of a prompt that was cancelled: the row, and the result that ends it. Pure.

A cancellation is a row of `failures/` like any failure, with the whole request, so that a later
`--retry-failed` and a reader of the store find the prompt there.
"""

import msgspec

from common.models import Claim, FailureRow, NonNegativeInt, Result

REASON = "cancelled"


class _Head(msgspec.Struct, frozen=True):
    """What a row repeats of its `Prompt`; all else stays the text that it was accepted as."""

    id: msgspec.Raw
    line: NonNegativeInt
    source: str = ""
    sample: NonNegativeInt = 0


_decode_head = msgspec.json.Decoder(_Head).decode
_NO_HEAD = _Head(id=msgspec.Raw(b"null"), line=0)


def cancelled_result(claim: Claim, *, message: str, at: str) -> Result:
    """End a prompt as cancelled.

    Args:
        claim: Whose prompt it is. One that cannot be read gets the id null, line 0, and its bytes
            as a string.
        message: Who cancelled it, for people.
        at: Wall time, ISO 8601 in UTC.
    """
    return claim.ended("cancelled", _row(claim, message=message, at=at), reason=REASON)


def _row(claim: Claim, *, message: str, at: str) -> bytes:
    try:
        head, request = _decode_head(claim.prompt), claim.prompt
    except msgspec.MsgspecError:
        head, request = _NO_HEAD, msgspec.json.encode(claim.prompt.decode("utf-8", "replace"))
    row = msgspec.json.encode(
        FailureRow(
            id=head.id,
            sample=head.sample,
            key=claim.key.hex(),
            fingerprint=claim.fingerprint.hex(),
            line=head.line,
            source=head.source,
            outcome="cancelled",
            reason=REASON,
            status=None,
            message=message,
            server="",
            try_=claim.try_,
            attempts=claim.attempts,
            failed_at=at,
            request=msgspec.Raw(request),
        )
    )
    # A line break can only stand between two JSON tokens of the request, where a blank is as good.
    return row.replace(b"\n", b" ").replace(b"\r", b" ")
