"""A directory that others can write to: what they leave there neither holds us up nor leads us."""

import os
import threading
from pathlib import Path

import pytest

from common.errors import StoreDamagedError, StoreDeniedError
from common.store import frames
from common.store.directory import TEMPORARY, DirectoryStore
from tests.support.skips import skip_cannot_run

NAME = "shards/00-00000001-x.jsonl.zst"
OTHER_UID = 65_534
WHAT = "no regular file: Headrace did not write it; remove it, or restore it from a copy"


def listed(store: DirectoryStore, prefix: str = "") -> list[str]:
    return [found.name for found in store.list(prefix)]


def ended(call: "threading.Thread") -> bool:
    call.start()
    call.join(60)
    return not call.is_alive()


@pytest.mark.parametrize("kind", ["pipe", "device", "link to a device", "link to itself"])
def test_what_is_no_file_is_no_object_and_holds_nobody_up(tmp_path: Path, kind: str) -> None:
    store = DirectoryStore(tmp_path)
    path = tmp_path / NAME
    path.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to itself":
        path.symlink_to(path.name)
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    else:
        try:
            os.mknod(path, 0o666 | 0o020000, os.makedev(1, 5))  # /dev/zero
        except PermissionError:
            skip_cannot_run("only root may make a device")
    said: list[object] = []

    def look() -> None:
        try:
            store.get(NAME)
        except StoreDamagedError as error:
            said.append(str(error))
        said.append(store.put_if_absent(NAME, b"ours"))
        said.append(listed(store))

    assert ended(threading.Thread(target=look, daemon=True)), "somebody waits for it"
    assert said == [
        f"{path} is {WHAT}",
        False,
        [],
    ]


def test_an_object_that_is_longer_than_any_of_ours_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "MOST_UNPACKED_BYTES", 1_000)
    store = DirectoryStore(tmp_path)
    assert store.put_if_absent("a", bytes(1_000))
    (tmp_path / "b").write_bytes(bytes(1_001))

    assert store.get("a") == bytes(1_000)
    with pytest.raises(StoreDamagedError, match="1,001 bytes long"):
        store.get("b")
    assert not store.put_if_absent("b", b"ours")


def foreign_link(path: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    path.symlink_to(target)
    try:
        os.lchown(path, OTHER_UID, OTHER_UID)
    except PermissionError:
        skip_cannot_run("only root may give a link away")


def test_a_link_of_another_user_leads_nowhere(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    store = DirectoryStore(root)
    foreign_link(root / "shards", elsewhere)

    for call in (lambda: store.put_if_absent(NAME, b"x"), lambda: store.put(NAME, b"x")):
        with pytest.raises(StoreDeniedError, match=r"out/shards is a link that another user made"):
            call()
    with pytest.raises(StoreDeniedError, match="another user"):
        listed(store, "shards/")

    assert list(elsewhere.iterdir()) == []


def test_nothing_is_removed_through_a_link_in_the_place_of_our_temporary_files(
    tmp_path: Path,
) -> None:
    root, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    store = DirectoryStore(root)
    elsewhere.mkdir()
    (elsewhere / "precious").write_bytes(b"kept")
    (root / TEMPORARY).symlink_to(elsewhere)

    for call in (lambda: DirectoryStore(root), lambda: store.put("progress.json", b"{}")):
        with pytest.raises(StoreDeniedError, match="remove the link"):
            call()

    assert (elsewhere / "precious").read_bytes() == b"kept"


def test_a_folder_that_its_user_has_moved_and_linked_goes_on(tmp_path: Path) -> None:
    root, moved = tmp_path / "out", tmp_path / "moved"
    store = DirectoryStore(root)
    assert store.put_if_absent(NAME, b"first")
    (root / "shards").rename(moved)
    (root / "shards").symlink_to(moved)

    assert store.put_if_absent(NAME.replace("1-x", "2-x"), b"second")

    assert listed(store) == [NAME, NAME.replace("1-x", "2-x")]
    assert store.get(NAME) == b"first"


@pytest.mark.parametrize("link", ["again", "shards/again", "shards/deeper/again"])
@pytest.mark.parametrize("target", [".", "..", "shards"])
def test_a_link_that_leads_back_ends_no_list(tmp_path: Path, link: str, target: str) -> None:
    store = DirectoryStore(tmp_path / "out")
    assert store.put_if_absent(NAME, b"x")
    path = tmp_path / "out" / link
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(tmp_path / "out" / target)

    assert listed(store) == [NAME]
