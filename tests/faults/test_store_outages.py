"""The store full, read-only or littered while a run goes on: the flow waits, nothing is lost."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import names
from common.ending import stands
from common.store.directory import DirectoryStore
from tests.support.fleet import Fleet, write_prompts
from tests.support.skips import skip_cannot_run
from tests.support.watching import QUICK_SINK

RUN = "job"
PROMPTS = 1_500


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 900 KiB, where this user may make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=900k", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        skip_cannot_run("only root may mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(folder)], check=True)


@pytest.mark.timeout(120)
def test_a_full_disk_is_told_and_goes_on_when_there_is_room(
    tmp_path: Path, small_disk: Path
) -> None:
    prompts = write_prompts(tmp_path / f"{RUN}.jsonl", PROMPTS)
    output = str(small_disk / "out")
    with Fleet(tmp_path, output=output, latency="0.02", cap=32, answer_bytes=4_000) as fleet:
        fleet.enqueue(prompts)
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait(lambda: '"s3_error"' in status(fleet), "status to say that nothing is stored")
        page = fleet.producer("status", RUN, check=False).stdout
        assert "No space left" in " ".join(page.split())

        remount(small_disk, "size=64m")
        counts = fleet.wait_done(RUN)

        assert counts.completed == fleet.prompt_requests() == PROMPTS
        fleet.verify(RUN)


@pytest.mark.timeout(120)
def test_a_disk_that_turns_read_only_is_waited_for(tmp_path: Path, small_disk: Path) -> None:
    prompts = write_prompts(tmp_path / f"{RUN}.jsonl", PROMPTS)
    output = str(small_disk / "out")
    with Fleet(tmp_path, output=output, latency="fixed:0.2", cap=64) as fleet:
        fleet.enqueue(prompts)
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait(lambda: fleet.counts(RUN).s3_uploaded > 0, "the first shard")
        remount(small_disk, "ro")
        fleet.wait(lambda: '"s3_error"' in status(fleet), "status to say that nothing is stored")

        remount(small_disk, "rw")
        counts = fleet.wait_done(RUN)

        assert counts.completed == PROMPTS
        fleet.verify(RUN)


def status(fleet: Fleet) -> str:
    return fleet.producer("status", RUN, "--json", check=False).stdout


@pytest.mark.parametrize("planted", [b"", b"{}", b"\xff"])
def test_a_foreign_success_is_none_and_is_replaced(tmp_path: Path, planted: bytes) -> None:
    prompts = write_prompts(tmp_path / f"{RUN}.jsonl", 20)
    with Fleet(tmp_path, latency="0", cap=8) as fleet:
        fleet.enqueue(prompts)
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait_done(RUN)
        fleet.processes.pop("sink").stop()
        success = Path(fleet.output, names.SUCCESS)
        success.write_bytes(planted)

        fleet.start_sink("sink", *QUICK_SINK)

        store = DirectoryStore(Path(fleet.output))
        fleet.wait(lambda: stands(store), "a proof of its own")
        fleet.verify(RUN)
