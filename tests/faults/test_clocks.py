"""Machines whose clocks disagree by minutes: only Redis' clock and monotonic ones decide."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from common import names
from common.queue import Jobs
from tests.support.fleet import Fleet, write_prompts
from tests.support.queue_world import MARK_BYTES, take
from tests.support.server_process import ServerProcess
from tests.support.watching import QUICK_SINK, age_leases, leased, timed, wait_state

RUN = "job"
PROMPTS, AT_ONCE, TAKEN = 32, 8, 3
TEN_MINUTES_S = 600


@pytest.mark.timeout(400)
def test_b77_clocks_that_disagree_take_no_job_away_and_show_nothing_negative(
    tmp_path: Path,
) -> None:
    prompts = write_prompts(tmp_path / f"{RUN}.jsonl", PROMPTS)
    timing = timed(leases_every_s=0.1, reap_every_s=0.1)
    with Fleet(tmp_path, servers=2, latency="fixed:1.5", cap=AT_ONCE, env=timing) as fleet:
        fleet.set_for_new_processes(clock_s=TEN_MINUTES_S)
        fleet.enqueue(prompts)
        abandon(fleet, TAKEN)
        fleet.runs.pause(RUN, "operator")
        gpus = [start_group(fleet, 0, TEN_MINUTES_S), start_group(fleet, 1, -TEN_MINUTES_S)]
        fleet.set_for_new_processes(clock_s=TEN_MINUTES_S)
        fleet.start_sink("sink", *QUICK_SINK)
        wait_state(fleet, "ready", name="gpu0", limit_s=90)
        wait_state(fleet, "ready", name="gpu1", limit_s=90)
        fleet.wait(lambda: renewing(fleet) == 2, "both groups to renew")
        let_them_reap(fleet)
        fleet.runs.resume(RUN)
        shown = [status(fleet, off_s) for off_s in (TEN_MINUTES_S, -TEN_MINUTES_S)]
        counts = fleet.wait_done(RUN)
        shown += [status(fleet, off_s) for off_s in (TEN_MINUTES_S, -TEN_MINUTES_S)]

        # The run could not end before somebody had reaped what a dead process had claimed.
        assert (counts.completed, counts.failed, counts.retries) == (PROMPTS, 0, 0)
        assert fleet.prompt_requests() == PROMPTS, "a prompt was asked twice"
        for figures in shown:
            assert figures["elapsed_hours"] >= 0
            assert all((figures[name] or 0) >= 0 for name in figures if name.startswith("eta_"))
        assert [gpu.alive() for gpu in gpus] == [True, True]
        fleet.verify(RUN)


def start_group(fleet: Fleet, gpu: int, off_s: float) -> ServerProcess:
    fleet.set_for_new_processes(clock_s=off_s)
    return fleet.start_group(gpu, "--concurrency", str(AT_ONCE))


def status(fleet: Fleet, off_s: float) -> dict[str, Any]:
    fleet.set_for_new_processes(clock_s=off_s)
    figures = json.loads(fleet.producer("status", RUN, "--json").stdout)
    assert figures["run"] == RUN
    return dict(figures)


def abandon(fleet: Fleet, count: int) -> None:
    """Claim some prompts as a process that is dead by now, a lease ago."""
    dead = Jobs(fleet.client, epoch="dead", group="gone@test", server="http://gone.test:1")
    assert take(dead, count, bound=count, quiet=True).what == "granted"
    claimed = dead.claim(count, stream_mark_bytes=MARK_BYTES)
    assert len(claimed.claims) == len(leased(fleet, RUN)) == count
    age_leases(fleet, RUN)


def renewing(fleet: Fleet) -> int:
    """How many processes have renewed lately."""
    return sum(1 for _ in fleet.client.scan_iter(names.renewed("*")))


def let_them_reap(fleet: Fleet) -> None:
    """Let each process have renewed for a lease and more: then it may end those of others."""
    for key in fleet.client.scan_iter(names.renewed("*")):
        since_ms = int((time.time() - 3600) * 1000)
        fleet.client.set(key, b"%d %d" % (since_ms, int(time.time() * 1000)), ex=120)
