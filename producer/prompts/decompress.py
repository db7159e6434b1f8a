"""Turn an input into chunks of plain bytes, judged by its content and never by its name.

Gzip and zstd are read as streams, any number of members; one that is cut short refuses the file,
since nobody can tell how much is missing.
"""

import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Protocol

import zstandard

from producer.prompts.verdicts import FileRefusedError, Reason

HEAD_BYTES = 512
GZIP_CHUNK_BYTES = 65_536
ZSTD_CHUNK_BYTES = 4_096
"""How much is decompressed at once. Small for zstd, whose blocks may grow 30,000-fold."""

PARQUET = b"PAR1"
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_BOM = b"\xef\xbb\xbf"

_UNUSABLE: tuple[tuple[bytes, Reason, str], ...] = (
    (b"PARE", "parquet", "is encrypted Parquet: decrypt it, or write it as JSON lines"),
    (b"ARROW1", "not_jsonl", "is Arrow: write it as Parquet or JSON lines"),
    (b"PK\x03\x04", "archive", "is a zip archive: unpack it and give the file inside"),
    (
        b"BZh",
        "unsupported_compression",
        "is compressed with bzip2: use gzip or zstd, or unpack it",
    ),
    (b"\xfd7zXZ\x00", "unsupported_compression", "is compressed with xz: use gzip or zstd"),
    (b"\xff\xfe\x00\x00", "encoding", "is UTF-32: convert it to UTF-8"),
    (b"\x00\x00\xfe\xff", "encoding", "is UTF-32: convert it to UTF-8"),
    (b"\xff\xfe", "encoding", "is UTF-16: convert it, for example iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "encoding", "is UTF-16: convert it, for example iconv -f UTF-16 -t UTF-8"),
    (b"{\x00", "encoding", "is UTF-16: convert it, for example iconv -f UTF-16LE -t UTF-8"),
    (b"\x00{", "encoding", "is UTF-16: convert it, for example iconv -f UTF-16BE -t UTF-8"),
)
_TAR_AT = 257


class _Decoder(Protocol):
    """What zlib's and zstandard's decompression objects have in common."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def unpacked(chunks: Iterator[bytes], source: str) -> tuple[bool, Iterator[bytes]]:
    """Tell whether the content is Parquet, and give it in chunks of any size.

    What is not Parquet is UTF-8 text, and comes without a mark at its start.

    Args:
        chunks: The bytes as they are stored.
        source: How a person named the input, for messages.

    Raises:
        FileRefusedError: It is no text, or is compressed and damaged; the latter while iterating.
    """
    head, chunks = _with_head(chunks)
    if head.startswith(_GZIP):
        head, chunks = _with_head(_decompressed(chunks, _gzip_decoder, source=source))
    elif head.startswith(_ZSTD):
        head, chunks = _with_head(_decompressed(chunks, _zstd_decoder, source=source))
    _refuse_unusable(head, source)
    if head.startswith(PARQUET):
        return True, chunks
    return False, _without_mark(chunks) if head.startswith(_BOM) else chunks


def _refuse_unusable(head: bytes, source: str) -> None:
    for magic, reason, message in _UNUSABLE:
        if head.startswith(magic):
            raise FileRefusedError(source, reason, message)
    if head[_TAR_AT : _TAR_AT + 5] == b"ustar":
        raise FileRefusedError(source, "archive", "is a tar archive: give the file inside")
    if head.startswith((_GZIP, _ZSTD)):
        raise FileRefusedError(source, "archive", "is compressed twice: unpack it once")


def _with_head(chunks: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """Read ahead for the first HEAD_BYTES; give them, and everything from the start."""
    taken: list[bytes] = []
    length = 0
    for chunk in chunks:
        taken.append(chunk)
        length += len(chunk)
        if length >= HEAD_BYTES:
            break
    return b"".join(taken)[:HEAD_BYTES], chain(taken, chunks)


def _without_mark(chunks: Iterator[bytes]) -> Iterator[bytes]:
    start = b""
    for chunk in chunks:
        start += chunk
        if len(start) >= len(_BOM):
            break
    yield start[len(_BOM) :]
    yield from chunks


def _gzip_decoder() -> tuple[_Decoder, int]:
    return zlib.decompressobj(wbits=31), GZIP_CHUNK_BYTES


def _zstd_decoder() -> tuple[_Decoder, int]:
    return zstandard.ZstdDecompressor().decompressobj(), ZSTD_CHUNK_BYTES


def _decompressed(
    chunks: Iterator[bytes], make: Callable[[], tuple[_Decoder, int]], *, source: str
) -> Iterator[bytes]:
    """Decompress any number of members, one after the other."""
    decoder: _Decoder | None = None
    step = 0
    for chunk in chunks:
        waiting = memoryview(chunk)
        while waiting:
            if decoder is None:
                # Tape and block devices pad the end of a gzip with zeros; gzip ignores them.
                if waiting[0] == 0:
                    waiting = waiting[1:]
                    continue
                decoder, step = make()
            piece, waiting = bytes(waiting[:step]), waiting[step:]
            try:
                text = decoder.decompress(piece)
            except (zlib.error, zstandard.ZstdError) as error:
                raise FileRefusedError(
                    source, "corrupt", "is damaged: what was compressed cannot be read back"
                ) from error
            if text:
                yield text
            if decoder.eof:
                waiting = memoryview(decoder.unused_data + bytes(waiting))
                decoder = None
    if decoder is not None:
        raise FileRefusedError(
            source, "truncated", "is truncated: the compressed data ends too early; copy it again"
        )
