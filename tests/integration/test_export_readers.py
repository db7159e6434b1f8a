"""Who reads what export and the sink write: HF datasets, DuckDB, Polars, pandas, pyarrow.

They are imported by name, inside the tests: heavy, some without types, and none of ours.
"""

import importlib
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import pytest

from common.store.columns import schema
from common.store.directory import DirectoryStore
from common.store.parquet import to_parquet
from tests.support.finished_run import RUN
from tests.support.odd_run import CALL, ODD, TOOLS, Case, OddRun, odd_cases, said
from tests.support.producer_cli import environment, producer, running
from tests.support.s3 import ACCESS_KEY, SECRET_KEY, S3Server, plain_client
from tests.support.skips import skip_cannot_run

TABLES = ("datasets", "datasets streaming", "duckdb", "polars", "pandas", "pyarrow")


def load(name: str) -> Any:
    if importlib.util.find_spec(name) is None:
        skip_cannot_run(f"{name} is not installed (the test group of pyproject.toml)")
    return importlib.import_module(name)


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "out")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what `datasets` keeps in the test's own folder, and it off the network."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def export(folder: Path, to: str, form: str, *flags: str) -> Path:
    ended = producer(
        "export", RUN, "--output", "out", "--to", to, "--format", form, *flags, cwd=folder
    )
    assert ended.code == 0, ended
    return folder / to


def hf_rows(path: Path, kind: str, *, streaming: bool) -> list[dict[str, Any]]:
    datasets = load("datasets")
    datasets.disable_progress_bars()
    return list(
        datasets.load_dataset(
            kind,
            data_files=str(path),
            split="train",
            streaming=streaming,
            cache_dir=str(path.parent / "hf-cache"),
        )
    )


def rows_of(reader: str, path: Path) -> list[dict[str, Any]]:
    """Read a Parquet file."""
    match reader:
        case "datasets" | "datasets streaming":
            return hf_rows(path, "parquet", streaming=reader != "datasets")
        case "duckdb":
            read = load("duckdb").sql(f"from '{path}'")
            return [dict(zip(read.columns, row, strict=True)) for row in read.fetchall()]
        case "polars":
            rows: list[dict[str, Any]] = load("polars").read_parquet(path).to_dicts()
        case "pandas":
            frame = load("pandas").read_parquet(path).astype(object)
            # Its word for null in a column of text is nan.
            rows = frame.where(frame.notna(), None).to_dict("records")
        case _:
            rows = importlib.import_module("pyarrow.parquet").read_table(path).to_pylist()
    return rows


# --- Parquet -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", TABLES)
def test_parquet_comes_back_as_it_is(store: DirectoryStore, tmp_path: Path, reader: str) -> None:
    OddRun(store)

    rows = rows_of(reader, export(tmp_path, "a.parquet", "parquet"))

    assert [row["id"] for row in rows] == [str(json.loads(case.id)) for case in odd_cases()]
    texts = {row["id"]: row["content"] for row in rows}
    assert {name: texts[name] for name in ODD} == ODD
    [text_one, number_one] = [row for row in rows if row["id"] == "1"]
    assert (text_one["more"], json.loads(number_one["more"])) == (None, {"id": 1})
    [called] = [row for row in rows if row["id"] == "called"]
    assert called["content"] is None
    assert json.loads(called["tool_calls"]) == [CALL]
    assert json.loads(called["tools"]) == TOOLS
    [thought] = [row for row in rows if row["id"] == "thought"]
    assert thought["reasoning_content"] == thought["messages"][-1]["reasoning_content"] == "hm"
    [two] = [row for row in rows if row["id"] == "two"]
    assert two["content"] == "first"
    assert [choice["content"] for choice in two["further_choices"]] == ["second"]
    assert [turn["role"] for turn in two["messages"]] == ["user", "assistant"]
    assert [row["sample"] for row in rows if row["id"] == "again"] == [0, 1]


def test_a_column_without_any_value_has_its_type(store: DirectoryStore, tmp_path: Path) -> None:
    OddRun(store, [Case(id='"a"', choices=[said(None, tool_calls=[CALL])])])
    path = export(tmp_path, "a.parquet", "parquet")

    parquet = importlib.import_module("pyarrow.parquet")
    assert parquet.read_schema(path).equals(schema(with_row=False))
    assert parquet.read_schema(io.BytesIO(to_parquet([b'{"id":1}']))).equals(schema(with_row=True))


def test_members_that_are_new_stand_in_more() -> None:
    row = (
        b'{"id":"a","key":"k","new":[1.50],"messages":[{"role":"user","content":"x","audio":1}],'
        b'"choices":[{"index":0,"content":"y","token_ids":[1,2],"logprobs":[1.50]}],"usage":{"prompt_tokens":3,"z":4}}'
    )
    parquet = importlib.import_module("pyarrow.parquet")

    [read] = parquet.read_table(io.BytesIO(to_parquet([row]))).to_pylist()

    assert read["more"] == '{"new":[1.50],"usage":{"z":4}}'
    assert read["messages"][0]["more"] == '{"audio":1}'
    assert read["choice_more"] == '{"logprobs":[1.50]}'
    assert read["token_ids"] == [1, 2]
    assert read["prompt_tokens"] == 3
    assert read["row"] == row.decode()


def test_what_does_not_fit_its_column_is_kept_beside_it() -> None:
    row = b'{"id":1.50,"line":99999999999999999999,"messages":["odd"],"flags":{"a":1},"choices":7}'
    parquet = importlib.import_module("pyarrow.parquet")

    [read] = parquet.read_table(io.BytesIO(to_parquet([row]))).to_pylist()

    assert read["id"] == "1.50"
    assert (read["line"], read["messages"], read["flags"], read["content"]) == (None,) * 4
    more = {"id": 1.5, "line": 99999999999999999999, "messages": ["odd"], "flags": {"a": 1}}
    assert json.loads(read["more"]) == {**more, "choices": 7}


def test_row_groups_bound_what_a_reader_holds(store: DirectoryStore, tmp_path: Path) -> None:
    OddRun(store, [Case(id=f'"{n}"', choices=[said("x" * 3_000_000)]) for n in range(14)])
    path = export(tmp_path, "a.parquet", "parquet")

    file = importlib.import_module("pyarrow.parquet").ParquetFile(path)

    # A row holds its answer twice, in `messages` and in `choices`.
    assert [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] == [3] * 4 + [
        2
    ]


def test_parquet_goes_through_a_pipe(store: DirectoryStore, tmp_path: Path) -> None:
    OddRun(store)

    with running(
        *("export", RUN, "--output", "out", "--to", "-", "--format", "parquet"),
        cwd=tmp_path,
        env=environment(),
    ) as process:
        out, _ = process.communicate(timeout=60)

    assert process.returncode == 0
    (tmp_path / "a.parquet").write_bytes(out)
    assert len(rows_of("polars", tmp_path / "a.parquet")) == len(odd_cases())


@pytest.mark.parametrize("reader", TABLES)
def test_shards_in_parquet_are_read_likewise(tmp_path: Path, reader: str) -> None:
    run = OddRun(DirectoryStore(tmp_path / "out"))
    rows = [row for manifest in run.manifests() for row in run.rows(manifest.shard)]
    # The first without any tool call, the second with: one schema reads both.
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "1.parquet").write_bytes(to_parquet(rows[:1]))
    (folder / "2.parquet").write_bytes(to_parquet(rows[1:]))

    pattern = folder if reader in {"pandas", "pyarrow"} else folder / "*.parquet"
    found = rows_of(reader, pattern)

    assert [row["row"] for row in found] == [row.decode() for row in rows]
    assert {row["id"]: row["content"] for row in found}["separators"] == ODD["separators"]


def test_shards_in_a_bucket_are_read_where_they_are(moto: S3Server, tmp_path: Path) -> None:
    run = OddRun(DirectoryStore(tmp_path / "out"))
    bucket = moto.new_bucket()
    for number, manifest in enumerate(run.manifests()):
        data = to_parquet(run.rows(manifest.shard))
        plain_client(moto.url).put_object(Bucket=bucket, Key=f"shards/{number}.parquet", Body=data)

    options = {
        "aws_access_key_id": ACCESS_KEY,
        "aws_secret_access_key": SECRET_KEY,
        "aws_region": "us-east-1",
        "aws_endpoint_url": moto.url,
        "aws_allow_http": "true",
    }
    scanned = load("polars").scan_parquet(
        f"s3://{bucket}/shards/*.parquet", storage_options=options
    )

    found = dict(scanned.select("id", "content").collect().iter_rows())
    assert {name: found[name] for name in ODD} == ODD


# --- Lines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("form", ["specforge", "speculators", "sharegpt"])
def test_datasets_loads_training_lines_whatever_comes_late(
    store: DirectoryStore, tmp_path: Path, form: str, *, streaming: bool
) -> None:
    # The first 10 MB decide on the types; reasoning, calls and tools come after them.
    plain = [
        Case(id=f'"p{n}"', question="why? " * 100_000, choices=[said("so")]) for n in range(24)
    ]
    OddRun(store, [*plain, *odd_cases()])
    path = export(tmp_path, "a.jsonl", form)

    rows = hf_rows(path, "json", streaming=streaming)

    assert rows[0]["id"] == "p0"
    assert len(rows) == 24 + 17
    text = "value" if form == "sharegpt" else "content"
    found = {row["id"]: row["conversations"][-1][text] for row in rows}
    assert {name: found[name] for name in ODD} == ODD
    if form == "speculators":
        # Its loader hands these on to vLLM.
        last = {row["id"]: row["conversations"][-1] for row in rows}["called"]
        assert last["tool_calls"] == [CALL]


@pytest.mark.parametrize("reader", ["datasets", "duckdb", "polars", "pandas"])
@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_jsonl_is_read_whatever_it_is_compressed_with(
    store: DirectoryStore, tmp_path: Path, reader: str, ending: str
) -> None:
    texts = {name: text for name, text in ODD.items() if name != "long"}
    OddRun(store, [Case(id=json.dumps(name), choices=[said(t)]) for name, t in texts.items()])
    path = export(tmp_path, f"a.jsonl{ending}", "jsonl")

    match reader:
        case "datasets":
            rows = hf_rows(path, "json", streaming=False)
        case "duckdb":
            read = load("duckdb").sql(f"from read_json('{path}')").project("id, choices")
            rows = [{"id": one, "choices": choices} for one, choices in read.fetchall()]
        case "polars":
            rows = load("polars").read_ndjson(path).to_dicts()
        case _:
            rows = load("pandas").read_json(path, lines=True).to_dict("records")

    assert {row["id"]: row["choices"][0]["content"] for row in rows} == texts


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_loads_openai_lines(
    store: DirectoryStore, tmp_path: Path, *, streaming: bool
) -> None:
    OddRun(store)

    rows = hf_rows(export(tmp_path, "a.jsonl", "openai"), "json", streaming=streaming)

    assert [row["custom_id"] for row in rows] == [str(json.loads(c.id)) for c in odd_cases()]
