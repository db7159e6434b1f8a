"""The store full, read-only or littered while a run goes on: the flow waits, nothing is lost."""

import json
import shutil
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest

from common import names
from common.ending import stands
from common.store.directory import DirectoryStore
from tests.support.fleet import Fleet, kill_group, write_prompts
from tests.support.skips import skip_cannot_run
from tests.support.watching import QUICK_SINK, write_rows

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


@pytest.mark.timeout(400)
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


@pytest.mark.timeout(400)
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


@pytest.mark.timeout(600)
def test_b92_a_sink_that_is_killed_on_a_full_disk_has_acknowledged_nothing(
    tmp_path: Path, small_disk: Path
) -> None:
    # Hashes do not shrink: these fill the disk, compressed or not.
    hashes = [b"".join(sha256(b"%d %d" % (n, m)).digest() for m in range(70)) for n in range(200)]
    texts = [b64encode(each).decode() for each in hashes]
    prompts = write_rows(tmp_path / f"{RUN}.jsonl", texts)
    remount(small_disk, "size=16m")
    with Fleet(
        tmp_path, output=str(small_disk / "out"), latency="0.01", cap=32, answer_bytes=2_000
    ) as fleet:
        fleet.enqueue(prompts)
        filler = small_disk / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - 100_000))
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait(lambda: fleet.counts(RUN).completed == len(texts), "all answers", 240)
        fleet.wait(lambda: says_full(fleet.processes["sink"].log), "the sink to say so", 240)
        kill_group(fleet.processes.pop("sink"))
        # Whatever is not in the store waits in Redis.
        assert fleet.counts(RUN).stream_entries + len(fleet.rows("shards")) >= len(texts)
        assert fleet.counts(RUN).stream_entries > 0

        filler.unlink()
        fleet.start_sink("another", *QUICK_SINK)
        counts = fleet.wait_done(RUN, limit_s=300)

        assert counts.completed == fleet.prompt_requests() == len(texts)
        assert len(fleet.rows("shards")) == len(texts)
        fleet.verify(RUN)


def says_full(log: Path) -> bool:
    return "no space left" in log.read_text()


def says_so(log: Path) -> bool:
    return "its progress is not written" in log.read_text()


@pytest.mark.timeout(400)
def test_a_state_folder_that_is_full_or_gone_is_said_once_and_stops_nothing(
    tmp_path: Path, small_disk: Path
) -> None:
    prompts = write_prompts(tmp_path / f"{RUN}.jsonl", 200)
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    no_folder = tmp_path / "file"
    no_folder.touch()
    with Fleet(tmp_path, latency="0.01", cap=8) as fleet:
        fleet.enqueue(prompts)
        fleet.start_group()
        sinks = {
            name: fleet.start_sink(name, *QUICK_SINK, "--state-dir", str(folder))
            for name, folder in (("full", small_disk / "state"), ("gone", no_folder / "state"))
        }
        for name, sink in sinks.items():
            fleet.wait(partial(says_so, sink.log), f"the sink {name} to say so", 120)

        fleet.wait_done(RUN, limit_s=240)
        fleet.wait(
            lambda: (
                json.loads((Path(fleet.output) / names.PROGRESS).read_bytes())["status"]
                == "completed"
            ),
            "the progress in the output, which has room",
            120,
        )

        assert "No space left" in sinks["full"].log.read_text()
        assert "Not a directory" in sinks["gone"].log.read_text()
        for sink in sinks.values():
            assert sink.log.read_text().count("its progress is not written") == 1
            assert "Traceback" not in sink.log.read_text()
