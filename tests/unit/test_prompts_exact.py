"""Nothing of a row changes on the way, whatever it holds, and its form decides nothing.

Every row gets one verdict; the same rows give the same prompts as JSON lines in any spelling,
packed, cut into files, through a pipe, or as Parquet.
"""

import gzip
import importlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typing_extensions import override

from common.models import Prompt
from producer.intake import Intake, Reading
from producer.meter import Meter
from producer.prompts.broken import NESTING_LIMIT
from producer.prompts.rows import RowRules
from producer.spool import SpooledPrompt

Row = dict[str, Any]
Draw = Callable[[st.SearchStrategy[Any]], Any]


class Took(msgspec.Struct):
    """What pass 1 made of some files."""

    reading: Reading
    prompts: list[SpooledPrompt]
    rejected: list[Row]

    @property
    def bodies(self) -> list[Prompt]:
        return [msgspec.json.decode(each.prompt, type=Prompt) for each in self.prompts]

    @property
    def requests(self) -> list[tuple[bytes, bytes, Any]]:
        """Key, fingerprint and content of each prompt, in order: all but where it stood."""
        return [
            (each.key, each.fingerprint, (bytes(prompt.id), prompt.endpoint, exact(prompt.body)))
            for each, prompt in zip(self.prompts, self.bodies, strict=True)
        ]

    @property
    def extras(self) -> list[Any]:
        """What each prompt keeps beside its request; a null and an absent member are the same."""
        return [
            exact({name: value for name, value in prompt.extra.items() if value is not None})
            for prompt in self.bodies
        ]


def take(*files: bytes | Path, rules: RowRules | None = None) -> Took:
    """Run pass 1 over files of these contents; `-` stands for stdin."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "spool").mkdir()
        sources = []
        for number, content in enumerate(files):
            if isinstance(content, bytes):
                (folder / f"in{number}").write_bytes(content)
                content = folder / f"in{number}"  # noqa: PLW2901 - a file from here on
            sources.append(str(content))
        intake = Intake(
            sources,
            rules or RowRules(max_tokens_given=True, model="m"),
            run="r",
            folder=folder / "spool",
        )
        reading = intake.read(Meter("reading", shown=False))
        rejected = intake.rejected_path
        return Took(
            reading,
            []
            if reading.refused
            else [each for batch in intake.spool.batches() for each in batch],
            [json.loads(row) for row in rejected.read_bytes().splitlines()]
            if rejected.exists()
            else [],
        )


def exact(value: Any) -> Any:
    """Bring a value of JSON to one that is equal only where type and text are equal."""
    if isinstance(value, dict):
        return {name: exact(each) for name, each in sorted(value.items())}
    if isinstance(value, list):
        return [exact(each) for each in value]
    return type(value).__name__, repr(value)


# --- any row, exactly ----------------------------------------------------------------------------

numbers = (
    st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([-0.0, 5e-324, 1.7976931348623157e308, 2**53 + 1, 2**64, -(2**63) - 1])
)
texts = st.text(st.characters(codec="utf-8")) | st.sampled_from(
    ["", "\0", "\u2028\u2029", "\ufeff", "\x7f\x85", "😀", '"\\/', "}\n{", "null"]
)
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


@given(value=values, ascii_only=st.booleans(), endpoint=st.sampled_from(["plain", "body"]))
@example(value={"": {"": [-0.0, 10**400]}}, ascii_only=True, endpoint="body")
def test_what_a_row_holds_is_kept_exactly(value: Any, *, ascii_only: bool, endpoint: str) -> None:
    messages = [{"role": "user", "content": "Hi", "of its own": value}]
    row: Row = {"id": "a", "messages": messages, "tools": value, "note": value}
    if endpoint == "body":
        row = {"custom_id": "a", "body": {"messages": messages, "any": value}, "note": value}

    took = take(json.dumps(row, ensure_ascii=ascii_only).encode())

    [prompt] = took.bodies
    content = dict(row.get("body", {"messages": messages, "tools": value}))
    if content.get("tools", ...) is None:
        del content["tools"]
    assert exact(prompt.body) == exact(content)
    assert exact(prompt.extra) == exact({"note": value})


@pytest.mark.parametrize("levels", [50, NESTING_LIMIT - 1, NESTING_LIMIT, 900, 2_000, 100_000])
@pytest.mark.parametrize("pair", ["[]", "{}"])
def test_nesting_is_kept_up_to_a_limit_and_refused_beyond_it(levels: int, pair: str) -> None:
    opening = b"[" if pair == "[]" else b'{"a":'
    deep = opening * levels + (b"1" if pair == "{}" else b"") + pair[1].encode() * levels

    took = take(b'{"id":"ok","prompt":"x"}\n{"id":"deep","prompt":"x","note":%b}' % deep)

    # The row itself is a level.
    if levels < NESTING_LIMIT:
        assert took.reading.ok == 2
    else:
        assert (took.reading.ok, took.reading.rejected) == (1, 1)
        assert took.reading.rejects[0].reason == "bad_json"
        assert "nested too deeply" in took.reading.rejects[0].message


# --- any bytes: one verdict a line ---------------------------------------------------------------

good_lines = st.builds(
    lambda value, name: json.dumps({"id": name, "prompt": "Hi", "note": value}).encode(),
    values,
    texts | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
)
odd_lines = st.sampled_from(
    [
        b'{"prompt":"a","prompt":"b"}',
        b'{"id":1,"id":2,"prompt":"a"}',
        b'{"":"","prompt":"a"}',
        b'{"prompt":"a","x":1e400}',
        b'{"prompt":"a","x":-1e400}',
        b'{"prompt":"a","x":1e-400}',
        b'{"prompt":"a","x":NaN}',
        b'{"prompt":"a","x":-Infinity}',
        b'{"prompt":"a","x":01}',
        b'{"prompt":"a","x":+1}',
        b'{"prompt":"a","x":.5}',
        b'{"prompt":"a","x":1.}',
        b'{"prompt":"a","x":' + b"9" * 4_000 + b"}",
        b'{"prompt":"a","x":' + b"9" * 5_000 + b"}",
        b'{"prompt":"a","x":0.' + b"9" * 5_000 + b"}",
        b'{"prompt":"a","x":1e' + b"9" * 5_000 + b"}",
        b'{"id":-0,"prompt":"a"}',
        b'{"id":-0.0,"prompt":"a"}',
        b'{"id":1e400,"prompt":"a"}',
        b'{"id":"\\ud800","prompt":"a"}',
        b'{"id":"\\ud83d\\ude00","prompt":"a"}',
        b'{"\\ud800":1,"prompt":"a"}',
        b'{"prompt":"\xed\xa0\x80"}',
        b'{"prompt":"\xc0\x80"}',
        b'{"prompt":"\xf4\x90\x80\x80"}',
        b'{"prompt":"\xff"}',
        b'{"prompt":"a\x00b"}',
        b'{"prompt":"a\x1fb"}',
        b"\x00",
        b"\xef\xbb\xbf",
        b"\xef\xbb\xbf\xef\xbb\xbf{}",
        b"null",
        b'"text"',
        b"[]",
        b"{}",
        b"{",
        b"}",
        b"\x0b",
        b"\xc2\xa0",
        b'{"prompt":"a"}//',
        b'{"prompt":"a"} {"prompt":"b"}',
        b'{"prompt":"a"}\r{"prompt":"b"}',
    ]
)


@st.composite
def spoiled(draw: Draw) -> bytes:
    """A good line with some of its bytes changed, removed or put in."""
    line = bytearray(draw(good_lines))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(line) - 1))
        what = draw(st.sampled_from(["put", "change", "remove"]))
        byte = draw(st.integers(0, 255).filter(lambda each: each != 10))
        line[at : at + (what != "put")] = b"" if what == "remove" else bytes([byte])
    return bytes(line)


any_lines = good_lines | odd_lines | spoiled() | st.binary(max_size=20).map(
    lambda raw: raw.replace(b"\n", b" ")
)  # fmt: skip


@given(lines=st.lists(any_lines, max_size=8))
def test_every_line_gets_one_verdict_and_only_json_is_accepted(lines: Sequence[bytes]) -> None:
    # The first line keeps the file from being taken for one of another form.
    content = b"\n".join([b'{"id":"first","prompt":"a"}', *lines, b'{"id":"last","prompt":"a"}'])

    took = take(content + b"\n")

    reading = took.reading
    assert not reading.refused
    assert reading.lines_read == len(lines) + 2
    assert len(took.rejected) == len(reading.rejects) == reading.rejected
    assert [each["line"] for each in took.rejected].count(None) == 0
    refused = {reject.line for reject in reading.rejects}
    assert len(refused) == reading.rejected
    for reject in reading.rejects:
        assert reject.message
        assert "Traceback" not in reject.message
    for prompt in took.bodies:
        assert prompt.line not in refused
        line = content.split(b"\n")[prompt.line - 1]
        row = json.loads(line.removeprefix(b"\xef\xbb\xbf"), parse_constant=_refuse)
        assert prompt.body["messages"][0]["content"] == row["prompt"]
        assert exact(prompt.extra.get("note")) == exact(row.get("note"))


def _refuse(name: str) -> None:
    raise AssertionError(name)


@given(content=st.binary(max_size=200) | st.lists(any_lines).map(b"\n".join))
@example(content=b"\x1f\x8b")
@example(content=b"\x28\xb5\x2f\xfd")
@example(content=b"PAR1")
@example(content=b"PAR1" * 4)
@example(content=b"PAR1\xff\xff\xff\x7fPAR1")
def test_any_file_is_read_or_refused_with_one_message(content: bytes) -> None:
    reading = take(content).reading

    parts = reading.ok + reading.duplicates + reading.blank + reading.rejected
    assert parts == reading.lines_read
    if reading.refused:
        assert len(reading.refused.splitlines()) == 1
        assert [reject.line for reject in reading.rejects] == [None]


# --- every form the same -------------------------------------------------------------------------


@st.composite
def spelled(draw: st.DrawFn, value: Any) -> str:
    """JSON that means `value`, with blanks and escapes where JSON allows them."""
    blank = st.sampled_from(["", "", " ", "\t", " \r "])
    if isinstance(value, dict):
        members = [
            f"{draw(blank)}{draw(spelled(name))}{draw(blank)}:{draw(blank)}{draw(spelled(each))}"
            for name, each in draw(st.permutations([*value.items()]))
        ]
        return "{" + f"{draw(blank)},".join(members) + draw(blank) + "}"
    if isinstance(value, list):
        items = [f"{draw(blank)}{draw(spelled(each))}" for each in value]
        return "[" + f"{draw(blank)},".join(items) + draw(blank) + "]"
    if isinstance(value, str):
        style = draw(st.sampled_from(["ascii", "utf-8", "escaped"]))
        if style == "escaped":
            units = value.encode("utf-16-be")
            codes = (units[at : at + 2].hex() for at in range(0, len(units), 2))
            return '"' + "".join(f"\\u{code}" for code in codes) + '"'
        slash: str = draw(st.sampled_from(["/", "\\/"]))
        return json.dumps(value, ensure_ascii=style == "ascii").replace("/", slash)
    return json.dumps(value)


plain_texts = st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip)
turns = st.lists(plain_texts, min_size=1, max_size=3).map(
    lambda said: [
        {"role": "user" if number % 2 == 0 else "assistant", "content": text}
        for number, text in enumerate(said)
    ]
)
dialogues = turns.map(lambda said: [
    {"from": "human" if turn["role"] == "user" else "gpt", "value": turn["content"]}
    for turn in said
])  # fmt: skip
contents: dict[str, st.SearchStrategy[Any]] = {
    "prompt": plain_texts,
    "messages": turns,
    "conversations": dialogues,
    "text": plain_texts,
    "input_ids": st.lists(st.integers(0, 2**31), min_size=1, max_size=5),
    "body": st.builds(
        lambda messages, n: {"messages": messages, "n": n}, turns, st.integers(1, 9)
    ),
}
own = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 2**63 - 1),
        "temperature": st.floats(0, 2),
        "stop": st.lists(st.text(), max_size=2),
        "tag": st.text(),
        "meta": st.fixed_dictionaries({"k": st.lists(st.integers(-5, 5), max_size=3)}),
    },
)


@st.composite
def row_lists(draw: Draw) -> list[Row]:
    """Rows of one or several forms, of ids of one type, as a table can hold them."""
    names = draw(st.sampled_from([
        st.integers(-(2**63), 2**63 - 1), st.text(st.characters(codec="utf-8")), st.none(),
    ]))  # fmt: skip
    rows: list[Row] = []
    for _ in range(draw(st.integers(1, 5))):
        form = draw(st.sampled_from([*contents]))
        name = draw(names)
        identity = {} if name is None else {"custom_id" if form == "body" else "id": name}
        rows.append({**identity, form: draw(contents[form]), **draw(own)})
    return rows


def as_parquet(rows: list[Row], group: int) -> bytes:
    arrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    file = io.BytesIO()
    columns = dict.fromkeys(name for row in rows for name in row)
    table = arrow.table({name: arrow.array([row.get(name) for row in rows]) for name in columns})
    parquet.write_table(table, file, row_group_size=group)
    return file.getvalue()


def through_a_pipe(content: bytes, monkeypatch: pytest.MonkeyPatch) -> Took:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(cast("Any", Pipe(content))))
        return take(Path("-"))


class Pipe(io.BytesIO):
    """What can be read once, from its beginning."""

    @override
    def seekable(self) -> bool:
        return False


@settings(max_examples=15)
@given(rows=row_lists(), data=st.data())
@example(rows=[{"prompt": "same"}, {"prompt": "same"}, {"id": None, "prompt": "same"}], data=None)
def test_the_form_of_an_input_changes_no_key_fingerprint_or_request(
    rows: list[Row], data: st.DataObject | None
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        base = take(b"\n".join(json.dumps(row).encode() for row in rows))
        assert {each.reason for each in base.reading.rejects} <= {"dup_id_conflict"}
        for name, took in forms(rows, data, monkeypatch):
            assert took.requests == base.requests, name
            assert took.extras == base.extras, name
            assert (took.reading.ok, took.reading.duplicates, took.reading.rejected) == (
                base.reading.ok, base.reading.duplicates, base.reading.rejected,
            ), name  # fmt: skip


def forms(
    rows: list[Row], data: st.DataObject | None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Took]]:
    lines = [json.dumps(row).encode() for row in rows]
    if data is not None:
        lines = [data.draw(spelled(row)).encode() for row in rows]
    cut = data.draw(st.integers(0, len(rows))) if data is not None else 1
    parts = [b"".join(line + b"\n" for line in part) for part in (lines[:cut], lines[cut:])]
    whole = b"\n".join(lines)
    yield "spelled otherwise", take(whole)
    yield "CRLF", take(b"".join(line + b"\r\n" for line in lines))
    yield "marked, with blank lines", take(b"\xef\xbb\xbf" + b"\n \r\n\n".join(lines) + b"\n")
    yield "files", take(*parts)
    yield "files joined with their marks", take(b"\xef\xbb\xbf" + b"\xef\xbb\xbf".join(parts))
    yield "gzip of two members", take(b"".join(gzip.compress(part, 1) for part in parts))
    yield "zstd of two frames", take(b"".join(zstandard.compress(part) for part in parts))
    yield "one of each", take(gzip.compress(parts[0]), zstandard.compress(parts[1]))
    yield "pipe", through_a_pipe(whole, monkeypatch)
    yield "packed pipe", through_a_pipe(gzip.compress(whole), monkeypatch)
    table = as_parquet(rows, group=max(1, cut))
    yield "Parquet", take(table)
    yield "Parquet through a pipe", through_a_pipe(table, monkeypatch)
    yield "lines, then Parquet", take(parts[0], as_parquet(rows[cut:], 2) if rows[cut:] else b"")
