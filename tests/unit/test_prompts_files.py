"""A file is judged by its content, read in bounded pieces, and refused whole with one message."""

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import UsageError
from producer.prompts.decompress import unpacked
from producer.prompts.lines import Oversize, line_batches
from producer.prompts.reader import FileReader
from producer.prompts.rows import RowChecker, RowRules
from producer.prompts.verdicts import FileRefusedError, Reject

ROWS = b'{"id":"a","prompt":"One?"}\n{"id":"b","prompt":"Two?"}\n'


def pieces(data: bytes, size: int = 7) -> Iterator[bytes]:
    return iter([data[at : at + size] for at in range(0, len(data), size)])


def read_back(data: bytes, size: int = 7) -> bytes:
    parquet, chunks = unpacked(pieces(data, size), "x")
    assert not parquet
    return b"".join(chunks)


def read(path: Path) -> tuple[list[tuple[int, str]], list[Reject], FileReader]:
    rejects: list[Reject] = []
    reader = FileReader(
        str(path),
        RowChecker(RowRules(max_tokens_given=True)),
        on_reject=lambda reject, _: rejects.append(reject),
    )
    rows = [(line, json.loads(row.id_json) if row.id_json else "") for line, row in reader.rows()]
    return rows, rejects, reader


def refusal(tmp_path: Path, data: bytes) -> FileRefusedError:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(FileRefusedError) as caught:
        read(tmp_path / "x")
    return caught.value


def verdicts(tmp_path: Path, data: bytes) -> list[str]:
    """The verdict of each line that is not blank, in order."""
    (tmp_path / "x").write_bytes(data)
    rows, rejects, _ = read(tmp_path / "x")
    told = [(line, "ok") for line, _ in rows]
    told += [(reject.line or 0, reject.reason) for reject in rejects]
    return [verdict for _, verdict in sorted(told)]


# --- compression ---------------------------------------------------------------------------------

Pack = Callable[[bytes], bytes]

packs: st.SearchStrategy[Pack] = st.sampled_from([gzip.compress, zstandard.compress])
texts = st.binary(max_size=3000).map(lambda raw: b"{ " + raw)


@given(members=st.lists(texts, min_size=1, max_size=4), pack=packs, size=st.integers(1, 600))
@example(members=[b"{ " + b"a" * 100_000, b"{ "], pack=zstandard.compress, size=600)
def test_any_number_of_members_in_any_pieces_is_read_whole(
    members: list[bytes], pack: Pack, size: int
) -> None:
    packed = b"".join(pack(member) for member in members)

    assert read_back(packed, size) == b"".join(members)


@given(pack=packs, data=st.data())
def test_a_compressed_file_that_is_cut_anywhere_is_refused(
    pack: Pack, data: st.DataObject
) -> None:
    packed = pack(ROWS) + pack(ROWS)
    whole = len(pack(ROWS))
    end = data.draw(st.integers(4, len(packed) - 1).filter(lambda cut: cut != whole))

    with pytest.raises(FileRefusedError) as caught:
        read_back(packed[:end])

    assert caught.value.reason == "truncated"


@given(pack=packs, data=st.data())
def test_a_damaged_file_is_never_taken_for_another_text(pack: Pack, data: st.DataObject) -> None:
    packed = bytearray(pack(ROWS))
    at = data.draw(st.integers(10, len(packed) - 1))
    packed[at] ^= 1 << data.draw(st.integers(0, 7))

    try:
        text = read_back(bytes(packed))
    except FileRefusedError as error:
        assert error.reason in {"corrupt", "truncated"}  # noqa: PT017 - either is right
    else:
        # zstandard.compress writes no checksum: damage inside a literal cannot be seen.
        assert pack is zstandard.compress or text == ROWS


def test_zeros_after_a_gzip_are_padding() -> None:
    assert read_back(gzip.compress(ROWS) + bytes(512)) == ROWS


def test_other_bytes_after_a_gzip_are_damage() -> None:
    with pytest.raises(FileRefusedError) as caught:
        read_back(gzip.compress(ROWS) + b"garbage")

    assert caught.value.reason == "corrupt"


@pytest.mark.parametrize(
    ("data", "reason", "word"),
    [
        (b"PARE....", "parquet", "encrypted"),
        (b"ARROW1..", "not_jsonl", "Arrow"),
        (b"PK\x03\x04....", "archive", "zip"),
        (b"BZh9....", "unsupported_compression", "bzip2"),
        (b"\xfd7zXZ\x00..", "unsupported_compression", "xz"),
        (ROWS.decode().encode("utf-16"), "encoding", "UTF-16"),
        (ROWS.decode().encode("utf-16-le"), "encoding", "UTF-16"),
        (ROWS.decode().encode("utf-16-be"), "encoding", "UTF-16"),
        (ROWS.decode().encode("utf-32"), "encoding", "UTF-32"),
        (gzip.compress(gzip.compress(ROWS, mtime=0), mtime=0), "archive", "twice"),
        (gzip.compress(b"PARE....", mtime=0), "parquet", "encrypted"),
        (b"x.jsonl".ljust(257, b"\0") + b"ustar\x0000", "archive", "tar"),
    ],
)
def test_what_is_no_text_is_refused_with_its_name(data: bytes, reason: str, word: str) -> None:
    with pytest.raises(FileRefusedError, match=word) as caught:
        read_back(data)

    assert caught.value.reason == reason


# --- lines ---------------------------------------------------------------------------------------


@given(st.binary().map(lambda raw: raw.replace(b"\r", b"\n")), st.integers(1, 9))
@example(b"a\n\nb", 1)
@example(b"\n", 1)
def test_lines_are_cut_at_every_line_feed_whatever_the_pieces(data: bytes, size: int) -> None:
    lines = [line for batch in line_batches(pieces(data, size)) for line in _lines_of(batch)]

    assert lines == data.split(b"\n")[: None if data and not data.endswith(b"\n") else -1]


def _lines_of(batch: list[bytes] | Oversize) -> list[bytes]:
    assert isinstance(batch, list)
    return batch


@pytest.mark.parametrize("size", [1, 4, 5, 6, 100])
@pytest.mark.parametrize("ending", [b"", b"\n", b"\nok"])
def test_a_line_over_the_limit_is_skipped_with_its_size(size: int, ending: bytes) -> None:
    data = b"ok\n" + b"x" * 21 + ending

    batches = list(line_batches(pieces(data, size), limit_bytes=20))

    assert Oversize(21) in batches
    kept = [line for batch in batches if isinstance(batch, list) for line in batch]
    assert kept == [b"ok"] * (1 + ending.endswith(b"ok"))


def test_a_row_of_eight_mib_is_accepted(tmp_path: Path) -> None:
    big = json.dumps({"id": "big", "prompt": "word " * (8 * 1024 * 1024 // 5)})
    (tmp_path / "x").write_text(f'{{"id":"a","prompt":"x"}}\n{big}\n{{"id":"c","prompt":"x"}}\n')

    rows, rejects, _ = read(tmp_path / "x")

    assert [name for _, name in rows] == ["a", "big", "c"]
    assert rejects == []


def test_a_row_over_64_mib_is_rejected_with_size_and_limit(tmp_path: Path) -> None:
    size = 64 * 1024 * 1024 + 1
    (tmp_path / "x").write_bytes(ROWS + b"x" * size + b"\n" + ROWS)

    rows, rejects, _ = read(tmp_path / "x")

    assert [line for line, _ in rows] == [1, 2, 4, 5]
    assert [(reject.line, reject.reason) for reject in rejects] == [(3, "too_large")]
    assert f"{size:,}" in rejects[0].message


# --- verdicts of files ---------------------------------------------------------------------------

ENDS = st.sampled_from([b"\n", b"\r\n", b"\n \t\r\n", b"\n\xef\xbb\xbf", b"\n\n"])


@given(ends=st.lists(ENDS, min_size=1, max_size=6), mark=st.booleans(), last=st.booleans())
def test_marks_and_windows_line_ends_change_no_row(
    tmp_path_factory: pytest.TempPathFactory, ends: list[bytes], *, mark: bool, last: bool
) -> None:
    text = b"\xef\xbb\xbf" * mark
    for number, end in enumerate(ends):
        text += b'{"id":"%d","prompt":"x"}' % number + end
    text = text.rstrip() if last else text
    path = tmp_path_factory.mktemp("ends") / "x"
    path.write_bytes(text)

    rows, rejects, reader = read(path)

    assert [name for _, name in rows] == [str(number) for number in range(len(ends))]
    assert rejects == []
    lines = text.count(b"\n") + (not text.endswith(b"\n"))
    assert len(rows) + reader.blank == lines


def test_line_numbers_count_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b'\n{"prompt":"a"}\n \n5\n')

    rows, rejects, reader = read(tmp_path / "x")

    assert ([line for line, _ in rows], [reject.line for reject in rejects]) == ([2], [4])
    assert reader.blank == 2


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'[\n {"prompt":"a"}\n]\n', "json_array"),
        (b'[{"prompt":"a"},{"prompt":"b"}]\n', "json_array"),
        (b'\n[{"prompt":"a"},\n{"prompt":"b"}]', "json_array"),
        (b"[]", "json_array"),
        (b'{\n "prompt": "a"\n}\n', "not_jsonl"),
        (b'{"id": 1,\n "prompt": "a"}\n', "not_jsonl"),
        (b'{"prompt":"a"}\r{"prompt":"b"}\r', "line_ends"),
        (b"id,prompt\n1,Hello\n2,World\n", "not_jsonl"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "not_jsonl"),
        (b"\x1f", "not_jsonl"),
    ],
)
def test_a_file_of_another_form_gets_one_message(tmp_path: Path, data: bytes, reason: str) -> None:
    assert refusal(tmp_path, data).reason == reason


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'[1]\n{"prompt":"a"}\n', ["not_object", "ok"]),
        (b'[1]\n5\n{"prompt":"a"}\n', ["not_object", "not_object", "ok"]),
        (b'garbage\n{"prompt":"a"}\n', ["bad_json", "ok"]),
        (b'{"prompt":"a"},\n', ["bad_json"]),
        (b'{"prompt":"a', ["bad_json"]),
        (b'{"prompt":"a"}\n[{"prompt":"b"}]\n', ["ok", "not_object"]),
        (b'{"prompt":"a"}\n{\n', ["ok", "bad_json"]),
        (b'{"prompt":\r\n"a"}\n{"prompt":"b"}\n', None),
        (b'{"prompt":"\xe9"}\n{"prompt":"a"}\n', ["bad_utf8", "ok"]),
    ],
)
def test_a_bad_first_row_is_no_reason_to_refuse_the_file(
    tmp_path: Path, data: bytes, expected: list[str] | None
) -> None:
    if expected is None:
        assert refusal(tmp_path, data).reason == "not_jsonl"
    else:
        assert verdicts(tmp_path, data) == expected


def test_a_gzip_that_ends_too_early_counts_for_nothing(tmp_path: Path) -> None:
    packed = gzip.compress(b"".join(b'{"id":%d,"prompt":"x"}\n' % n for n in range(50_000)))

    error = refusal(tmp_path, packed[: len(packed) // 2])

    assert error.reason == "truncated"
    assert "truncated" in str(error)


@pytest.mark.parametrize("name", ["missing", "."])
def test_what_cannot_be_opened_is_a_wrong_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=str(tmp_path)):
        read(tmp_path / name)


def test_a_row_without_limit_names_its_line_and_the_flag(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b'{"prompt":"a","max_tokens":1}\n{"prompt":"b"}\n')
    reader = FileReader(str(tmp_path / "x"), RowChecker(RowRules()), on_reject=lambda *_: None)

    with pytest.raises(UsageError, match=r"line 2: .*--max-tokens"):
        list(reader.rows())


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (b'{"id":"b","prompt":5}', "b"),
        (b'{"custom_id":7,"prompt":5}', 7),
        (b'{"id":"\\ud83d","prompt":"x"}', None),
        (b'{"id":[1],"prompt":"x"}', None),
        (b'{"id":"line\\nbreak","prompt":5}', None),
    ],
)
def test_a_reject_tells_the_id_where_it_can_be_printed(
    tmp_path: Path, row: bytes, told: object
) -> None:
    (tmp_path / "x").write_bytes(ROWS + row)

    _, rejects, _ = read(tmp_path / "x")

    assert [reject.id for reject in rejects] == [told]
