"""Frames: what is compressed comes back, and what is cut off or altered is noticed."""

import io

import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import StoreDamagedError
from common.store.frames import compress, decompress

ROWS = b'{"id":"a","text":"\xc3\xa9"}\n' * 50_000
SKIPPABLE = bytes.fromhex("502a4d18") + (5).to_bytes(4, "little") + b"extra"


def streamed(rows: bytes) -> bytes:
    """One frame without content size, as a streaming writer makes it."""
    buffer = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(buffer, closefd=False) as writer:
        writer.write(rows)
    return buffer.getvalue()


@given(parts=st.lists(st.binary(max_size=300), max_size=8))
@example(parts=[])
@example(parts=[b""])
@example(parts=[b"", b"after an empty frame"])
@example(parts=[ROWS, b"", ROWS])
def test_any_number_of_frames_comes_back_in_order(parts: list[bytes]) -> None:
    whole = b"".join(parts)

    assert decompress(compress(whole)) == whole
    assert decompress(b"".join(compress(part) for part in parts)) == whole
    assert decompress(b"".join(streamed(part) + SKIPPABLE for part in parts)) == whole


def test_a_frame_says_its_size_and_carries_a_checksum() -> None:
    parameters = zstandard.get_frame_parameters(compress(ROWS))

    assert parameters.content_size == len(ROWS)
    assert parameters.has_checksum


def test_equal_rows_give_equal_bytes() -> None:
    assert compress(ROWS) == compress(ROWS)


@pytest.mark.parametrize(
    "frames", [compress(ROWS), streamed(ROWS), compress(b"a") + compress(ROWS)]
)
def test_every_cut_is_noticed(frames: bytes) -> None:
    for length in range(1, len(frames), max(1, len(frames) // 50)):
        if length != len(compress(b"a")):
            with pytest.raises(StoreDamagedError):
                decompress(frames[:length])


def test_an_altered_byte_is_noticed() -> None:
    frame = bytearray(compress(ROWS))
    frame[len(frame) // 2] ^= 1

    with pytest.raises(StoreDamagedError):
        decompress(bytes(frame))


def test_text_is_no_frame() -> None:
    with pytest.raises(StoreDamagedError):
        decompress(b'{"id":"a"}\n')
