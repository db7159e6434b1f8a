"""The reader function, sorting within bounded memory, and what is read of `inputs/`."""

import random
import tempfile

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import catalog, manifests, object_names
from common.errors import BackendError, ConflictError, StoreDamagedError
from common.models import InputRow, Outcome, Record, Seal
from common.reader import better, current_records
from common.store.frames import compress
from producer.ordering import Ordering
from tests.support.memory_store import MemoryStore

OUTCOMES = st.sampled_from(["completed", "failed", "cancelled"])


def record(key: int, try_: int, outcome: Outcome) -> Record:
    return Record(key=key.to_bytes(16), fingerprint=bytes(8), try_=try_, outcome=outcome)


@pytest.mark.parametrize(
    ("one", "other", "chosen"),
    [
        ((1, "completed"), (2, "failed"), 1),
        ((2, "failed"), (1, "completed"), 1),
        ((1, "failed"), (2, "failed"), 2),
        ((2, "cancelled"), (1, "failed"), 2),
        ((1, "completed"), (2, "completed"), 2),
    ],
)
def test_a_completion_beats_a_failure_then_the_highest_try(
    one: tuple[int, Outcome], other: tuple[int, Outcome], chosen: int
) -> None:
    assert better(record(1, *one), record(1, *other)).try_ == chosen


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), OUTCOMES), max_size=20), st.randoms()
)
def test_the_order_of_records_does_not_matter(
    given_: list[tuple[int, int, Outcome]], shuffle: random.Random
) -> None:
    # One outcome a (key, try), as the protocol has it.
    unique = {(key, try_): record(key, try_, outcome) for key, try_, outcome in given_}
    records = list(unique.values())
    current = current_records(records)
    shuffle.shuffle(records)

    assert current_records(records) == current


def test_bins_give_everything_back_by_prefix_beyond_their_memory() -> None:
    numbers = random.Random(5).sample(range(1 << 32), 5_000)
    lines = [b"%08x\tx\n" % number for number in numbers]

    with catalog.Bins(memory_bytes=4_000) as bins:
        bins.add(lines[:2_500])
        bins.add(lines[2_500:])
        found = list(bins)

    assert sorted(line + b"\n" for lane in found for line in lane) == sorted(lines)
    for lane in found:
        assert len({line[:2] for line in lane}) == 1


def test_matched_bins_bring_all_of_a_key_together() -> None:
    with catalog.Bins(memory_bytes=10) as one, catalog.Bins() as other:
        one.add([b"aa1\n", b"bb1\n"])
        other.add([b"aa2\n", b"cc2\n"])

        assert list(catalog.matched(one, other)) == [
            ([b"aa1"], [b"aa2"]),
            ([b"bb1"], []),
            ([], [b"cc2"]),
        ]


def test_an_input_row_is_cut_by_position_and_decoded_where_it_has_another_form() -> None:
    row = InputRow(key="a" * 32, fp="b" * 16, prompt=msgspec.Raw(b'{"id":1,"x":"\\u007d"}'))
    expected = (b"a" * 32, b"b" * 16, b'{"id":1,"x":"\\u007d"}')
    spaced = b'{ "fp": "%b", "key": "%b", "prompt": {"id":1,"x":"\\u007d"} }' % (
        b"b" * 16,
        b"a" * 32,
    )

    assert catalog.split_input_row(msgspec.json.encode(row)) == expected
    assert catalog.split_input_row(spaced) == expected
    with pytest.raises(StoreDamagedError):
        catalog.split_input_row(b'{"key":"short"}')


def seal(store: MemoryStore, seq: int, *, sealed: bool) -> None:
    data = msgspec.json.encode(Seal(sealed=sealed, source="s", rows=1, ended_at="now"))
    store.put_if_absent(object_names.seal_object(seq, "0" * 16), data)


def test_a_run_is_sealed_when_the_last_object_of_inputs_says_so() -> None:
    store = MemoryStore()
    assert not catalog.sealed(store, catalog.list_inputs(store))
    store.put_if_absent(object_names.inputs_object(1, "a" * 16), compress(b""))
    seal(store, 2, sealed=True)
    assert catalog.sealed(store, catalog.list_inputs(store))
    store.put_if_absent(object_names.inputs_object(3, "c" * 16), compress(b""))
    assert not catalog.sealed(store, catalog.list_inputs(store))
    seal(store, 4, sealed=False)
    assert not catalog.sealed(store, catalog.list_inputs(store))
    seal(store, 5, sealed=True)

    listing = catalog.list_inputs(store)

    assert catalog.sealed(store, listing)
    assert listing.last_seq == 5
    assert len(listing.rows) == 2
    assert len(listing.names) == 5


def test_one_manifest_closes_a_sequence_and_the_second_writer_learns_it() -> None:
    store = MemoryStore()
    first = manifests.void("u", 0, 1, written_at="first")
    other = msgspec.structs.replace(first, void=False, completed=3)

    assert manifests.write(store, other) == other
    assert manifests.write(store, first) == other
    # Again after a lost answer, with another time of writing: the same commit.
    again = msgspec.structs.replace(other, written_at="later")
    assert manifests.identity(manifests.write(store, again)) == manifests.identity(other)


def test_without_conditions_a_manifest_is_named_by_its_content_and_seen_before_a_write() -> None:
    store = MemoryStore(conditional=False)
    first = manifests.void("u", 0, 1, written_at="now")
    other = msgspec.structs.replace(first, void=False, completed=3)

    assert manifests.write(store, other) == other
    assert manifests.write(store, first) == other
    [name] = store.objects
    assert name.startswith("manifest/00-00000001-")


def test_manifests_of_another_run_are_refused() -> None:
    store = MemoryStore()
    manifests.write(store, manifests.void("another", 0, 1, written_at="now"))

    with pytest.raises(ConflictError, match="must not share an output"):
        catalog.manifests_of(store, "mine")


def test_a_missing_or_damaged_object_is_named() -> None:
    store = MemoryStore()
    store.put_if_absent("keys/x", b"no frame")

    with pytest.raises(StoreDamagedError, match="memory:/keys/y is missing"):
        catalog.fetch(store, "keys/y")
    with pytest.raises(StoreDamagedError, match="memory:/keys/x"):
        catalog.fetch(store, "keys/x")


def test_a_temporary_directory_that_is_full_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where nobody can make a folder stands in for where no room is left.
    monkeypatch.setattr(tempfile, "tempdir", "/proc")

    with catalog.Bins(memory_bytes=1) as bins, pytest.raises(BackendError, match="set TMPDIR"):
        bins.add([b"00aa\n"])
    with Ordering(memory_bytes=1) as rows, pytest.raises(BackendError, match="set TMPDIR"):
        rows.add(0, b"row")
