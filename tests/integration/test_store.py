"""The suite that every store passes: a directory, moto, SeaweedFS, and rclone for the worst."""

import hashlib
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import pytest
import zstandard

from common.errors import UsageError
from common.store import ObjectStore, open_store, s3
from common.store.directory import DirectoryStore
from common.store.frames import compress, digest_name
from common.store.s3 import S3Store
from tests.support.s3 import KINDS, S3Server

ROWS = b'{"id":"a"}\n' * 100
OTHER_ROWS = b'{"id":"b"}\n' * 100


@dataclass(frozen=True)
class Place:
    """Somewhere to open any number of stores at; `open("x")` is a neighbour of `open("y")`.

    Attributes:
        conditional: What `probe` is to find out.
        open: Opens a store on a prefix, as a process of its own would.
    """

    conditional: bool
    open: Callable[[str], ObjectStore]


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Place]]:
    """Start each kind once, whatever order the tests come in."""
    root = tmp_path_factory.mktemp("store")
    with ExitStack() as running:

        @cache
        def place_of(kind: str) -> Place:
            if kind == "directory":
                return Place(conditional=True, open=lambda prefix: DirectoryStore(root / prefix))
            server = running.enter_context(S3Server(kind))
            bucket = server.new_bucket()
            return Place(server.conditional, lambda prefix: server.store(bucket, prefix))

        yield place_of


@pytest.fixture(params=["directory", *KINDS])
def place(request: pytest.FixtureRequest, places: Callable[[str], Place]) -> Place:
    """Each kind of store in turn."""
    return places(request.param)


@pytest.fixture
def prefix() -> str:
    return f"tests/{uuid.uuid4().hex}"


@pytest.fixture
def store(place: Place, prefix: str) -> ObjectStore:
    """An empty store that has been probed, as every command does first."""
    opened = place.open(prefix)
    opened.probe()
    return opened


def names(store: ObjectStore, prefix: str = "") -> list[str]:
    return [found.name for found in store.list(prefix)]


def test_the_probe_tells_whether_conditions_are_honoured(place: Place, store: ObjectStore) -> None:
    assert store.conditional == place.conditional
    assert names(store) == []


def test_what_is_not_there_reads_as_none_and_may_be_deleted(store: ObjectStore) -> None:
    assert store.get("shards/00-00000001.jsonl.zst") is None
    assert names(store, "shards/") == []

    store.delete("shards/00-00000001.jsonl.zst")


@pytest.mark.parametrize(
    "data", [b"", b"\r\n\x00\xff" * 1000, os.urandom(20_000_000)], ids=["empty", "binary", "20MB"]
)
def test_an_object_comes_back_byte_for_byte(store: ObjectStore, data: bytes) -> None:
    assert store.put_if_absent("shards/x.parquet", data)

    assert store.get("shards/x.parquet") == data
    assert [(found.name, found.size_bytes) for found in store.list()] == [
        ("shards/x.parquet", len(data))
    ]


def test_the_same_rows_written_again_are_a_success(store: ObjectStore) -> None:
    digest, _ = digest_name(ROWS)
    once, otherwise = compress(ROWS), zstandard.ZstdCompressor(level=1).compress(ROWS)
    assert once != otherwise

    assert store.put_if_absent("shards/x.jsonl.zst", once, rows_sha256=digest)
    assert store.put_if_absent("shards/x.jsonl.zst", once, rows_sha256=digest)
    assert store.put_if_absent("shards/x.jsonl.zst", otherwise, rows_sha256=digest)

    assert store.get("shards/x.jsonl.zst") == once


def test_other_rows_under_the_name_are_refused_and_change_nothing(store: ObjectStore) -> None:
    first, second = compress(ROWS), compress(OTHER_ROWS)
    store.put_if_absent("shards/x.jsonl.zst", first, rows_sha256=digest_name(ROWS)[0])

    assert not store.put_if_absent(
        "shards/x.jsonl.zst", second, rows_sha256=digest_name(OTHER_ROWS)[0]
    )

    assert store.get("shards/x.jsonl.zst") == first


@pytest.mark.parametrize("kind", KINDS)
def test_s3_keeps_the_hash_of_the_rows_beside_any_bytes(
    places: Callable[[str], Place], prefix: str, kind: str
) -> None:
    store = places(kind).open(prefix)
    store.probe()
    store.put_if_absent("shards/a.bin", b"written by one version", rows_sha256="a" * 64)

    assert store.put_if_absent("shards/a.bin", b"and by another", rows_sha256="a" * 64)
    assert not store.put_if_absent("shards/a.bin", b"and by another", rows_sha256="b" * 64)


def test_a_name_that_ends_in_its_rows_hash_holds_no_other_rows(store: ObjectStore) -> None:
    digest, first = digest_name(ROWS)
    name = f"shards/00-00000001-{first}.parquet"

    assert store.put_if_absent(name, b"PAR1 by one version PAR1", rows_sha256=digest)
    assert store.put_if_absent(name, b"PAR1 and by another version PAR1", rows_sha256=digest)


def test_without_a_rows_hash_the_bytes_decide(store: ObjectStore) -> None:
    assert store.put_if_absent("run.json", b'{"uid":"1"}')

    assert store.put_if_absent("run.json", b'{"uid":"1"}')
    assert not store.put_if_absent("run.json", b'{"uid":"2"}')


def test_of_eight_writers_of_one_name_one_wins(place: Place, prefix: str) -> None:
    stores = [place.open(prefix) for _ in range(8)]
    for each in stores:
        each.probe()
    for number in range(3):
        name = f"manifest/00-{number:08d}.json"
        contents = [f'{{"writer":{writer}}}'.encode() for writer in range(8)]

        results = at_once(
            [
                partial(each.put_if_absent, name, content)
                for each, content in zip(stores, contents, strict=True)
            ]
        )

        left = stores[0].get(name)
        if place.conditional:
            assert [c for c, won in zip(contents, results, strict=True) if won] == [left]
        else:
            assert any(results)
            assert left in contents


def at_once(calls: list[Callable[[], bool]]) -> list[bool]:
    """Run all calls at the same moment, each in a thread."""
    gate = threading.Barrier(len(calls))

    def run(call: Callable[[], bool]) -> bool:
        gate.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(run, calls))


def test_a_replaced_object_is_the_last_one(store: ObjectStore) -> None:
    store.put("progress.json", b"1")

    store.put("progress.json", b"22")

    assert store.get("progress.json") == b"22"
    store.delete("progress.json")
    assert store.get("progress.json") is None


def test_a_listing_of_more_than_one_page_is_whole_and_in_order(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PAGE", 50)
    written = [f"shards/00-{number:08d}-{number:016x}.jsonl.zst" for number in range(105)]
    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(lambda name: store.put_if_absent(name, b"x"), reversed(written)))
    store.put("shards.json", b"beside the folder")

    assert names(store, "shards/") == written
    assert names(store, "shards/00-00000100") == written[100:101]
    assert len(names(store)) == 106


def test_names_are_listed_by_their_bytes_over_folders(store: ObjectStore) -> None:
    written = ["a-b", "a.c", "a/x", "a/x-1/y", "a/x0", "a0", "b/c", "b=1/c", "z", "é"]
    for name in reversed(written):
        store.put(name, b"")

    assert names(store) == written
    assert names(store, "a") == written[:6]
    assert names(store, "a/x") == written[2:5]
    assert names(store, "a/") == written[2:5]
    assert names(store, "b=") == ["b=1/c"]
    assert all(x.encode() < y.encode() for x, y in pairwise(written))


ODD_NAMES = [
    *("a b", "a&b=c", "a'b\"c", "a%2Fb", "a+b", "telemetry/gpu0@host.json", "x" * 200),
    *("~a?#b", "日本/é"),
]


def test_odd_but_possible_names_are_kept_as_they_are(store: ObjectStore) -> None:
    for name in ODD_NAMES:
        assert store.put_if_absent(name, name.encode())

    assert [store.get(name) for name in ODD_NAMES] == [name.encode() for name in ODD_NAMES]
    assert names(store) == sorted(ODD_NAMES, key=str.encode)


def test_one_output_does_not_see_its_neighbour(place: Place, prefix: str) -> None:
    here, neighbour = place.open(f"{prefix}/run"), place.open(f"{prefix}/run2")

    neighbour.put("run.json", b"other")

    assert names(here) == []
    assert here.get("run.json") is None


@pytest.mark.parametrize(
    "name",
    ["", "/a", "a/", "a//b", "../a", "a/..", "./a", "a/./b", "a\nb", "a\0b", "a\\b", "x" * 300],
)
def test_names_that_some_server_mangles_are_refused(tmp_path: Path, name: str) -> None:
    for store in (DirectoryStore(tmp_path), S3Store("bucket")):
        for call in (store.get, store.delete, partial(store.put, data=b"")):
            with pytest.raises(UsageError):
                call(name)
        with pytest.raises(UsageError):
            store.put_if_absent(name, b"")


def test_rows_are_named_by_their_hash() -> None:
    digest, first = digest_name(ROWS)

    assert digest == hashlib.sha256(ROWS).hexdigest()
    assert first == digest[:16]


@pytest.mark.parametrize(
    "url",
    [
        *("", "ftp://host/x", "gs://bucket/x", "file://host/x", "file://"),
        *("s3://", "s3:///x", "s3://user:secret@b/x"),
        *("s3://b/../x", "s3://b//x", "s3://b/a b", "s3://b/x%2F"),
    ],
)
def test_what_is_no_store_is_refused_and_what_is_allowed_is_said(url: str) -> None:
    with pytest.raises(UsageError) as refused:
        open_store(url)

    assert "s3://BUCKET/PREFIX" in str(refused.value) or "prefix" in str(refused.value)
    assert "secret" not in str(refused.value)
