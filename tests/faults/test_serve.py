"""A supervised server and its worker group: whatever befalls the server costs no prompt."""

import json
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.fleet import Fleet, write_prompts
from tests.support.server_process import ServerProcess, steady_port, wait_until
from tests.support.supervised import HYBRID, marked
from tests.support.watching import QUICK_SINK, timed
from workers.simulator.environment import simulated_python
from workers.simulator.log import read_log
from workers.supervisor.records import ServerRecord, ask, read_record

pytestmark = pytest.mark.timeout(400)

RUN = "job"
HOST = "node1"
NAME = f"gpu0@{HOST}"
PROMPTS = 300
LIMIT_S = 120.0


class Served:
    """`workers serve` in a fleet's folder, over one simulated server."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        folder = fleet.folder
        port = steady_port()
        self.url = f"http://127.0.0.1:{port}"
        self.state_dir = folder / "state"
        self.journal = folder / "served.jsonl"
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(HYBRID))
        fleet.env |= {
            "HEADRACE_HOST": HOST,
            "HEADRACE_SIM_LOAD": "0",
            "HEADRACE_SIM_LOG": str(self.journal),
            "HEADRACE_SIM_SPEED": "50",
        }
        self.process: ServerProcess = fleet.spawn(
            "serve",
            *("workers", "serve", "--gpu", "0", "--model", str(model), "--port", str(port)),
            *("--python", str(simulated_python(folder / "sim", "0.5.23"))),
            *("--state-dir", str(self.state_dir), "--log-dir", str(folder / "logs")),
            *("--", "--max-running-requests", "8"),
        )

    def ready(self, after: ServerRecord | None = None) -> ServerRecord:
        """Wait for a server that is ready and another than the one of this record."""
        found: list[ServerRecord] = []

        def holds() -> bool:
            assert self.process.alive(), self.process.tail()
            record = read_record(self.state_dir, NAME)
            if record is None or record.state != "ready":
                return False
            found[:] = [record]
            return after is None or record.server != after.server

        wait_until(holds, "a ready server", LIMIT_S)
        return found[0]

    def scheduler(self) -> psutil.Process:
        record = self.ready()
        assert record.server is not None
        [child] = psutil.Process(record.server.pid).children()
        return child


def test_no_prompt_is_charged_for_what_happens_to_a_supervised_server(tmp_path: Path) -> None:
    quick = timed(stall_s=2.0, probe_s=5.0, load_every_s=0.5)
    with Fleet(tmp_path, env=quick) as fleet:
        served = Served(fleet)
        try:
            first = served.ready()
            fleet.enqueue(write_prompts(tmp_path / f"{RUN}.jsonl", PROMPTS), "--max-tokens", "400")
            fleet.spawn(
                "gpu0", "workers", "start", "--gpu", "0", "--server", served.url, "--ramp", "10000"
            )
            fleet.start_sink("sink", *QUICK_SINK)
            fleet.wait(lambda: fleet.counts(RUN).completed >= 10, "10 answers", LIMIT_S)

            served.scheduler().kill()
            second = served.ready(after=first)
            at = fleet.counts(RUN).completed
            fleet.wait(lambda: fleet.counts(RUN).completed >= at + 10, "10 more", LIMIT_S)

            served.scheduler().send_signal(signal.SIGSTOP)
            third = served.ready(after=second)
            at = fleet.counts(RUN).completed
            fleet.wait(lambda: fleet.counts(RUN).completed >= at + 10, "10 more", LIMIT_S)

            order = ask(served.state_dir, NAME, strategy="no_radix")
            fourth = served.ready(after=third)
            assert (fourth.serial, fourth.strategy) == (order.serial, "no_radix")
            assert fourth.restarts == 3
            # Its worker group was told: one that is not feeds a server that is to end till the run
            # is over, for another ten seconds at least.
            assert fleet.counts(RUN).completed < PROMPTS
            counts = fleet.wait_done(RUN, LIMIT_S)
        finally:
            for process in marked(tmp_path):
                process.kill()

        assert (counts.completed, counts.failed) == (PROMPTS, 0)
        fleet.verify(RUN)
        rows = fleet.rows()
        assert {row["attempts"] for row in rows} == {1}
        assert len(rows) == PROMPTS
        assert "ending the server at once" not in served.process.log.read_text()
        # An order lets what is open end: two deaths with eight open, and nothing else asked twice.
        asked = [each for each in read_log(served.journal).served if "probe" not in each.rid]
        assert len(asked) <= PROMPTS + 2 * 10
