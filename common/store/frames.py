"""Compress and decompress rows, and name them by their content. Pure.

One zstd frame an object, level 3, with content size and checksum: every reader of .zst takes that
form, also those that do not read across frames. What is read may come from others: any number of
frames, with or without sizes, and ten bytes that claim to be a terabyte. So no object is unpacked
beyond `MOST_UNPACKED_BYTES`; no batch of ours comes near it.
"""

from contextlib import suppress

import zstandard

from common.errors import StoreDamagedError
from common.ids import rows_sha256

LEVEL = 3
DIGEST_DIGITS = 16
MOST_BATCH_BYTES = 512 << 20
"""What a user may ask a batch to hold; the rows that pass it last may add as much again."""

MOST_UNPACKED_BYTES = 2 * MOST_BATCH_BYTES
_INPUT_STEP_BYTES = 1 << 11
"""Small, since four bytes may stand for 128 KiB."""


def compress(rows: bytes) -> bytes:
    """Compress to one frame."""
    # Made anew each time: a compressor must not be used by two threads, and making one is cheap.
    return zstandard.ZstdCompressor(
        level=LEVEL, write_checksum=True, write_content_size=True
    ).compress(rows)


def decompress(data: bytes) -> bytes:
    """Decompress all frames of `data`, in order; skippable frames hold nothing.

    Raises:
        StoreDamagedError: Not zstd, cut off, another content than was compressed, or more than
            `MOST_UNPACKED_BYTES`.
    """
    with suppress(zstandard.ZstdError):
        # What `compress` made goes in one call, at five times the speed; the rest, and all errors,
        # is for the careful way. An empty first frame would hide what follows it. The room is
        # taken for what the frame says before any of it is read, so what it says is judged first.
        if 0 < zstandard.frame_content_size(data) <= MOST_UNPACKED_BYTES:
            return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    try:
        return b"".join(_decompressed(data))
    except zstandard.ZstdError as error:
        raise StoreDamagedError(f"{len(data)} bytes are no whole zstd frames: {error}") from error


def too_large(data: bytes) -> StoreDamagedError:
    """Say that an object unpacks to more than any of ours."""
    return StoreDamagedError(
        f"{len(data):,} bytes unpack to more than the {MOST_UNPACKED_BYTES:,} that an object may "
        "hold: Headrace did not write it; restore it from a version or a copy"
    )


def digest_name(rows: bytes) -> tuple[str, str]:
    """Hash uncompressed rows.

    Returns:
        The sha256 that manifests hold (64 hex digits), and the part of it that names end in (16).
    """
    digest = rows_sha256(rows)
    return digest, digest[:DIGEST_DIGITS]


def _decompressed(data: bytes) -> list[bytes]:
    parts: list[bytes] = []
    room_bytes = MOST_UNPACKED_BYTES
    frame = zstandard.ZstdDecompressor().decompressobj()
    unfinished = False
    # In steps, because each end of a frame copies what follows it.
    for start in range(0, len(data), _INPUT_STEP_BYTES):
        rest = data[start : start + _INPUT_STEP_BYTES]
        while rest:
            parts.append(frame.decompress(rest))
            room_bytes -= len(parts[-1])
            if room_bytes < 0:
                raise too_large(data)
            rest = frame.unused_data
            unfinished = not frame.eof
            if frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
    if unfinished:
        raise zstandard.ZstdError("the last frame is cut off")
    return parts
