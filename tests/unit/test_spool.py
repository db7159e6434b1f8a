"""What waits on disk comes back as it was, once a key, whatever the number of rows."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import BackendError
from common.ids import content_id, fingerprint_of, key_of, typed_id
from common.models import Prompt
from producer import repeats, spool
from producer.intake import Intake
from producer.meter import Meter
from producer.prompts.rows import RowChecker, RowRules
from producer.spool import Spool


def filled(
    folder: Path, lines: list[dict[str, Any]], run: str = "r", *, samples: int = 1
) -> Spool:
    checker = RowChecker(RowRules(max_tokens_given=True))
    found = Spool(run, folder, samples=samples)
    for number, line in enumerate(lines, 1):
        row = checker.check(json.dumps(line).encode())
        found.add(row, source=0, name="f.jsonl", line=number)
    found.finish()
    return found


def prompts(found: Spool) -> list[tuple[bytes, bytes, Prompt]]:
    return [
        (item.key, item.fingerprint, msgspec.json.decode(item.prompt, type=Prompt))
        for batch in found.batches()
        for item in batch
    ]


def keys(found: Spool) -> set[bytes]:
    return {key for key, _, _ in prompts(found)}


def test_a_prompt_comes_back_with_key_fingerprint_and_place(tmp_path: Path) -> None:
    row = {"id": "a", "prompt": "Hi", "seed": 0, "note": {"x": None}}

    [(key, fingerprint, prompt)] = prompts(filled(tmp_path, [row]))

    body = {"messages": [{"role": "user", "content": "Hi"}], "seed": 0}
    assert prompt.body == body
    assert key == key_of("r", b'"a"')
    assert fingerprint == fingerprint_of("chat", body)
    assert (bytes(prompt.id), prompt.line, prompt.source) == (b'"a"', 1, "f.jsonl")
    assert prompt.extra == {"note": {"x": None}}


def test_an_identical_repeat_counts_once_and_a_conflict_is_told_with_both_lines(
    tmp_path: Path,
) -> None:
    rows = [("d1", "same"), ("d1", "same"), ("d2", "left"), ("d2", "RIGHT"), ("d2", "left")]

    found = filled(tmp_path, [{"id": name, "prompt": text} for name, text in rows])

    assert (found.prompts, found.duplicates, found.conflicts) == (2, 2, 1)
    [conflict] = found.conflicting()
    assert (conflict.id_json, conflict.line, conflict.first_line) == (b'"d2"', 4, 3)
    assert [p.body["messages"][0]["content"] for _, _, p in prompts(found)] == ["same", "left"]


def test_a_repeat_is_the_same_whatever_the_order_of_its_members(tmp_path: Path) -> None:
    rows = [
        {"id": 1, "messages": [{"role": "user", "content": "x"}], "seed": 1, "top_p": 0.5},
        {"top_p": 0.5, "seed": 1, "messages": [{"content": "x", "role": "user"}], "id": 1},
    ]

    assert filled(tmp_path, rows).duplicates == 1


def test_ids_that_look_alike_are_different_prompts(tmp_path: Path) -> None:
    found = filled(tmp_path, [{"id": name, "prompt": "x"} for name in (1, "1", 1.0)])

    assert found.prompts == 3


def test_rows_without_id_are_numbered_among_equals(tmp_path: Path) -> None:
    found = filled(tmp_path, [{"prompt": text} for text in ("a", "b", "a", "a")])

    body_a = {"messages": [{"role": "user", "content": "a"}]}
    assert [json.loads(bytes(p.id)) for _, _, p in prompts(found)] == [
        content_id("chat", body_a, 0),
        content_id("chat", {"messages": [{"role": "user", "content": "b"}]}, 0),
        content_id("chat", body_a, 1),
        content_id("chat", body_a, 2),
    ]
    assert [p.line for _, _, p in prompts(found)] == [1, 2, 3, 4]


def test_an_inserted_row_without_id_changes_no_other_key(tmp_path: Path) -> None:
    first, second = tmp_path / "v1", tmp_path / "v2"
    first.mkdir()
    second.mkdir()
    texts = ["Alpha?", "Beta?", "Gamma?"]
    old = keys(filled(first, [{"prompt": text} for text in texts]))

    new = keys(filled(second, [{"prompt": text} for text in ["New?", *reversed(texts)]]))

    assert old < new
    assert len(new - old) == 1


@given(st.lists(st.tuples(st.sampled_from([None, "x", "y", 1, "1"]), st.sampled_from("abc"))))
@example([(None, "a"), (None, "a"), ("x", "a"), ("x", "b"), ("x", "a")])
@example([("x", "a"), ("x", "b"), ("x", "b")])
def test_every_row_is_a_prompt_a_repeat_or_a_conflict(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str | None, str]]
) -> None:
    found = filled(
        tmp_path_factory.mktemp("spool"), [{"id": name, "prompt": text} for name, text in rows]
    )

    named = [(typed_id(name), text) for name, text in rows if name is not None]
    firsts: dict[bytes, str] = {}
    for name, text in named:
        firsts.setdefault(name, text)
    conflicts = sum(firsts[name] != text for name, text in named)
    assert found.prompts == len(rows) - len(named) + len(firsts)
    assert found.conflicts == conflicts
    assert found.duplicates == len(named) - len(firsts) - conflicts
    assert len(keys(found)) == found.prompts


def test_each_sample_of_a_row_is_a_prompt_of_its_own_beside_the_first(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "a", "prompt": "x", "note": 1}, {"prompt": "y"}, {"prompt": "y"},
    ]  # fmt: skip
    one, three = tmp_path / "one", tmp_path / "three"
    one.mkdir()
    three.mkdir()
    alone = prompts(filled(one, rows))

    found = filled(three, rows, samples=3)

    together = prompts(found)
    assert [prompt.sample for _, _, prompt in together] == [0, 1, 2] * 3
    assert together[::3] == alone
    for key, fingerprint, prompt in together:
        [first] = [each for each in alone if each[2].id == prompt.id]
        assert (fingerprint, prompt.body) == (first[1], first[2].body)
        assert (prompt.extra, prompt.line) == (first[2].extra, first[2].line)
        assert key == key_of("r", bytes(prompt.id), prompt.sample)
    assert len(keys(found)) == found.prompts == 9


def test_a_repeated_row_counts_once_whatever_the_samples(tmp_path: Path) -> None:
    rows = [("d1", "same"), ("d1", "same"), ("d2", "left"), ("d2", "RIGHT")]

    found = filled(tmp_path, [{"id": name, "prompt": text} for name, text in rows], samples=4)

    assert (found.distinct, found.duplicates, found.conflicts) == (2, 1, 1)
    assert found.prompts == len(prompts(found)) == 8


def test_many_rows_go_through_files_and_come_back_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeats, "_FLUSH_ROWS", 100)
    monkeypatch.setattr(spool, "_FRAME_BYTES", 1000)
    rows = [{"id": number % 900, "prompt": "x"} for number in range(1000)]

    found = filled(tmp_path, rows)

    assert (found.prompts, found.duplicates) == (900, 100)
    assert [int(bytes(p.id)) for _, _, p in prompts(found)] == list(range(900))


def test_batches_end_at_a_thousand_rows_or_some_megabytes(tmp_path: Path) -> None:
    checker = RowChecker(RowRules(max_tokens_given=True))
    found = Spool("r", tmp_path)
    for number in range(2500):
        found.add(checker.check(b'{"id":%d,"prompt":"x"}' % number), source=0, name="", line=1)
    big = json.dumps({"id": "big", "prompt": "x" * 9_000_000}).encode()
    found.add(checker.check(big), source=0, name="", line=1)
    found.add(checker.check(b'{"id":"last","prompt":"x"}'), source=0, name="", line=1)
    found.finish()

    assert [len(batch) for batch in found.batches()] == [1000, 1000, 501, 1]


# /dev/full takes every open and refuses every write, as a full disk does.
class FullFolder(type(Path())):  # type: ignore[misc]
    def __truediv__(self, key: str) -> Path:
        return Path("/dev/full" if key in {"rows", "rejected"} else f"{self}/{key}")


def test_a_folder_without_room_is_told_with_what_to_do(tmp_path: Path) -> None:
    found = Spool("r", FullFolder(tmp_path))
    found.add(
        RowChecker(RowRules(max_tokens_given=True)).check(b'{"prompt":"x"}'),
        source=0,
        name="",
        line=1,
    )

    with pytest.raises(BackendError, match="TMPDIR"):
        found.finish()
    found.close()


@pytest.mark.parametrize("line", [b'{"prompt":"x"}', b'{"prompt":5}'])
@pytest.mark.parametrize("rows", [1, 30_000])
def test_a_disk_that_fills_while_a_file_is_read_is_told_too(
    tmp_path: Path, line: bytes, rows: int
) -> None:
    (tmp_path / "x").write_bytes((line + b"\n") * rows)
    intake = Intake(
        [str(tmp_path / "x")],
        RowRules(max_tokens_given=True),
        run="r",
        folder=FullFolder(tmp_path),
    )

    with pytest.raises(BackendError, match="TMPDIR"):
        intake.read(Meter("reading", shown=False))
