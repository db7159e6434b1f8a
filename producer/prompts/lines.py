"""Cut chunks of bytes into lines: binary, bounded in memory, and quick with short lines."""

from collections.abc import Iterable, Iterator

import msgspec

LINE_LIMIT_BYTES = 64 * 1024 * 1024


class Oversize(msgspec.Struct, frozen=True):
    """A line that was too long to keep; it was skipped."""

    size_bytes: int


def line_batches(
    chunks: Iterable[bytes], *, limit_bytes: int = LINE_LIMIT_BYTES
) -> Iterator[list[bytes] | Oversize]:
    """Cut at every line feed; what stands after the last one is a line too unless it is empty.

    Args:
        chunks: The content in pieces of any size.
        limit_bytes: A longer line is skipped and reported instead of kept.

    Yields:
        Lists of whole lines without their line feed, and an `Oversize` in its place.
    """
    held: list[bytes] = []
    length = 0
    for chunk in _pieces(chunks, limit_bytes):
        cut = chunk.find(b"\n")
        if cut < 0:
            held.append(chunk)
            length += len(chunk)
            if length > limit_bytes:
                held.clear()
            continue
        lines = chunk[cut + 1 :].split(b"\n")
        tail = lines.pop()
        first = _whole(held, chunk[:cut], length=length + cut, limit_bytes=limit_bytes)
        # Before the yield: the pieces of a long line are not kept beside it.
        held, length = [tail], len(tail)
        yield first
        if lines:
            yield lines
    if length:
        yield _whole(held, b"", length=length, limit_bytes=limit_bytes)


def _pieces(chunks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Cut larger chunks, so that no line within one can be over the limit."""
    for chunk in chunks:
        if len(chunk) <= size:
            yield chunk
            continue
        for at in range(0, len(chunk), size):
            yield chunk[at : at + size]


def _whole(
    held: list[bytes], end: bytes, *, length: int, limit_bytes: int
) -> list[bytes] | Oversize:
    if length > limit_bytes:
        return Oversize(length)
    return [b"".join([*held, end])]
