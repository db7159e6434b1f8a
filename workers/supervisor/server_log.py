"""The log of a server: where each start begins in it, and what was written since."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from common.utc import utc_now

READ_BYTES = 1 << 20
_BEGINS = "=== headrace launches SGLang "


def heading(arguments: Sequence[str], version: str) -> str:
    """Give the line that stands before what a start writes."""
    return f"{_BEGINS}{version} at {utc_now()}: {shlex.join(arguments)}"


def since_start(path: Path) -> str:
    """Read what was written since the last start, of that the last megabyte.

    Args:
        path: The newest file; the one before it counts too.

    Returns:
        Empty where there is none.
    """
    text = ""
    for each in (path, path.with_name(f"{path.name}.1")):
        text = _end_of(each, READ_BYTES - len(text)) + text
        _, begins, after = text.rpartition(_BEGINS)
        if begins:
            return after.partition("\n")[2]
        if len(text) >= READ_BYTES:
            break
    return text


def _end_of(path: Path, most_bytes: int) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - max(0, most_bytes)))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
