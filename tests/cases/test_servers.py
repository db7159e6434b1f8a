"""Cases of servers and worker groups that come and go while a run is at work."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.fleet import Fleet, write_prompts
from tests.support.server_process import ServerProcess, wait_until
from tests.support.watching import QUICK_SINK, of_prompts, timed, wait_state

pytestmark = [pytest.mark.timeout(400), pytest.mark.cases]

RUN = "job"


# --- B98 -----------------------------------------------------------------------------------------


def told(fleet: Fleet) -> dict[str, Any]:
    """What `producer status --json` tells."""
    done = fleet.producer("status", RUN, "--json", check=False)
    return msgspec.json.decode(done.stdout, type=dict[str, Any])


def end(fleet: Fleet, name: str, process: ServerProcess) -> None:
    """Remove a worker group in good order."""
    process.stop()
    wait_until(lambda: not process.alive(), f"the end of {name}", 60)
    del fleet.processes[name]


def test_b98_workers_come_and_go_and_the_figures_follow(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / f"{RUN}.jsonl", 3_000)
    with Fleet(
        tmp_path, servers=2, cap=4, latency="fixed:0.2", env=timed(ask_again_s=0.1)
    ) as fleet:
        second_port = fleet.simulator.ports[1]
        fleet.simulator.control("die", 1)
        fleet.enqueue(prompts)
        workers = []

        first = fleet.start_group(0)
        wait_state(fleet, "ready")
        fleet.wait(lambda: fleet.counts(RUN).completed > 0, "work at the first")
        workers.append(told(fleet)["workers"])

        second = fleet.start_group(1)
        wait_state(fleet, "waiting", name="gpu1")
        workers.append(told(fleet)["workers"])
        early = [each for each in of_prompts(fleet) if each.port == second_port]

        fleet.simulator.control("revive", 1, starting_s=1)
        wait_state(fleet, "ready", name="gpu1")
        workers.append(told(fleet)["workers"])

        end(fleet, "gpu0", first)
        workers.append(told(fleet)["workers"])

        end(fleet, "gpu1", second)
        nobody = told(fleet)
        workers.append(nobody["workers"])

        third = fleet.start_group(0)
        wait_state(fleet, "ready")
        fleet.start_sink("sink", *QUICK_SINK)
        workers.append(told(fleet)["workers"])

        assert workers == [1, 1, 2, 1, 0, 1]
        assert early == [], "no traffic before it was ready"
        assert (nobody["status"], nobody["eta_hours"]) == ("waiting_for_workers", None)
        assert nobody["in_flight"] == 0, "removed workers leave nothing behind"
        assert nobody["completed"] + nobody["queued"] == nobody["total"] == 3_000
        assert third.alive()
        fleet.producer("cancel", RUN, "--yes", check=False)
        counts = fleet.counts(RUN)
        assert (counts.failed, counts.retries) == (0, 0)
