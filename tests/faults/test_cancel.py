"""`producer cancel` with real worker groups, a sink and kills, beside a run that goes on."""

import signal
from pathlib import Path

import pytest

from common import names
from tests.acceptance.test_main_job import answers_its_own_request
from tests.support.fleet import Fleet, read_rows, write_prompts
from tests.support.server_process import wait_until
from tests.support.watching import open_now

PROMPTS = 3_000
BOUND = 16
QUICK = ("--batch-seconds", "1", "--first-batch-seconds", "1")


@pytest.mark.timeout(400)
def test_kills_during_a_cancel_end_every_prompt_once_and_another_run_goes_on(
    tmp_path: Path,
) -> None:
    doomed = write_prompts(tmp_path / "doomed.jsonl", PROMPTS, text="doomed {i}")
    other = write_prompts(tmp_path / "other.jsonl", 400, text="other {i}")
    with Fleet(tmp_path, servers=2, latency="lognormal:0.3:1", cap=BOUND) as fleet:
        out = str(tmp_path / "other_out")
        fleet.client.set("foo", "bar")
        fleet.enqueue(doomed)
        fleet.producer("enqueue", str(other), "--output", out, "--max-tokens", "32")
        for gpu in range(2):
            fleet.start_group(gpu, "--concurrency", str(BOUND))
        fleet.start_sink("sink", *QUICK)
        fleet.wait(lambda: fleet.counts("doomed").completed >= 100, "some completions")

        killed = fleet.spawn("cancel", "producer", "cancel", "doomed", "--yes")
        wait_until(lambda: fleet.counts("doomed").cancelled >= 100, "some to be cancelled")
        killed.kill()
        del fleet.processes["cancel"]
        for name in ("gpu0", "sink"):
            fleet.processes.pop(name).kill()
        fleet.start_sink("sink", *QUICK)
        ended = fleet.producer("cancel", "doomed", "--yes", "--wait", "0")
        fleet.start_group(0, "--concurrency", str(BOUND))
        fleet.wait(lambda: all_stored(fleet, "doomed"), "the cancelled run to be stored")
        fleet.wait((Path(out) / "_SUCCESS").exists, "the other run to end")

        assert "is cancelled" in ended.stderr
        counts = fleet.counts("doomed")
        assert counts.completed + counts.cancelled == counts.total == PROMPTS
        assert counts.cancelled > PROMPTS // 2
        rows = read_rows(Path(fleet.output), ("shards", "failures"))
        assert len(rows) == len({row["key"] for row in rows}) == PROMPTS
        assert not (Path(fleet.output) / "_SUCCESS").exists()
        verified = fleet.producer("verify", "doomed", check=False)
        assert verified.returncode == 1
        assert "CANCELLED" in verified.stdout
        assert fleet.client.llen(names.rq_queue("doomed")) == 0
        assert fleet.client.get("foo") == b"bar"
        answers = read_rows(Path(out), ("shards",))
        assert sorted(str(row["id"]) for row in answers) == sorted(f"p{i}" for i in range(400))
        assert all(answers_its_own_request(row) for row in answers)
        assert all("other" in str(row["messages"]) for row in answers)


def all_stored(fleet: Fleet, run: str) -> bool:
    counts = fleet.counts(run)
    return not counts.queued + counts.in_flight + counts.stream_entries


@pytest.mark.timeout(400)
def test_open_requests_are_aborted_at_the_server_within_seconds(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 40)
    with Fleet(tmp_path, latency="fixed:0.1", cap=8) as fleet:
        fleet.simulator.control("no_answer", match="say ")
        fleet.enqueue(prompts)
        fleet.start_group(0, "--concurrency", "8")
        fleet.start_sink("sink", *QUICK)
        fleet.wait(lambda: open_now(fleet) == 8, "a full server")

        ended = fleet.producer("cancel", "job", "--yes", "--json")

        assert '"left":""' in ended.stdout
        assert fleet.counts("job").cancelled == 40
        fleet.wait(lambda: open_now(fleet) == 0, "the server to be empty")
        group = fleet.processes.pop("gpu0")
        group.send(signal.SIGTERM)
        wait_until(lambda: not group.alive(), "the worker group to stop")
