"""A Parquet file gives the rows that JSON lines would, or says what JSON cannot hold and where."""

import base64
import gzip
import importlib
import io
import json
import random
from collections.abc import Iterator
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from producer.prompts import parquet
from producer.prompts.parquet import ParquetInput
from producer.prompts.reader import FileReader
from producer.prompts.rows import RowChecker, RowRules
from producer.prompts.verdicts import FileRefusedError, Reject, RowRejectedError

pa: Any = importlib.import_module("pyarrow")
pq: Any = importlib.import_module("pyarrow.parquet")

Rows = list[dict[str, Any]]


def written(table: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, **options)
    return file.getvalue()


def found(data: bytes) -> list[Any]:
    return [row for batch in ParquetInput(io.BytesIO(data), "x").batches() for row in batch]


def column(values: Any, kind: Any = None) -> list[Any]:
    """What becomes of the values of a column; of a refused row its error."""
    array = values if isinstance(values, pa.Array) else pa.array(values, kind)
    rows = found(written(pa.table({"x": array})))
    return [row if isinstance(row, RowRejectedError) else row.get("x", "absent") for row in rows]


def read(path: Path) -> tuple[list[tuple[int, Any]], list[Reject], FileReader]:
    rejects: list[Reject] = []
    reader = FileReader(
        str(path),
        RowChecker(RowRules(max_tokens_given=True)),
        on_reject=lambda reject, _: rejects.append(reject),
    )
    return [*reader.rows()], rejects, reader


# --- values --------------------------------------------------------------------------------------

BERLIN = pa.timestamp("us", "Europe/Berlin")


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (pa.string(), ["é\0", "", None], ["é\0", "", "absent"]),
        (pa.large_string(), ["x"], ["x"]),
        (pa.string_view(), ["x", None], ["x", "absent"]),
        (pa.bool_(), [True, False], [True, False]),
        (pa.int8(), [-1, None], [-1, "absent"]),
        (pa.uint64(), [2**64 - 1], [2**64 - 1]),
        (pa.float32(), [0.5, -0.0], [0.5, -0.0]),
        (pa.float16(), [0.5, None], [0.5, "absent"]),
        (pa.float64(), [5e-324, 1e308], [5e-324, 1e308]),
        (pa.decimal128(38, 0), [Decimal(10**37 + 1)], [10**37 + 1]),
        (pa.decimal128(10, 2), [Decimal("1.50"), Decimal("3.00"), None], [1.5, 3, "absent"]),
        (pa.date32(), [date(2026, 1, 2)], ["2026-01-02"]),
        (pa.time64("us"), [time(1, 2, 3, 4)], ["01:02:03.000004"]),
        (pa.timestamp("ns"), [1], ["1970-01-01T00:00:00.000000001"]),
        (BERLIN, [datetime(2026, 1, 2, 3, tzinfo=UTC)], ["2026-01-02T03:00:00.000000Z"]),
        (pa.null(), [None], ["absent"]),
        (pa.list_(pa.int64()), [[1, None], [], None], [[1, None], [], "absent"]),
        (pa.large_list(pa.string()), [["a"]], [["a"]]),
        (pa.list_(pa.int64(), 2), [[1, 2], None, [3, 4]], [[1, 2], "absent", [3, 4]]),
        (pa.struct([("a", pa.int64())]), [{"a": None}, None], [{}, "absent"]),
        (pa.map_(pa.string(), pa.int64()), [[("a", None)], []], [{"a": None}, {}]),
        (pa.dictionary(pa.int8(), pa.string()), ["a", None, "a"], ["a", "absent", "a"]),
    ],
)
def test_each_type_that_json_has_keeps_its_values(
    kind: Any, values: list[Any], expected: list[Any]
) -> None:
    got = column(values, kind)

    assert [(type(value), value) for value in got] == [(type(x), x) for x in expected]
    assert json.dumps(got) == json.dumps(expected)


@pytest.mark.parametrize(
    ("kind", "values", "word"),
    [
        (pa.binary(), [b"x", None, b"y"], "binary"),
        (pa.binary(2), [b"xx", None, b"yy"], "binary"),
        (pa.duration("s"), [1, None, 2], "duration"),
        (pa.float64(), [float("nan"), None, float("inf")], "NaN"),
        (pa.list_(pa.float32()), [[float("nan")], None, [1.0, float("inf")]], "NaN"),
        (pa.decimal128(38, 20), [Decimal("0.12345678901234567891"), None, Decimal("1e-20") + 1],
         "decimal"),
        (pa.map_(pa.string(), pa.int8()), [[("a", 1), ("a", 2)], None, [("b", 1), ("b", 1)]],
         "twice"),
        (pa.map_(pa.int8(), pa.int8()), [[(1, 1)], None, [(2, 2)]], "keys"),
    ],
)  # fmt: skip
def test_what_json_cannot_hold_refuses_its_row_alone_and_names_the_column(
    kind: Any, values: list[Any], word: str
) -> None:
    first, absent, last = column(values, kind)

    assert absent == "absent"
    for error in (first, last):
        assert isinstance(error, RowRejectedError)
        assert error.reason == "bad_type"
        assert word in error.message
        assert "column x" in error.message


def test_text_that_is_no_utf8_refuses_its_row() -> None:
    raw = pa.array([b"good", b"\xff\xfe", None], pa.binary())
    text = pa.StringArray.from_buffers(3, *raw.buffers()[1:], raw.buffers()[0], 1)

    good, bad, absent = column(text)

    assert (good, bad.reason, absent) == ("good", "bad_utf8", "absent")


def test_a_null_that_only_the_schema_put_there_is_no_member() -> None:
    turns = [
        {"role": "user", "content": "Hi", "tool_calls": None, "name": None},
        {"role": "assistant", "content": None, "name": "n",
         "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}", "x": None}}]},
        {"role": "user", "content": "Go on", "tool_calls": None, "name": None},
    ]  # fmt: skip

    [row] = found(written(pa.table({"id": ["a"], "messages": [turns], "seed": pa.nulls(1)})))

    assert row == {
        "id": "a",
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "name": "n",
             "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "user", "content": "Go on"},
        ],
    }  # fmt: skip


# Columns whose JSON Arrow types by itself: no column that mixes types, no map.
members: st.SearchStrategy[Any] = st.recursive(
    st.lists(st.none() | st.text(), min_size=3, max_size=3)
    | st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=3)
    | st.lists(
        st.none() | st.floats(allow_nan=False, allow_infinity=False), min_size=3, max_size=3
    ),
    lambda inner: st.dictionaries(st.text(min_size=1, max_size=3), inner, min_size=1).map(
        lambda parts: [
            {name: values[at] for name, values in parts.items()} for at in range(3)
        ]
    )
    | inner.map(lambda values: [values, None, values[:1]]),
    max_leaves=5,
)  # fmt: skip


def without_absent(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_absent(each) for name, each in value.items() if each is not None}
    return [without_absent(each) for each in value] if isinstance(value, list) else value


@given(
    columns=st.dictionaries(st.text(max_size=3), members, min_size=1, max_size=4),
    group=st.integers(1, 3),
    version=st.sampled_from(["1.0", "2.0"]),
)
@example(columns={"x": [[{"a": "b"}, None], None, []]}, group=1, version="1.0")
def test_nested_columns_come_back_as_they_were_whatever_the_layout(
    columns: dict[str, Any], group: int, version: str
) -> None:
    table = pa.table({name: pa.array(values) for name, values in columns.items()})

    rows = found(written(table, row_group_size=group, data_page_version=version))

    assert rows == without_absent(table.to_pylist())


def test_a_bad_row_and_the_ends_of_batches_move_no_value_to_another_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parquet, "BATCH_ROWS", 7)
    numbers = range(40)
    text, number = pa.string(), pa.int64()
    columns = {
        "n": pa.array(numbers),
        "map": pa.array([None if n % 5 == 0 else [(f"k{n}", n), ("z", None)][: n % 3]
                         for n in numbers], pa.map_(text, number)),
        "list": pa.array([None if n % 4 == 0 else [{"a": n, "b": [str(n)] * (n % 3)}] * (n % 2)
                          for n in numbers]),
        "pair": pa.array([None if n % 3 == 0 else [n, -n] for n in numbers],
                         pa.list_(number, 2)),
        "word": pa.array([str(n % 3) for n in numbers]).dictionary_encode(),
        "bad": pa.array([float("nan") if n in {3, 17} else None for n in numbers]),
    }  # fmt: skip

    rows = found(written(pa.table(columns)))

    assert [n for n in numbers if isinstance(rows[n], RowRejectedError)] == [3, 17]
    for n in (*range(3), *range(4, 17), *range(18, 40)):
        items = {name: column[n].as_py() for name, column in columns.items() if column[n].is_valid}
        if "map" in items:
            items["map"] = dict(items["map"])
        assert rows[n] == items


# --- files ---------------------------------------------------------------------------------------


def questions(count: int) -> Any:
    return pa.table({"id": [*range(count)], "prompt": [f"count to {n}" for n in range(count)]})


def test_rows_are_numbered_over_all_row_groups_and_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "BATCH_ROWS", 7)
    texts = [None if number in {30, 90} else f"count to {number}" for number in range(100)]
    table = pa.table({"id": [*range(100)], "prompt": texts})
    (tmp_path / "x").write_bytes(written(table, row_group_size=40))

    rows, rejects, reader = read(tmp_path / "x")

    assert [(line, int(row.id_json)) for line, row in rows] == [
        (number + 1, number) for number in range(100) if number not in {30, 90}
    ]
    assert [(each.line, each.id, each.reason) for each in rejects] == [
        (31, 30, "no_prompt"),
        (91, 90, "no_prompt"),
    ]
    assert (reader.blank, reader.rejected) == (0, 2)
    assert reader.read_bytes == (tmp_path / "x").stat().st_size


def test_ids_keep_their_type(tmp_path: Path) -> None:
    for name, ids in {"int": [1], "text": ["1"], "float": [1.0]}.items():
        (tmp_path / name).write_bytes(written(pa.table({"id": ids, "prompt": ["x"]})))

    got = {name: read(tmp_path / name)[0][0][1].id_json for name in ("int", "text", "float")}

    assert got == {"int": b"1", "text": b'"1"', "float": b"1.0"}


@pytest.mark.parametrize("stored", ["none", "snappy", "zstd"])
@pytest.mark.parametrize("packed", [False, True])
def test_compression_inside_or_outside_makes_no_difference(
    tmp_path: Path, stored: str, *, packed: bool
) -> None:
    data = written(questions(5), compression=stored)
    (tmp_path / "x").write_bytes(gzip.compress(data) if packed else data)

    rows, rejects, _ = read(tmp_path / "x")

    assert ([line for line, _ in rows], rejects) == ([1, 2, 3, 4, 5], [])


def test_a_file_without_rows_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(written(questions(0)))

    rows, rejects, reader = read(tmp_path / "x")

    assert (rows, rejects, reader.blank) == ([], [], 0)


def refusal(tmp_path: Path, data: bytes) -> FileRefusedError:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(FileRefusedError) as caught:
        read(tmp_path / "x")
    return caught.value


@given(cut=st.integers(4, 400))
def test_a_file_that_is_cut_anywhere_is_refused_as_truncated(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    data = written(questions(5), use_dictionary=False)

    assert refusal(tmp_path_factory.mktemp("cut"), data[:cut]).reason == "truncated"


@given(st.data())
def test_a_damaged_file_is_refused_or_read_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = bytearray(written(questions(50), compression="none", write_page_checksum=True))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(4, len(whole) - 5))
        whole[at] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.mktemp("damaged") / "x"
    path.write_bytes(whole)

    try:
        rows, rejects, _ = read(path)
    except FileRefusedError as error:
        assert error.reason in {"corrupt", "parquet"}  # noqa: PT017 - either is right
    else:
        assert {len(rows) + len(rejects)} <= {*range(51)}


def test_damage_inside_the_data_counts_for_nothing(tmp_path: Path) -> None:
    data = bytearray(written(questions(50), compression="none", write_page_checksum=True))
    at = data.index(b"count to 7")
    data[at] ^= 1

    assert refusal(tmp_path, bytes(data)).reason == "corrupt"


@pytest.mark.parametrize(("footer", "reason"), [("plain", "corrupt"), ("encrypted", "parquet")])
def test_an_encrypted_file_is_told_to_be_one(tmp_path: Path, footer: str, reason: str) -> None:
    encryption: Any = importlib.import_module("pyarrow.parquet.encryption")

    class Keys(encryption.KmsClient):  # type: ignore[misc]
        def wrap_key(self, key_bytes: bytes, _name: str) -> bytes:
            return base64.b64encode(key_bytes)

    properties = encryption.CryptoFactory(lambda _: Keys()).file_encryption_properties(
        encryption.KmsConnectionConfig(),
        encryption.EncryptionConfiguration(
            footer_key="f", column_keys={"c": ["prompt"]}, plaintext_footer=footer == "plain"
        ),
    )
    table = questions(3)
    with pq.ParquetWriter(
        tmp_path / "x", table.schema, encryption_properties=properties
    ) as writer:
        writer.write_table(table)

    error = refusal(tmp_path, (tmp_path / "x").read_bytes())

    assert error.reason == reason
    assert "encrypted" in error.message


def test_two_columns_of_one_name_are_refused_since_a_row_holds_one(tmp_path: Path) -> None:
    table = pa.table([["a"], ["b"]], names=["prompt", "prompt"])

    error = refusal(tmp_path, written(table))

    assert error.reason == "parquet"
    assert "'prompt'" in error.message


def test_a_row_over_the_limit_is_rejected_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "LINE_LIMIT_BYTES", 10_000)
    texts = ["a", "b" * 10_001, "c" * 9_000]
    (tmp_path / "x").write_bytes(written(pa.table({"prompt": texts})))

    rows, rejects, _ = read(tmp_path / "x")

    assert [line for line, _ in rows] == [1, 3]
    assert [(each.line, each.reason) for each in rejects] == [(2, "too_large")]


def test_big_rows_come_in_small_batches() -> None:
    big = written(pa.table({"prompt": [f"{n}" * 3_000_000 for n in range(4)]}))
    same = written(pa.table({"prompt": ["context " * 100_000] * 500, "id": [*range(500)]}))
    small = written(questions(5_000))

    def sizes(data: bytes) -> Iterator[int]:
        return (len(batch) for batch in ParquetInput(io.BytesIO(data), "x").batches())

    assert max(sizes(big)) == 1
    assert max(sizes(same)) <= 5
    assert max(sizes(small)) == parquet.BATCH_ROWS


@pytest.mark.parametrize("form", ["lines", "gzip", "parquet"])
def test_how_far_a_file_is_read_is_told_as_a_share_of_its_size(tmp_path: Path, form: str) -> None:
    texts = [random.Random(n).randbytes(500).hex() for n in range(6_000)]
    lines = b"".join(b'{"prompt":"%b"}\n' % text.encode() for text in texts)
    content = {
        "lines": lambda: lines,
        "gzip": lambda: gzip.compress(lines, 1),
        "parquet": lambda: written(pa.table({"prompt": texts})),
    }[form]()
    (tmp_path / "x").write_bytes(content)
    told: list[int] = []
    reader = FileReader(
        str(tmp_path / "x"),
        RowChecker(RowRules(max_tokens_given=True)),
        on_reject=lambda *_: None,
        on_read=told.append,
    )

    assert len([*reader.rows()]) == len(texts)

    assert len(told) > 2
    assert told == sorted(told)
    assert told[-1] == reader.read_bytes == len(content)
