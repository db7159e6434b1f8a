"""Pack records for the reconcile's scripts: 45 bytes each, read there by `struct.unpack`. Pure."""

import struct
from collections.abc import Iterable, Iterator

from common.models import Record
from common.streams import LETTERS

CALL_RECORDS = 1_000
"""Records a call: a millisecond-scale script, so other clients never wait long."""

_RECORD = struct.Struct(">16s8scIQQ")


def packed(records: Iterable[Record]) -> Iterator[bytes]:
    """Pack records for the scripts, `CALL_RECORDS` a piece."""
    step: list[bytes] = []
    for record in records:
        step.append(pack(record))
        if len(step) == CALL_RECORDS:
            yield b"".join(step)
            step.clear()
    if step:
        yield b"".join(step)


def pack(record: Record) -> bytes:
    """Pack key, fingerprint, outcome letter, try, prompt tokens, completion tokens."""
    return _RECORD.pack(
        record.key,
        record.fingerprint,
        LETTERS[record.outcome].encode(),
        record.try_,
        record.input_tokens,
        record.output_tokens,
    )
