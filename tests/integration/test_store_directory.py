"""What only a directory can do to a store: fill up, be read-only, vanish, keep a dead file."""

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import StoreUnusableError
from common.store import open_store
from common.store.directory import TEMPORARY, DirectoryStore
from common.store.temporary import TemporaryFile
from tests.conftest import REPOSITORY
from tests.support.server_process import wait_until
from tests.support.skips import skip_cannot_run

OBJECT_BYTES = 4_000_000

WRITES_FOR_EVER = f"""
import itertools, sys
from common.store.directory import DirectoryStore
store = DirectoryStore(sys.argv[1])
for number in itertools.count():
    store.put_if_absent(f"shards/{{number:08d}}", bytes({OBJECT_BYTES}))
"""

FILLS_UP = """
import os, sys
from common.errors import StoreFullError
from common.store.directory import DirectoryStore
store = DirectoryStore(sys.argv[1])
assert store.put_if_absent("a", bytes(600_000))
try:
    store.put_if_absent("b", bytes(600_000))
except StoreFullError as error:
    assert error.retryable
    print(error)
assert [found.name for found in store.list()] == ["a"]
assert not os.listdir(store.root / ".headrace-tmp")
os.remove(store.root / "a")
assert store.put_if_absent("b", bytes(600_000))
assert store.get("b") == bytes(600_000)
"""

IS_READ_ONLY = """
import sys
from common.errors import StoreUnusableError
from common.store.directory import DirectoryStore
try:
    DirectoryStore(sys.argv[1]).probe()
except StoreUnusableError as error:
    assert not error.retryable
    print(error)
"""


def on_tmpfs(program: str, folder: Path, options: str) -> "subprocess.CompletedProcess[str]":
    """Run a program on a file system of its own, mounted in a namespace of its own."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        skip_cannot_run("a small file system is mounted with unshare, which Linux has")
    mounted = subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True)
    if mounted.returncode:
        skip_cannot_run("user namespaces are switched off here")
    folder.mkdir()
    script = 'mount -t tmpfs -o "$2" tmpfs "$1" && exec "$3" -c "$4" "$1"'
    return subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", folder, options, sys.executable, program],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_full_disk_is_said_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    done = on_tmpfs(FILLS_UP, tmp_path / "disk", "size=1m")

    assert done.returncode == 0, done.stderr
    assert "no space left" in done.stdout
    assert str(tmp_path / "disk") in done.stdout


def test_a_read_only_directory_is_named(tmp_path: Path) -> None:
    done = on_tmpfs(IS_READ_ONLY, tmp_path / "disk", "ro")

    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "disk") in done.stdout


def test_a_killed_writer_leaves_whole_objects_and_its_temporary_file_goes(tmp_path: Path) -> None:
    for _ in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITES_FOR_EVER, str(tmp_path)], cwd=REPOSITORY
        )
        wait_until(lambda: any((tmp_path / TEMPORARY).glob("*")), "a temporary file")
        writer.send_signal(signal.SIGKILL)
        writer.wait()

        sizes = {found.size_bytes for found in DirectoryStore(tmp_path).list()}

        assert sizes <= {OBJECT_BYTES}
        assert list((tmp_path / TEMPORARY).iterdir()) == []
        shutil.rmtree(tmp_path / "shards", ignore_errors=True)


def test_the_temporary_file_of_a_living_writer_stays(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put("a", b"")
    with TemporaryFile(tmp_path / TEMPORARY, b"half of it") as living:
        DirectoryStore(tmp_path)

        assert living.read_bytes() == b"half of it"
        assert [found.name for found in store.list()] == ["a"]

    assert not living.exists()


def no_links(_: Path, __: Path) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


def test_without_hard_links_it_works_and_is_not_conditional(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, link=no_links)

    store.probe()

    assert not store.conditional
    assert store.put_if_absent("a", b"1")
    assert store.put_if_absent("a", b"1")
    assert not store.put_if_absent("a", b"2")
    assert store.get("a") == b"1"


def test_a_directory_that_vanishes_is_waited_for_and_not_made_anew(tmp_path: Path) -> None:
    root = tmp_path / "mounted"
    store = DirectoryStore(root)
    root.rename(tmp_path / "elsewhere")

    for call in (lambda: store.put_if_absent("a", b""), lambda: list(store.list())):
        with pytest.raises(StoreUnusableError, match="gone") as vanished:
            call()
        assert vanished.value.retryable

    assert not root.exists()
    (tmp_path / "elsewhere").rename(root)
    assert store.put_if_absent("a", b"")


def test_a_missing_directory_is_made_only_when_asked(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusableError, match="no directory"):
        open_store(str(tmp_path / "a/b"), create=False)
    assert not (tmp_path / "a").exists()

    open_store(str(tmp_path / "a/b")).probe()

    assert (tmp_path / "a/b").is_dir()


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(StoreUnusableError, match="file"):
        open_store(str(tmp_path / "file"))
    with pytest.raises(StoreUnusableError, match="file"):
        open_store(str(tmp_path / "file/below"))


def test_a_directory_may_be_named_as_a_url_or_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    relative, url = open_store("out put"), open_store(f"file://{tmp_path}/out%20put")

    assert relative.url == url.url == str(tmp_path / "out put")


def test_objects_are_readable_as_the_umask_says(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    before = os.umask(0o027)
    try:
        store.put_if_absent("a", b"")
        store.put("b", b"")
    finally:
        os.umask(before)

    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ab"} == {0o640}


def test_a_damaged_object_is_not_taken_for_the_same(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put("shards/a.jsonl.zst", b"cut off")

    assert not store.put_if_absent("shards/a.jsonl.zst", b"whole", rows_sha256="0" * 64)
