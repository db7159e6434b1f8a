"""`producer export` of runs in a directory: order of the input, each prompt once."""

import gzip
import json
import random
from pathlib import Path

import pytest
import zstandard

from common.store.directory import DirectoryStore
from producer.ordering import Ordering
from tests.support.finished_run import RUN, FinishedRun
from tests.support.producer_cli import Ended, producer, running


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "out")


def export(run: FinishedRun, *arguments: str | Path, cwd: Path) -> Ended:
    return producer("export", RUN, "--output", run.store.url, *arguments, cwd=cwd)


def lines_in(data: bytes) -> list[int]:
    return [json.loads(line)["line"] for line in data.splitlines()]


def test_completions_come_in_the_order_of_the_input(store: DirectoryStore, tmp_path: Path) -> None:
    run = FinishedRun(store, prompts=100)

    ended = export(run, "--to", "answers.jsonl", "--format", "jsonl", cwd=tmp_path)

    assert ended.code == 0, ended
    data = (tmp_path / "answers.jsonl").read_bytes()
    assert lines_in(data) == list(range(1, 101))
    assert {row for m in run.manifests() for row in run.rows(m.shard)} == set(data.splitlines())


def test_stdout_gets_the_rows_and_nothing_else(store: DirectoryStore, tmp_path: Path) -> None:
    run = FinishedRun(store)

    ended = export(run, "--to", "-", cwd=tmp_path)

    assert ended.code == 0
    assert lines_in(ended.out.encode()) == list(range(1, 31))
    assert "wrote 30 completions" in ended.err


def test_a_reader_that_has_seen_enough_gets_no_traceback(
    store: DirectoryStore, tmp_path: Path
) -> None:
    run = FinishedRun(store, prompts=2_000, batch=500)
    arguments = ("export", RUN, "--output", run.store.url, "--to", "-")

    with running(*arguments, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()

        assert process.wait(60) == 1
        assert b"Traceback" not in process.stderr.read()


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_the_name_decides_on_compression(
    store: DirectoryStore, tmp_path: Path, ending: str
) -> None:
    run = FinishedRun(store)

    export(run, "--to", f"a.jsonl{ending}", cwd=tmp_path)

    data = (tmp_path / f"a.jsonl{ending}").read_bytes()
    rows = (
        gzip.decompress(data)
        if ending == ".gz"
        else zstandard.ZstdDecompressor().decompressobj().decompress(data)
    )
    assert lines_in(rows) == list(range(1, 31))


def test_failures_go_to_a_file_of_their_own(store: DirectoryStore, tmp_path: Path) -> None:
    run = FinishedRun(store, fails=[4, 20])

    ended = export(run, "--to", "a.jsonl", "--failures", "f.jsonl", cwd=tmp_path)

    assert ended.code == 1
    assert "2 failed or were cancelled" in ended.err
    assert lines_in((tmp_path / "f.jsonl").read_bytes()) == [5, 21]
    expected = [line for line in range(1, 31) if line not in {5, 21}]
    assert lines_in((tmp_path / "a.jsonl").read_bytes()) == expected


def test_only_the_current_record_of_a_key_is_written(
    store: DirectoryStore, tmp_path: Path
) -> None:
    run = FinishedRun(store, fails=[4, 20])
    run.commit(5, [run.entry(4, try_=2), run.entry(20, "failed", try_=2)])
    run.commit(6, [run.entry(7, "failed", try_=2)])

    export(run, "--to", "a.jsonl", "--failures", "f.jsonl", cwd=tmp_path)

    completions = (tmp_path / "a.jsonl").read_bytes().splitlines()
    assert [json.loads(row)["line"] for row in completions] == [
        line for line in range(1, 31) if line != 21
    ]
    [failure] = (tmp_path / "f.jsonl").read_bytes().splitlines()
    assert (json.loads(failure)["line"], json.loads(failure)["try"]) == (21, 2)


def test_a_prompt_that_was_accepted_twice_stands_once_at_its_first_place(
    store: DirectoryStore, tmp_path: Path
) -> None:
    run = FinishedRun(store)
    run.accept(4, [3, 1])

    export(run, "--to", "a.jsonl", cwd=tmp_path)

    assert lines_in((tmp_path / "a.jsonl").read_bytes()) == list(range(1, 31))


@pytest.mark.parametrize(("flags", "code"), [([], 1), (["--partial"], 0)])
def test_a_run_that_goes_on_gives_what_is_there_by_now(
    store: DirectoryStore, tmp_path: Path, flags: list[str], code: int
) -> None:
    run = FinishedRun(store, leave_out=12)

    ended = export(run, "--to", "a.jsonl", *flags, cwd=tmp_path)

    assert ended.code == code
    assert "18 completions" in ended.err
    assert "12 have not ended" in ended.err
    found = lines_in((tmp_path / "a.jsonl").read_bytes())
    assert found == sorted(found)
    assert len(found) == 18


def test_a_store_that_lacks_rows_gives_no_file(store: DirectoryStore, tmp_path: Path) -> None:
    run = FinishedRun(store)
    run.tamper(2, "shard", lambda rows: rows[1:])
    (tmp_path / "a.jsonl").write_text("as before\n")

    ended = export(run, "--to", "a.jsonl", cwd=tmp_path)

    assert ended.code == 1
    assert "lacks the rows of 1 results" in ended.err
    assert (tmp_path / "a.jsonl").read_text() == "as before\n"
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


def test_a_missing_shard_is_named(store: DirectoryStore, tmp_path: Path) -> None:
    run = FinishedRun(store)
    part = run.manifest(2).shard
    assert part is not None
    store.delete(part.name)

    ended = export(run, "--to", "a.jsonl", cwd=tmp_path)

    assert ended.code == 4
    assert f"{part.name} is missing" in ended.err


def test_a_folder_that_is_not_there_is_a_wrong_path(store: DirectoryStore, tmp_path: Path) -> None:
    ended = export(FinishedRun(store), "--to", "no/such/a.jsonl", cwd=tmp_path)

    assert ended.code == 2
    assert "there is no directory" in ended.err


@pytest.mark.parametrize("memory_bytes", [1, 5_000, 1 << 20])
def test_rows_come_in_order_whatever_fits_in_memory(memory_bytes: int) -> None:
    rows = [(place, b"row %d " % place + b"x" * (place % 50)) for place in range(0, 3_000, 3)]
    shuffled = rows.copy()
    random.Random(2).shuffle(shuffled)

    with Ordering(row_bytes=30, memory_bytes=memory_bytes, chunk_bytes=2_000) as ordering:
        for place, row in shuffled:
            ordering.add(place, row)
        ordered = list(ordering)

    assert ordered == [row for _, row in rows]


def test_the_help_has_an_example(tmp_path: Path) -> None:
    ended = producer("export", "--help", cwd=tmp_path)

    assert "producer export prompts --to answers.jsonl" in ended.out
