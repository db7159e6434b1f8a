"""The reader function of protocol.md §1, and the text form of `keys/`. Pure.

Which of a key's terminal records counts: a completion beats failure and cancellation, then the
highest try wins. Verify, export, rebuild, the counters and the end test all use this one function.

A line of `keys/`, hex and decimal, separated by tabs:

    key (32)  fingerprint (16)  try  outcome  prompt tokens  completion tokens
"""

from collections.abc import Iterable
from typing import cast

from common.models import Outcome, Record


def better(one: Record, other: Record) -> Record:
    """Choose between two records of one key; the first of two equals."""
    return other if rank(other) > rank(one) else one


def rank(record: Record) -> tuple[bool, int]:
    """Order a key's records: the greatest is the current one."""
    return record.outcome == "completed", record.try_


def current_records(records: Iterable[Record]) -> dict[bytes, Record]:
    """Give each key's current record."""
    current: dict[bytes, Record] = {}
    for record in records:
        known = current.get(record.key)
        if known is None or rank(record) > rank(known):
            current[record.key] = record
    return current


def key_line(record: Record) -> bytes:
    """Write a record as a line of `keys/`, without newline."""
    return (
        f"{record.key.hex()}\t{record.fingerprint.hex()}\t{record.try_}\t{record.outcome}"
        f"\t{record.input_tokens}\t{record.output_tokens}"
    ).encode()


def parse_key_line(line: bytes) -> Record:
    """Read a line of `keys/`, with or without its newline.

    Raises:
        ValueError: It is none.
    """
    key, fingerprint, try_, outcome, input_tokens, output_tokens = line.decode().split("\t")
    if outcome not in {"completed", "failed", "cancelled"}:
        raise ValueError(f"no outcome: {outcome!r}")
    return Record(
        key=bytes.fromhex(key),
        fingerprint=bytes.fromhex(fingerprint),
        try_=int(try_),
        outcome=cast("Outcome", outcome),
        input_tokens=int(input_tokens),
        output_tokens=int(output_tokens),
    )
