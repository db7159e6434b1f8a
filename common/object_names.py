"""Make and read names of objects that hold a number or a hash; `common.names` lists all names."""

import re
from typing import Literal

from common.names import INPUTS, MANIFEST, MARKS

_INPUTS = re.compile(
    r"inputs/\d{8,}-(?:(?P<seal>seal-[0-9a-f]{16}\.json)|[0-9a-f]{16}\.jsonl\.zst)"
)
_MARK = re.compile(r"marks/(?P<id>\d{13,}-(?:hand|self)-[0-9a-f]{12})\.json")
_PART = re.compile(
    r"(?P<partition>\d{2,})-(?P<seq>\d{8,})(?:-(?P<hash>[0-9a-f]{16}))?\.\w+(?:\.\w+)?"
)


def inputs_object(seq: int, digest: str) -> str:
    """Name an object of accepted prompts; `digest` is 16 hex digits of its rows' sha256."""
    return f"{INPUTS}{seq:08d}-{digest}.jsonl.zst"


def seal_object(seq: int, digest: str) -> str:
    """Name the object in which a producer says that it has ended."""
    return f"{INPUTS}{seq:08d}-seal-{digest}.json"


def inputs_kind(object_name: str) -> Literal["rows", "seal", ""]:
    """Tell what an object of `inputs/` is by its name; empty for one that is not ours."""
    match = _INPUTS.fullmatch(object_name)
    if match is None:
        return ""
    return "seal" if match["seal"] else "rows"


def mark_object(mark_id: str) -> str:
    """Name the object of a mark."""
    return f"{MARKS}{mark_id}.json"


def mark_of(object_name: str) -> str:
    """Read the id of a mark back from its object's name; empty for one that is not ours."""
    match = _MARK.fullmatch(object_name)
    return match["id"] if match else ""


def part_object(folder: str, partition: int, seq: int, digest: str, suffix: str) -> str:
    """Name one object of a batch, for example `shards/00-00000007-0123456789abcdef.jsonl.zst`."""
    return f"{folder}{partition:02d}-{seq:08d}-{digest}.{suffix}"


def manifest_object(partition: int, seq: int, digest: str | None = None) -> str:
    """Name a manifest; with `digest` (16 hex digits) where the store ignores conditions."""
    ending = f"-{digest}" if digest else ""
    return f"{MANIFEST}{partition:02d}-{seq:08d}{ending}.json"


def parse_part(name: str) -> tuple[int, int] | None:
    """Read (partition, sequence) back from the name of a batch's object; None for another."""
    match = _PART.fullmatch(name.rpartition("/")[2])
    return (int(match["partition"]), int(match["seq"])) if match else None
