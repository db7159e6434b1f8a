"""Only a window of the requests is in Redis: whoever dies, whatever is lost, all are done once."""

import signal
from functools import partial
from pathlib import Path

import pytest

from common import names
from tests.support.fleet import Fleet, write_prompts

RUN = "job"
WINDOW = 100
PROMPTS = 3_000
QUICK_SINK = ("--batch-seconds", "0.5", "--first-batch-seconds", "0.5", "--poll", "0.1")


def in_redis(fleet: Fleet) -> int:
    """How many requests Redis holds."""
    return sum(1 for _ in fleet.client.scan_iter(f"{names.RQ_JOB_STEM}*", count=1000))


def done(fleet: Fleet, goal: int) -> bool:
    return fleet.counts(RUN).completed >= goal


@pytest.mark.timeout(400)
def test_sinks_that_feed_may_be_killed_and_the_window_holds(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / f"{RUN}.jsonl", PROMPTS)
    with Fleet(tmp_path, servers=1, latency="0.01", cap=16) as fleet:
        said = fleet.enqueue(prompts, "--window", str(WINDOW)).stderr
        assert f"{PROMPTS - WINDOW:,} prompts wait in the output" in said
        assert fleet.counts(RUN).unfed == PROMPTS - WINDOW
        fleet.start_group(0)
        most = 0
        for kill in range(3):
            fleet.start_sink("sink", *QUICK_SINK)
            goal = PROMPTS * (kill + 1) // 5
            fleet.wait(partial(done, fleet, goal), f"{goal} done", 90)
            most = max(most, in_redis(fleet))
            fleet.processes["sink"].send(signal.SIGKILL)
            fleet.processes.pop("sink").kill()
        assert most <= WINDOW
        fleet.start_sink("sink", *QUICK_SINK)
        counts = fleet.wait_done(RUN, 120)

        assert (counts.total, counts.completed, counts.unfed) == (PROMPTS, PROMPTS, 0)
        assert fleet.prompt_requests() == PROMPTS
        fleet.verify(RUN)


@pytest.mark.timeout(400)
def test_a_worker_group_feeds_where_no_sink_runs(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / f"{RUN}.jsonl", 300)
    with Fleet(tmp_path, servers=1, latency="0.01", cap=16) as fleet:
        fleet.enqueue(prompts, "--window", str(WINDOW))
        fleet.start_group(0)
        fleet.wait(lambda: fleet.counts(RUN).completed == 300, "all to be done", 90)


@pytest.mark.timeout(400)
def test_a_redis_that_is_wiped_gets_everything_back(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / f"{RUN}.jsonl", PROMPTS)
    with Fleet(tmp_path, servers=1, latency="0.01", cap=16) as fleet:
        fleet.enqueue(prompts, "--window", str(WINDOW))
        fleet.start_group(0)
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait(lambda: fleet.counts(RUN).completed >= PROMPTS // 3, "a third", 90)
        fleet.client.flushall()
        fleet.enqueue(prompts, "--window", str(WINDOW))

        counts = fleet.wait_done(RUN, 120)

        assert (counts.total, counts.completed) == (PROMPTS, PROMPTS)
        fleet.verify(RUN)
