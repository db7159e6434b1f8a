"""Cases of runs that go on: failures tried again, parts, kills of everything, torn files."""

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from common import names, object_names
from common.store.frames import compress, decompress
from tests.support.fleet import Fleet, write_prompts
from tests.support.rq_tools import RqTools
from tests.support.watching import QUICK_SINK, open_now, write_rows

pytestmark = pytest.mark.timeout(400)

RUN = "job"


def told(fleet: Fleet, *arguments: str) -> tuple[int, Any]:
    done = fleet.producer(*arguments, "--json", check=False)
    return done.returncode, json.loads(done.stdout)


# --- B53 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("error_500", "enqueue"),
        ("bad_params", "retry"),
        ("abort", "rq requeue"),
    ],
)
def test_b53_failed_prompts_are_tried_again_on_request_and_only_they(
    tmp_path: Path, kind: str, how: str
) -> None:
    bad = {3, 11, 19}
    texts = [f"{'BAD ' if i in bad else ''}say {i}" for i in range(20)]
    file = write_rows(tmp_path / f"{RUN}.jsonl", texts)
    with Fleet(tmp_path, latency="0.01", cap=4, faults=(f"{kind}:match=BAD",)) as fleet:
        fleet.enqueue(file, "--attempts", "1")
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait_done(RUN)
        first = fleet.prompt_requests()
        fleet.simulator.clear()

        without = fleet.producer(*fleet.enqueue_arguments(file), "--attempts", "1", check=False)
        again = fleet.counts(RUN)
        assert (without.returncode, fleet.prompt_requests()) == (1, first)
        assert "3 failed" in without.stderr
        assert "--retry-failed" in without.stderr
        assert (again.completed, again.failed, again.queued) == (17, 3, 0)

        if how == "enqueue":
            fleet.enqueue(file, "--attempts", "1", "--retry-failed")
        elif how == "retry":
            other = fleet.producer("retry", RUN, "--reason", "5xx")
            assert "none of them was asked for" in other.stderr
            fleet.producer("retry", RUN, "--reason", "4xx")
        else:
            RqTools("3", fleet.redis.url).rq("requeue", "--queue", RUN, "--all")
        fleet.wait(lambda: fleet.counts(RUN).completed == 20, "all to be completed")
        counts = fleet.wait_done(RUN)

        assert (counts.completed, counts.failed, counts.total) == (20, 0, 20)
        assert fleet.prompt_requests() == first + 3
        fleet.verify(RUN, "--input", str(file))
        # Both records are in the store; a reader sees one.
        exported = fleet.producer("export", RUN, "--to", "a.jsonl", "--failures", "f.jsonl")
        assert exported.returncode == 0
        assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 20
        assert (tmp_path / "f.jsonl").read_text() == ""


# --- B54 -----------------------------------------------------------------------------------------


def test_b54_the_first_part_stays_byte_for_byte_whatever_was_restarted(tmp_path: Path) -> None:
    """Everything is killed between the parts, Redis included, and comes back empty."""
    with Fleet(tmp_path, latency="0.01", cap=4) as fleet:
        file = write_prompts(tmp_path / f"{RUN}.jsonl", 10)
        fleet.enqueue(file, "--limit", "5")
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait_done(RUN)
        code, first = told(fleet, "status", RUN)
        assert code == 0
        before = content_of(Path(fleet.output))
        kill_all(fleet)
        fleet.redis.wipe()

        fleet.enqueue(file)
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait_done(RUN)

        after = content_of(Path(fleet.output))
        assert before.items() <= after.items()
        assert len(after) > len(before)
        _, figures = told(fleet, "status", RUN)
        assert (figures["completed"], figures["s3_uploaded"]) == (10, 10)
        assert figures["s3_bytes"] > first["s3_bytes"]
        usages: list[Any] = [row["usage"] for row in fleet.rows()]
        tokens = sum(usage["completion_tokens"] for usage in usages)
        assert figures["total_output_tokens"] == tokens > first["total_output_tokens"]
        fleet.verify(RUN)


def content_of(output: Path) -> dict[str, bytes]:
    """What may never change: every object but `progress.json` and `_SUCCESS`."""
    return {
        str(path.relative_to(output)): path.read_bytes()
        for path in output.rglob("*")
        if path.is_file() and path.name not in {names.SUCCESS, names.PROGRESS}
    }


def kill_all(fleet: Fleet) -> None:
    for process in fleet.processes.values():
        process.kill()
    fleet.processes.clear()


# --- B56 -----------------------------------------------------------------------------------------


def test_b56_a_kill_of_everything_costs_what_was_in_flight_and_no_more(tmp_path: Path) -> None:
    """Two worker groups, the sink and Redis are killed at once, at half of the run."""
    count, bound = 200, 8
    file = write_prompts(tmp_path / f"{RUN}.jsonl", count)
    with Fleet(tmp_path, servers=2, latency="lognormal:0.2:1", cap=bound) as fleet:
        fleet.enqueue(file)
        start_all(fleet, bound)
        fleet.wait(lambda: fleet.counts(RUN).completed >= count // 2, "half of the run")

        for process in fleet.processes.values():
            process.send(signal.SIGSTOP)
        # What was on its way to the servers reaches them, and their answers reach nobody.
        fleet.wait(lambda: open_now(fleet, 0) == open_now(fleet, 1) == 0, "idle servers")
        held = fleet.prompt_requests() - fleet.counts(RUN).completed
        fleet.redis.kill()
        kill_all(fleet)
        fleet.redis.start()
        # The dead sink's lease has run out, without the wait for it.
        fleet.client.hset(names.sink(RUN, 0), "deadline_ms", 1)
        start_all(fleet, bound)
        counts = fleet.wait_done(RUN)

        assert (counts.completed, counts.failed) == (count, 0)
        assert Counter(row["id"] for row in fleet.rows()) == Counter(f"p{i}" for i in range(count))
        assert fleet.prompt_requests() <= count + held
        # What was open, and results that were not recorded yet when their slots were refilled.
        assert held <= 2 * bound + 4
        assert fleet.max_open() <= bound + 1, "a probe beside a full server"
        fleet.verify(RUN, "--input", str(file))


def start_all(fleet: Fleet, bound: int) -> None:
    for gpu in (0, 1):
        fleet.start_group(gpu, "--concurrency", str(bound))
    fleet.start_sink("sink", *QUICK_SINK)


# --- B58 -----------------------------------------------------------------------------------------


def test_b58_torn_files_in_the_output_harm_nothing_that_comes_after(
    tmp_path: Path, cases_folder: Path
) -> None:
    """What writers leave that are killed, on file systems that tear: halves under every name."""
    torn = (cases_folder / "inputs" / "B58_done_torn.jsonl").read_bytes()
    output = tmp_path / "out"
    with Fleet(tmp_path, latency="0.01", cap=4) as fleet:
        file = write_prompts(tmp_path / f"{RUN}.jsonl", 30)
        fleet.enqueue(file, "--limit", "10")
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait_done(RUN)
        fleet.processes["sink"].stop()
        fleet.processes["gpu0"].stop()
        fleet.processes.clear()

        planted = plant_torn(output, torn)
        for place in (output / names.PROGRESS, output / names.SUCCESS):
            place.write_bytes(place.read_bytes()[:20])
        note = tmp_path / "state" / RUN / "progress.json"
        note.write_bytes(note.read_bytes()[:20])
        for name in ("a.jsonl", "f.jsonl", f"{RUN}.rejected.jsonl"):
            (tmp_path / name).write_bytes(torn)

        with file.open("a") as more:
            more.write("not JSON\n")
        fleet.enqueue(file, "--skip-invalid")
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        counts = fleet.wait_done(RUN)
        fleet.verify(RUN)
        fleet.producer("export", RUN, "--to", "a.jsonl", "--failures", "f.jsonl")
        fleet.processes.pop("sink").stop()

        assert (counts.completed, counts.total) == (30, 30)
        for name, rows in (("a.jsonl", 30), ("f.jsonl", 0), (f"{RUN}.rejected.jsonl", 1)):
            assert len(whole_lines((tmp_path / name).read_bytes())) == rows
        for place in (output / names.PROGRESS, output / names.SUCCESS, note):
            assert json.loads(place.read_bytes())["total"] == 30
        for path in [*output.glob("shards/*.zst"), *output.glob("inputs/*.zst")]:
            if path not in planted:
                assert whole_lines(decompress(path.read_bytes()))


def plant_torn(output: Path, torn: bytes) -> set[Path]:
    """Put objects that no manifest names: halves, and text without its last newline."""
    planted = set()
    for folder, suffix in (("shards", "jsonl"), ("failures", "jsonl"), ("keys", "tsv")):
        for seq, data in ((2, compress(torn)[:-9]), (3, compress(torn)), (4, torn), (5, b"")):
            name = object_names.part_object(f"{folder}/", 0, seq, f"{seq:x}" * 16, f"{suffix}.zst")
            path = output / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            planted.add(path)
    return planted


def whole_lines(data: bytes) -> list[Any]:
    """The lines, each one JSON object and ended."""
    assert not data or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]
