"""When a batch is due, and that the same entries always make the same objects."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.manifests import identity
from common.models import Entry, Outcome
from common.reader import key_line, parse_key_line
from common.store.frames import decompress
from workers.sink.batch import Limits, Place, Waiting, build, due, record_of

LIMITS = Limits(bytes=1000, rows=10, seconds=600, first_seconds=60)
PLACE = Place(uid="u", partition=0, seq=7)
NOW_MS = 1_700_000_000_000


def waiting(entries: int = 1, *, age_s: float = 0, size: int = 10, closed: int = 1) -> Waiting:
    first = f"{NOW_MS - int(age_s * 1000)}-0" if entries else ""
    return Waiting(entries=entries, first=first, bytes=size, closed=closed)


def entry(number: int, outcome: Outcome = "completed", row: bytes = b'{"a":1}') -> Entry:
    return Entry(
        entry_id=f"{number}-0",
        key=number.to_bytes(16),
        fingerprint=number.to_bytes(8),
        try_=1,
        outcome=outcome,
        row=row,
        input_tokens=3 if outcome == "completed" else 0,
        output_tokens=5 if outcome == "completed" else 0,
    )


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (waiting(0), False),
        (waiting(9, age_s=599, size=999), False),
        (waiting(10), True),
        (waiting(size=1000), True),
        (waiting(age_s=600), True),
        (waiting(age_s=59, closed=0), False),
        (waiting(age_s=60, closed=0), True),
    ],
)
def test_a_batch_is_due_by_rows_bytes_or_age_whichever_comes_first(
    what: Waiting, *, expected: bool
) -> None:
    assert due(what, LIMITS, now_ms=NOW_MS, flush=False) is expected


def test_a_flush_makes_everything_due_but_never_an_empty_batch() -> None:
    assert due(waiting(), LIMITS, now_ms=NOW_MS, flush=True)
    assert not due(waiting(0), LIMITS, now_ms=NOW_MS, flush=True)


def test_completions_and_failures_go_to_their_objects_and_all_to_keys() -> None:
    entries = [entry(1), entry(2, "failed"), entry(3), entry(4, "cancelled")]

    batch = build(entries, PLACE, written_at="now")

    shard, failures, keys = (decompress(part.data).splitlines() for part in batch.parts)
    assert len(shard) == 2
    assert len(failures) == 2
    assert [parse_key_line(line) for line in keys] == [record_of(e) for e in entries]
    manifest = batch.manifest
    assert (manifest.completed, manifest.failed, manifest.cancelled) == (2, 1, 1)
    assert (manifest.input_tokens, manifest.output_tokens) == (6, 10)
    assert (manifest.first, manifest.last) == ("1-0", "4-0")
    assert batch.entries == [(f"{n}-0", 7) for n in range(1, 5)]


def test_a_batch_without_failures_has_no_object_for_them() -> None:
    manifest = build([entry(1)], PLACE, written_at="now").manifest

    assert manifest.failures is None
    assert manifest.shard is not None
    assert manifest.shard.name.startswith("shards/00-00000007-")
    assert manifest.shard.name.endswith(".jsonl.zst")


@given(numbers=st.lists(st.integers(1, 10**6), min_size=1, max_size=30, unique=True))
def test_the_same_entries_give_the_same_objects_whenever_they_are_built(
    numbers: list[int],
) -> None:
    entries = [entry(number) for number in numbers]

    one = build(entries, PLACE, written_at="one time")
    other = build(entries, PLACE, written_at="another")

    assert [part.file for part in one.parts] == [part.file for part in other.parts]
    assert identity(one.manifest) == identity(other.manifest)


def test_other_rows_have_another_name_and_another_identity() -> None:
    one = build([entry(1)], PLACE, written_at="now")
    # The same key and try with another answer: the list of keys alone would not tell them apart.
    other = build([entry(1, row=b'{"a":2}')], PLACE, written_at="now")

    assert one.parts[0].file.name != other.parts[0].file.name
    assert identity(one.manifest) != identity(other.manifest)


def test_a_record_survives_its_line() -> None:
    record = record_of(entry(9, "failed"))

    assert parse_key_line(key_line(record)) == record


def test_a_row_is_stored_byte_for_byte() -> None:
    row = msgspec.json.encode({"text": "ä\r\n\u2028 end"})

    batch = build([entry(1, row=row)], PLACE, written_at="now")

    assert decompress(batch.parts[0].data) == row + b"\n"
