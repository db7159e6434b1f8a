"""Compress and decompress rows, and name them by their content. Pure.

One zstd frame an object, level 3, with content size and checksum: every reader of .zst takes that
form, also those that do not read across frames. What is read may come from others: any number of
frames, with or without sizes.
"""

from contextlib import suppress

import zstandard

from common.errors import StoreDamagedError
from common.ids import rows_sha256

LEVEL = 3
DIGEST_DIGITS = 16
_INPUT_STEP_BYTES = 1 << 17


def compress(rows: bytes) -> bytes:
    """Compress to one frame."""
    # Made anew each time: a compressor must not be used by two threads, and making one is cheap.
    return zstandard.ZstdCompressor(
        level=LEVEL, write_checksum=True, write_content_size=True
    ).compress(rows)


def decompress(data: bytes) -> bytes:
    """Decompress all frames of `data`, in order; skippable frames hold nothing.

    Raises:
        StoreDamagedError: Not zstd, cut off, or another content than was compressed.
    """
    with suppress(zstandard.ZstdError):
        # What `compress` made goes in one call, at five times the speed; the rest, and all errors,
        # is for the careful way. An empty first frame would hide what follows it.
        if zstandard.frame_content_size(data) > 0:
            return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    try:
        return b"".join(_decompressed(memoryview(data)))
    except zstandard.ZstdError as error:
        raise StoreDamagedError(f"{len(data)} bytes are no whole zstd frames: {error}") from error


def digest_name(rows: bytes) -> tuple[str, str]:
    """Hash uncompressed rows.

    Returns:
        The sha256 that manifests hold (64 hex digits), and the part of it that names end in (16).
    """
    digest = rows_sha256(rows)
    return digest, digest[:DIGEST_DIGITS]


def _decompressed(data: memoryview) -> list[bytes]:
    parts: list[bytes] = []
    frame = zstandard.ZstdDecompressor().decompressobj()
    unfinished = False
    # In steps, because each end of a frame copies what follows it.
    for start in range(0, len(data), _INPUT_STEP_BYTES):
        rest = bytes(data[start : start + _INPUT_STEP_BYTES])
        while rest:
            parts.append(frame.decompress(rest))
            rest = frame.unused_data
            unfinished = not frame.eof
            if frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
    if unfinished:
        raise zstandard.ZstdError("the last frame is cut off")
    return parts
