"""`producer verify` on runs in a directory, whose objects are really changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common import manifests, names, object_names
from common.models import Manifest, Params, RunRecord
from common.store.directory import DirectoryStore
from common.store.frames import compress, decompress, digest_name
from tests.support.finished_run import RUN, UID, WHEN, FinishedRun, Rows
from tests.support.producer_cli import Ended, producer
from tests.support.s3 import S3Server


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "out")


def verify(run: FinishedRun, *arguments: str, cwd: Path | None = None) -> Ended:
    output = run.store.url
    return producer("verify", RUN, "--output", output, *arguments, cwd=cwd or Path(output))


def kinds(run: FinishedRun) -> dict[str, Any]:
    """What --json counts, after a look that the exit code says the same."""
    ended = verify(run, "--json")
    told = ended.told
    assert ended.code == (0 if told["ok"] else 1)
    assert not told["ok"]
    assert sum(told["counts"].values()) == len(told["findings"])
    return dict(told["counts"])


def named(run: FinishedRun, kind: str) -> set[Any]:
    """Ids of the findings of one kind."""
    found = verify(run, "--json").told["findings"]
    return {finding.get("id") for finding in found if finding["kind"] == kind}


def row(rows: Rows, at: int) -> dict[str, Any]:
    return dict(json.loads(rows[at]))


def packed(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value)


# --- What is in order ----------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["chat", "completions", "generate"])
def test_a_whole_run_is_ok(store: DirectoryStore, endpoint: Any) -> None:
    run = FinishedRun(store, prompts=30, endpoint=endpoint)

    ended = verify(run)

    assert ended.code == 0, ended
    assert ended.out.startswith(f"OK: run {RUN}: 30 prompts: 30 completed")


def test_failures_are_proven_and_yet_not_all_is_done(store: DirectoryStore) -> None:
    run = FinishedRun(store, fails=[3, 4])

    ended = verify(run, "--json")

    assert ended.code == 1
    assert ended.told["proven"] is True
    assert (ended.told["completed"], ended.told["failed"]) == (28, 2)
    assert verify(run).out.startswith("NOT ALL COMPLETED")


def test_superseded_records_and_voids_are_told_and_no_fault(store: DirectoryStore) -> None:
    run = FinishedRun(store, fails=[3])
    run.commit(5, [run.entry(3, try_=2)])
    manifests.write(store, manifests.void(UID, 0, 6, written_at=WHEN))
    run.commit(7, [run.entry(3, "failed", try_=3)])
    run.succeed()

    ended = verify(run, "--json")

    assert ended.code == 0
    assert ended.told["superseded"] == 2
    assert ended.told["completed"] == 30
    assert ended.told["voids"] == 1


def test_an_object_that_no_manifest_names_is_told_and_no_fault(store: DirectoryStore) -> None:
    run = FinishedRun(store)
    store.put("shards/00-00000009-0123456789abcdef.jsonl.zst", b"left by a sink that died")

    ended = verify(run, "--json")

    assert ended.code == 0
    assert ended.told["strays"] == 1


def test_a_run_that_goes_on_is_not_done_and_names_what_is_missing(store: DirectoryStore) -> None:
    run = FinishedRun(store, leave_out=25)

    ended = verify(run)

    assert ended.code == 1
    assert ended.out.startswith("NOT DONE")
    assert "25 accepted prompts without a result" in ended.out
    assert ended.out.count("  id ") == 20
    assert len(named(run, "missing")) == 25


def test_a_run_that_is_open_is_not_done(store: DirectoryStore) -> None:
    run = FinishedRun(store)
    run.seal(4, sealed=False)
    run.succeed()

    ended = verify(run)

    assert ended.code == 1
    assert "not sealed" in ended.out


def test_the_file_is_compared_as_well(store: DirectoryStore, tmp_path: Path) -> None:
    run = FinishedRun(store)
    lines = [{"id": json.loads(run.id_json(n)), **run.body(n)} for n in range(run.prompts)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert verify(run, "--input", str(file)).code == 0

    lines[2]["messages"][0]["content"] = "another"
    lines.append({"id": "new", "prompt": "x"})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ended = verify(run, "--input", str(file), "--json")

    assert ended.code == 1
    assert ended.told["counts"] == {"file": 2}
    assert {finding["id"] for finding in ended.told["findings"]} == {2, "new"}


def test_a_run_in_a_bucket_is_proven_and_exported_likewise(moto: S3Server, tmp_path: Path) -> None:
    bucket = moto.new_bucket()
    run = FinishedRun(moto.store(bucket, "runs/demo"))
    where = ("--output", f"s3://{bucket}/runs/demo", "--endpoint-url", moto.url)

    assert producer("verify", RUN, *where, cwd=tmp_path).out.startswith("OK:")
    assert producer("export", RUN, "--to", "a.jsonl", *where, cwd=tmp_path).code == 0
    assert len((tmp_path / "a.jsonl").read_bytes().splitlines()) == 30

    run.store.delete(object_names.manifest_object(0, 2))

    assert producer("verify", RUN, *where, cwd=tmp_path).code == 1


# --- A row dropped, doubled, altered -------------------------------------------------------------


@pytest.mark.parametrize("mend", [False, True])
def test_a_dropped_row_is_named(store: DirectoryStore, mend: bool) -> None:  # noqa: FBT001
    run = FinishedRun(store)
    lost = row(run.rows(run.manifest(2).shard), 3)["id"]

    run.tamper(2, "shard", lambda rows: rows[:3] + rows[4:], mend=mend)

    assert named(run, "no_row") == {lost}
    assert ("object" in kinds(run)) is not mend
    assert f"id {json.dumps(lost)}" in verify(run).out


@pytest.mark.parametrize("mend", [False, True])
def test_a_doubled_row_is_named(store: DirectoryStore, mend: bool) -> None:  # noqa: FBT001
    run = FinishedRun(store)
    twice = row(run.rows(run.manifest(2).shard), 3)["id"]

    run.tamper(2, "shard", lambda rows: [*rows, rows[3]], mend=mend)

    assert named(run, "doubled") == {twice}


def test_a_row_with_its_record_in_two_batches_is_doubled(store: DirectoryStore) -> None:
    run = FinishedRun(store)
    run.commit(5, [run.entry(3)])
    run.succeed()

    assert kinds(run) == {"doubled": 1}
    assert named(run, "doubled") == {"row-3"}


def test_two_completions_of_two_tries_are_doubled(store: DirectoryStore) -> None:
    run = FinishedRun(store)
    run.commit(5, [run.entry(3, try_=2)])
    run.succeed()

    assert kinds(run) == {"doubled": 1}


def test_an_altered_answer_makes_its_object_and_its_rows_unproven(store: DirectoryStore) -> None:
    run = FinishedRun(store)
    rows = run.rows(run.manifest(2).shard)

    run.tamper(2, "shard", lambda rows: [rows[0].replace(b"answer", b"ANSWER"), *rows[1:]])

    assert kinds(run) == {"object": 1, "unproven": 8}
    assert named(run, "unproven") == {row(rows, at)["id"] for at in range(8)}
    assert run.manifest(2).shard is not None
    assert run.manifest(2).shard.name in verify(run).out  # type: ignore[union-attr]


def change(member: str, value: Any) -> Callable[[Rows], Rows]:
    return lambda rows: [packed({**row(rows, 0), member: value}), *rows[1:]]


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("id", "other"),
        ("fingerprint", "0" * 16),
        ("try", 2),
        ("messages", [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]),
        ("usage", {"prompt_tokens": 3, "completion_tokens": 99}),
        ("tools", [{"type": "function"}]),
        ("choices", []),
        ("key", "../../../../../../../etc/passwd_"),
    ],
)
def test_a_member_that_was_changed_is_found_though_all_hashes_were_mended(
    store: DirectoryStore, member: str, value: Any
) -> None:
    run = FinishedRun(store)

    run.tamper(2, "shard", change(member, value), mend=True)

    assert set(kinds(run)) & {"altered", "no_record"}


def test_an_answer_put_under_another_conversation_is_found(store: DirectoryStore) -> None:
    """The whole conversation of one row is put into another, and all hashes are mended."""
    run = FinishedRun(store)

    def copied(rows: Rows) -> Rows:
        first, second = row(rows, 0), row(rows, 1)
        for member in ("messages", "choices"):
            first[member] = second[member]
        return [packed(first), *rows[1:]]

    run.tamper(2, "shard", copied, mend=True)

    assert kinds(run) == {"altered": 1}


def test_two_swapped_answers_are_named_though_all_hashes_were_mended(
    store: DirectoryStore,
) -> None:
    run = FinishedRun(store)
    rows = run.rows(run.manifest(2).shard)
    ids = {row(rows, 0)["id"], row(rows, 1)["id"]}

    def swapped(rows: Rows) -> Rows:
        first, second = row(rows, 0), row(rows, 1)
        for member in ("messages", "choices"):
            first[member], second[member] = second[member], first[member]
        return [packed(first), packed(second), *rows[2:]]

    run.tamper(2, "shard", swapped, mend=True)

    assert kinds(run) == {"swapped": 2}
    assert named(run, "swapped") == ids
    assert "it holds the answer of id" in verify(run).out


def test_choices_that_are_not_the_end_of_their_conversation_are_found(
    store: DirectoryStore,
) -> None:
    """Only the choices of two rows are swapped, and all hashes are mended."""
    run = FinishedRun(store)

    def swapped(rows: Rows) -> Rows:
        first, second = row(rows, 0), row(rows, 1)
        first["choices"], second["choices"] = second["choices"], first["choices"]
        return [packed(first), packed(second), *rows[2:]]

    run.tamper(2, "shard", swapped, mend=True)

    assert kinds(run)["altered"] == 2
    assert "does not end with its first choice" in verify(run).out


def test_a_run_that_keeps_token_ids_is_ok_with_them(store: DirectoryStore) -> None:
    assert verify(FinishedRun(store, token_ids=True)).code == 0


def one_more_masked(choice: dict[str, Any]) -> None:
    choice["loss_mask"][2] = 1


def mask_too_short(choice: dict[str, Any]) -> None:
    choice["loss_mask"].pop(0)


def mask_moved(choice: dict[str, Any]) -> None:
    choice["loss_mask"] = choice["loss_mask"][::-1]


def without_ids(choice: dict[str, Any]) -> None:
    del choice["token_ids"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (one_more_masked, "loss masks do not cover the generated tokens"),
        (mask_too_short, "loss mask is not that of its token ids"),
        (mask_moved, "loss mask is not that of its token ids"),
        (without_ids, "holds no token ids, which the run keeps"),
    ],
)
def test_token_ids_that_do_not_fit_are_found_though_all_hashes_were_mended(
    store: DirectoryStore, spoil: Callable[[dict[str, Any]], None], words: str
) -> None:
    run = FinishedRun(store, token_ids=True)

    def spoilt(rows: Rows) -> Rows:
        first = row(rows, 0)
        spoil(first["choices"][0])
        return [packed(first), *rows[1:]]

    run.tamper(2, "shard", spoilt, mend=True)

    assert kinds(run)["altered"] == 1
    assert words in verify(run).out


def test_swapped_keys_are_found_though_all_hashes_were_mended(store: DirectoryStore) -> None:
    run = FinishedRun(store)

    def swapped(rows: Rows) -> Rows:
        first, second = row(rows, 0), row(rows, 1)
        for member in ("key", "fingerprint", "id"):
            first[member], second[member] = second[member], first[member]
        return [packed(first), packed(second), *rows[2:]]

    run.tamper(2, "shard", swapped, mend=True)

    assert set(kinds(run)) & {"swapped", "altered"}


def test_a_failure_that_was_changed_is_found(store: DirectoryStore) -> None:
    run = FinishedRun(store, fails=range(0, 30, 5))
    seq = next(m.seq for m in run.manifests() if m.failures)

    run.tamper(seq, "failures", change("request", json.loads(run.prompt(7))), mend=True)

    assert kinds(run) == {"altered": 1}


# --- An object removed ---------------------------------------------------------------------------


@pytest.mark.parametrize("member", ["shard", "keys"])
def test_a_removed_object_names_the_keys_it_held(store: DirectoryStore, member: str) -> None:
    run = FinishedRun(store)
    manifest = run.manifest(2)
    ids = {row(run.rows(manifest.shard), at)["id"] for at in range(8)}
    part = getattr(manifest, member)

    store.delete(part.name)

    assert named(run, "no_row" if member == "shard" else "no_record") == ids
    assert f"{part.name}: is missing" in verify(run).out


@pytest.mark.parametrize("seq", [2, 4])
def test_a_removed_manifest_names_the_keys_it_committed(store: DirectoryStore, seq: int) -> None:
    run = FinishedRun(store)
    ids = {json.loads(line)["id"] for line in run.rows(run.manifest(seq).shard)}

    store.delete(object_names.manifest_object(0, seq))

    assert named(run, "missing") == ids
    found = kinds(run)
    assert found.get("manifest", 0) == (1 if seq == 2 else 0)  # the last one leaves no gap
    assert found["success"] > 0
    assert verify(run, "--json").told["strays"] == 2


def test_removed_inputs_are_found(store: DirectoryStore) -> None:
    run = FinishedRun(store)
    [first, *_] = [found.name for found in store.list(names.INPUTS)]

    store.delete(first)

    assert kinds(run)["unknown"] == 15
    assert f"it names {first}, which is missing" in verify(run).out


def test_changed_inputs_are_found(store: DirectoryStore) -> None:
    run = FinishedRun(store)
    [first, *_] = [found.name for found in store.list(names.INPUTS)]
    run.accept(1, range(14))
    [other] = [f.name for f in store.list(f"{names.INPUTS}00000001") if f.name != first]
    data = store.get(other)
    assert data is not None
    store.put(first, data)
    store.delete(other)

    found = kinds(run)

    assert found["object"] == 1
    assert found["unknown"] == 1


def test_an_accepted_text_that_was_changed_is_found_though_its_name_was_mended(
    store: DirectoryStore,
) -> None:
    """Prompt and answer are changed alike; only the fingerprint still tells of the first text."""
    run = FinishedRun(store)
    [first, *_] = [found.name for found in store.list(names.INPUTS)]
    rows = decompress(store.get(first) or b"").replace(b"prompt 3 ", b"prompt X ")
    store.delete(first)
    store.put(object_names.inputs_object(1, digest_name(rows)[1]), compress(rows))
    seq = next(m.seq for m in run.manifests() if b"prompt 3 " in b"".join(run.rows(m.shard)))
    changed = [r.replace(b"prompt 3 ", b"prompt X ") for r in run.rows(run.manifest(seq).shard)]
    run.tamper(seq, "shard", lambda _: changed, mend=True)
    run.succeed()

    found = kinds(run)

    assert (found["altered"], found["unknown"]) == (1, 1)
    assert "its fingerprint is not that of its request" in verify(run).out


@pytest.mark.parametrize("data", [b"no zstd", b"\x28\xb5\x2f\xfd"])
def test_an_object_that_cannot_be_read_is_named(store: DirectoryStore, data: bytes) -> None:
    run = FinishedRun(store)
    part = run.manifest(2).shard
    assert part is not None

    store.put(part.name, data)

    assert f"{part.name}: cannot be read" in verify(run).out


def test_a_success_that_is_not_true_is_told(store: DirectoryStore) -> None:
    run = FinishedRun(store)
    run.seal(4)

    ended = verify(run)

    assert ended.code == 1
    assert "it is void: it does not cover 1 objects of inputs/" in ended.out


def test_a_manifest_with_other_counts_is_told(store: DirectoryStore) -> None:
    run = FinishedRun(store)
    manifest: Manifest = run.manifest(2)

    run.replace_manifest(msgspec.structs.replace(manifest, completed=9))

    assert kinds(run) == {"manifest": 1}


# --- Where to look -------------------------------------------------------------------------------


def test_an_output_of_another_run_is_refused(store: DirectoryStore) -> None:
    run = FinishedRun(store)

    ended = producer("verify", "other", "--output", run.store.url, cwd=store.root)

    assert ended.code == 5
    assert "is the output of run 'demo'" in ended.err


def test_an_empty_output_is_no_proof(store: DirectoryStore) -> None:
    ended = producer("verify", RUN, "--output", store.url, cwd=store.root)

    assert ended.code == 4
    assert "no run.json" in ended.err


def test_a_run_without_prompts_is_proven_by_nothing_less(store: DirectoryStore) -> None:
    record = RunRecord(
        run=RUN, uid=UID, params=Params(max_tokens=1), output=store.url, created_at=WHEN
    )
    store.put_if_absent(names.RUN_JSON, msgspec.json.encode(record))

    ended = producer("verify", RUN, "--output", store.url, cwd=store.root)

    assert ended.code == 1


def test_no_prompt_and_no_answer_is_told(store: DirectoryStore) -> None:
    run = FinishedRun(store)
    run.tamper(2, "shard", lambda rows: rows[::-1][1:], mend=True)

    ended = verify(run)

    assert "prompt " not in ended.out.replace("prompts ", "")
    assert "answer " not in ended.out
