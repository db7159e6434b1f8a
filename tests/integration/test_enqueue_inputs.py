"""`producer enqueue --dry-run` judges every file of the case folder as its manifest says."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.support.producer_cli import Ended, producer

INPUTS = REPOSITORY / "tests" / "data" / "inputs"
MANIFEST: dict[str, dict[str, Any]] = json.loads((INPUTS / "MANIFEST.json").read_text())
FILES = sorted(name for name, case in MANIFEST.items() if not case.get("not_an_input"))

# What the manifest counts as one bad line is, in these, the form of the whole file.
REFUSED_WHOLE = {
    "B01_utf16le.jsonl": "UTF-16",
    "B02_lone_cr.jsonl": "carriage return",
    "B05_array_oneline.jsonl": "JSON array",
    "B05_array_pretty.jsonl": "JSON array",
    "B05_object_pretty.jsonl": "over several lines",
    "B24_truncated.jsonl.gz": "truncated",
}


def dry(source: Path | str, tmp_path: Path, *flags: str, stdin: bytes = b"") -> Ended:
    return producer(
        *("enqueue", source, "--dry-run", "--json", "--run", "exam"),
        *("--max-tokens", "64", "--model", "m", *flags),
        cwd=tmp_path,
        stdin=stdin,
    )


@pytest.mark.parametrize("name", FILES)
def test_each_line_gets_the_verdict_of_the_manifest(tmp_path: Path, name: str) -> None:
    case = MANIFEST[name]

    ended = dry(INPUTS / name, tmp_path, "--skip-invalid")

    told = ended.told
    counts = {"ok": told["ok"], "dup": told["duplicates"], "blank": told["blank"]}
    assert counts == {part: case[part] for part in counts}
    assert told["rejected"] == case["reject"]
    assert told["lines_read"] == sum(counts.values()) + told["rejected"]
    expected = [
        (None if name in REFUSED_WHOLE else line, verdict.removeprefix("reject:"))
        for line, verdict in enumerate(case["verdicts"], 1)
        if verdict.startswith("reject:")
    ]
    assert [(reject["line"], reject["reason"]) for reject in told["rejects"]] == expected
    assert ended.code == (0 if case["ok"] else 3)
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(("name", "word"), REFUSED_WHOLE.items())
def test_a_file_of_another_form_gets_one_message_with_its_name(
    tmp_path: Path, name: str, word: str
) -> None:
    (tmp_path / "x").write_bytes((INPUTS / name).read_bytes())

    ended = dry("x", tmp_path)

    assert ended.code == 3
    assert word in ended.err
    assert len(ended.err.splitlines()) == 1


def test_parquet_without_pyarrow_is_told_with_the_extra_to_install(tmp_path: Path) -> None:
    (tmp_path / "pyarrow.py").write_text("raise ImportError('as where it is not installed')")
    here = f"{tmp_path}{os.pathsep}{REPOSITORY}"

    ended = producer(
        *("enqueue", INPUTS / "B25_parquet_named.jsonl", "--dry-run", "--max-tokens", "64"),
        cwd=tmp_path,
        env={"PYTHONPATH": here},
    )

    assert ended.code == 2
    assert "pip install pyarrow" in ended.err
    assert len(ended.err.splitlines()) == 1


def test_bad_rows_end_with_input_and_their_lines_unless_they_may_be_skipped(
    tmp_path: Path,
) -> None:
    ended = dry(INPUTS / "B11_dup_id.jsonl", tmp_path)

    assert ended.code == 3
    assert "line 4" in ended.err
    assert "lines 3 and 4" in ended.err
    [reject] = ended.told["rejects"]
    assert (reject["line"], reject["id"], reject["reason"]) == (4, "d2", "dup_id_conflict")


def test_the_first_id_is_read_without_the_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(
        (INPUTS / "B01_bom.jsonl").read_bytes() + b'{"id":"a1","prompt":"another"}\n'
    )

    [reject] = dry("x.jsonl", tmp_path).told["rejects"]

    assert (reject["id"], reject["reason"]) == ("a1", "dup_id_conflict")


@pytest.mark.parametrize("packed", [False, True])
def test_parquet_comes_through_a_pipe_too(tmp_path: Path, *, packed: bool) -> None:
    rows = (INPUTS / "B25.parquet").read_bytes()

    ended = dry("-", tmp_path, stdin=gzip.compress(rows) if packed else rows)

    assert (ended.code, ended.told["ok"]) == (0, 2)


@pytest.mark.parametrize("packed", [False, True])
def test_standard_input_is_read_like_a_file(tmp_path: Path, *, packed: bool) -> None:
    rows = (INPUTS / "B02_crlf_blank.jsonl").read_bytes()

    ended = dry("-", tmp_path, stdin=gzip.compress(rows) if packed else rows)

    assert ended.code == 0
    assert (ended.told["lines_read"], ended.told["ok"], ended.told["blank"]) == (6, 3, 3)


def test_several_files_are_one_input(tmp_path: Path) -> None:
    ended = dry(INPUTS / "B15_noid_v1.jsonl", tmp_path, str(INPUTS / "B15_noid_v2.jsonl"))

    # As after cat: the three that stand in both are numbered, not taken for one another.
    assert (ended.told["lines_read"], ended.told["ok"]) == (7, 7)


def test_limit_reads_the_first_rows_only(tmp_path: Path) -> None:
    ended = dry(INPUTS / "B14_id_chars.jsonl", tmp_path, "--limit", "3")

    assert (ended.told["lines_read"], ended.told["ok"]) == (3, 3)


@pytest.mark.parametrize("name", ["B26_empty.jsonl", "B26_bom_only.jsonl", "B26_blank_only.jsonl"])
def test_an_empty_file_ends_with_input_and_says_no_prompts(tmp_path: Path, name: str) -> None:
    ended = dry(INPUTS / name, tmp_path)

    assert ended.code == 3
    assert "no prompts" in ended.err


def test_an_empty_standard_input_ends_with_input(tmp_path: Path) -> None:
    ended = dry("-", tmp_path)

    assert ended.code == 3
    assert "no prompts" in ended.err


@pytest.mark.parametrize("source", ["missing.jsonl", "."])
def test_what_is_no_file_ends_with_usage_and_its_path(tmp_path: Path, source: str) -> None:
    ended = dry(source, tmp_path)

    assert ended.code == 2
    assert source in ended.err
    assert "Traceback" not in ended.err


def test_without_any_limit_of_tokens_the_message_says_what_to_pass(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt":"a","max_tokens":5}\n{"prompt":"b"}\n')

    ended = producer("enqueue", "x.jsonl", "--dry-run", cwd=tmp_path)

    assert ended.code == 2
    assert "line 2" in ended.err
    assert "--max-tokens" in ended.err


def test_an_id_field_that_no_row_has_is_a_wrong_flag(tmp_path: Path) -> None:
    ended = dry(INPUTS / "B14_id_chars.jsonl", tmp_path, "--id-field", "uid")

    assert ended.code == 2
    assert "uid" in ended.err


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["a b.jsonl"], 2, "--run"),
        (["-"], 2, "--run"),
        (["x.jsonl", "a b.jsonl"], 2, "--run"),
        (["x.jsonl", "--run", "a/b"], 2, "a/b"),
        (["x.jsonl", "--max-tokens", "0"], 2, "context"),
        (["x.jsonl", "--param", "top_a"], 2, "KEY=JSON"),
        (["x.jsonl", "--param", "top_a=x"], 2, "JSON"),
        (["x.jsonl", "--param", "max_tokens=5"], 2, "--max-tokens"),
        (["x.jsonl.gz"], 0, ""),
    ],
)
def test_flags_and_names_that_cannot_stand_are_told(
    tmp_path: Path, arguments: list[str], code: int, word: str
) -> None:
    for name in ("a b.jsonl", "x.jsonl", "x.jsonl.gz"):
        (tmp_path / name).write_text('{"prompt":"a"}\n')

    ended = producer(
        "enqueue", *arguments, "--dry-run", "--json", cwd=tmp_path,
        env={"HEADRACE_MAX_TOKENS": "5"} if "--max-tokens" not in arguments else {},
    )  # fmt: skip

    assert ended.code == code
    assert word in ended.err
    if not code:
        assert ended.told["run"] == "x"


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    dry(INPUTS / "B11_dup_id.jsonl", tmp_path, "--skip-invalid")

    assert list(tmp_path.iterdir()) == []
