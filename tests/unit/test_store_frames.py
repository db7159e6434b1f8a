"""Frames: what is compressed comes back, and what is cut off or altered is noticed."""

import io
import tracemalloc

import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import StoreDamagedError
from common.store import frames
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
    "whole", [compress(ROWS), streamed(ROWS), compress(b"a") + compress(ROWS)]
)
def test_every_cut_is_noticed(whole: bytes) -> None:
    for length in range(1, len(whole), max(1, len(whole) // 50)):
        if length != len(compress(b"a")):
            with pytest.raises(StoreDamagedError):
                decompress(whole[:length])


def test_an_altered_byte_is_noticed() -> None:
    frame = bytearray(compress(ROWS))
    frame[len(frame) // 2] ^= 1

    with pytest.raises(StoreDamagedError):
        decompress(bytes(frame))


def test_text_is_no_frame() -> None:
    with pytest.raises(StoreDamagedError):
        decompress(b'{"id":"a"}\n')


def claiming(size_bytes: int) -> bytes:
    """A frame of a few bytes that says it unpacks to so many."""
    return bytes.fromhex("28b52ffde0") + size_bytes.to_bytes(8, "little") + bytes(8)


BOMBS = {
    "one frame": compress(bytes(2_000_000)),
    "without its size": streamed(bytes(2_000_000)),
    "many small frames": compress(bytes(20_000)) * 100,
    "behind an empty one": compress(b"") + streamed(bytes(2_000_000)),
    "says so and is not": claiming(1 << 50),
    "says the most that can be said": claiming((1 << 63) - 1),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_nothing_is_unpacked_beyond_what_an_object_may_hold(
    bomb: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "MOST_UNPACKED_BYTES", 1_000_000)

    with pytest.raises(StoreDamagedError, match=r"more than the 1,000,000 that|no whole zstd"):
        decompress(bomb)


def test_few_bytes_that_stand_for_many_are_unpacked_step_by_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "MOST_UNPACKED_BYTES", 1_000_000)
    buffer = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(buffer, closefd=False) as writer:
        for _ in range(64):
            writer.write(bytes(8 << 20))
    bomb = buffer.getvalue()
    assert len(bomb) < 100_000

    tracemalloc.start()
    try:
        with pytest.raises(StoreDamagedError, match="unpack to more than"):
            decompress(bomb)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < 256 << 20, "half of what it stands for"


def test_rows_of_the_limit_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MOST_UNPACKED_BYTES", len(ROWS))

    assert decompress(compress(ROWS)) == ROWS
    assert decompress(streamed(ROWS)) == ROWS
