"""A Redis that forgets its scripts, throws its clients out and ends idle ones: nothing is lost."""

from pathlib import Path

import pytest

from common import connect
from common.queue import Runs
from tests.support.fleet import Fleet, write_prompts
from tests.support.watching import QUICK_SINK

RUN = "job"
PROMPTS = 600
ROUNDS = 6


@pytest.mark.timeout(400)
def test_a_run_goes_on_through_forgotten_scripts_and_clients_that_are_thrown_out(
    tmp_path: Path,
) -> None:
    prompts = write_prompts(tmp_path / f"{RUN}.jsonl", PROMPTS)
    with Fleet(tmp_path, latency="fixed:0.2", cap=32) as fleet:
        fleet.enqueue(prompts)
        be_patient(fleet)
        fleet.client.config_set("timeout", 1)
        fleet.start_group(0, "--concurrency", "32")
        fleet.start_sink("sink", *QUICK_SINK)
        for number in range(ROUNDS):
            some = 60 + number * PROMPTS // (ROUNDS + 3)
            wait_completed(fleet, some)
            fleet.client.script_flush()
            fleet.client.client_kill_filter(_type="normal", skipme=True)
        counts = fleet.wait_done(RUN, 180)

        assert (counts.completed, counts.failed, counts.retries) == (PROMPTS, 0, 0)
        assert counts.duplicates_dropped == 0
        assert fleet.prompt_requests() == PROMPTS, "a prompt was asked twice"
        assert len(fleet.rows()) == PROMPTS
        fleet.verify(RUN)


def be_patient(fleet: Fleet) -> None:
    """Let the test itself come through what it does to all clients."""
    fleet.client.close()
    fleet.client = connect.client_for(fleet.redis.url)
    fleet.runs = Runs(fleet.client)


def wait_completed(fleet: Fleet, some: int) -> None:
    fleet.wait(lambda: fleet.counts(RUN).completed >= some, f"{some} completions")
