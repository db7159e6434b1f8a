"""The job that Headrace was born from, on a simulated node: another strategy under load.

Eight GPUs with `extra_buffer` run 32 requests at 670 tokens/s each; `workers restart --strategy
no_buffer` makes 72 at 1,180 of it, and no answer is lost or made twice.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from common import snapshot
from common.address import resolve_redis
from common.connect import client_for
from tests.conftest import REPOSITORY
from tests.support import programs
from tests.support.fleet import write_prompts
from tests.support.server_process import ServerProcess, steady_port, wait_until
from tests.support.tls import TLS
from tests.support.watching import timed
from workers.simulator.log import read_log

pytestmark = pytest.mark.timeout(400)

GPUS = 8
SPEED = 8
"""So slow that the work lasts on any machine; where only time is waited for, it runs faster."""

PROMPTS = 2_500
RUN = "job"
LIMIT_S = 150.0
HTTP = httpx.Client(verify=TLS, timeout=LIMIT_S, limits=httpx.Limits(max_keepalive_connections=0))
WINDOW_S = 1.0


class Node:
    """`workers up --simulate 8`, and the commands that its user types."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = steady_port(GPUS)
        self.env = {
            **os.environ,
            **timed(load_every_s=1.0, slots_every_s=1.0),
            "PYTHONPATH": str(REPOSITORY),
            "HEADRACE_HOST": f"node{self.port}",
            "HEADRACE_REDIS": f"embedded:{folder / 'redis'}",
            "HEADRACE_SIM_LOG": str(folder / "served.jsonl"),
            "HEADRACE_SIM_LOAD": "0",
            "HEADRACE_SIM_ANSWER_BYTES": "100",
            "HEADRACE_RAMP": "1000",
            "HEADRACE_FIRST_BATCH_SECONDS": "1",
            "HEADRACE_BATCH_SECONDS": "2",
        }
        flags = ("--simulate", str(GPUS), "--speed", str(SPEED), "--port", str(self.port))
        self.process = ServerProcess(
            [sys.executable, "-m", "workers", "up", *flags, "--strategy", "extra_buffer"],
            log=folder / "up.log",
            env=self.env,
        )

    def end(self) -> None:
        """Stop it, and whatever it leaves: a server outlives who watches it."""
        self.process.send(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not self.process.alive(), "the end of the node", LIMIT_S)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("HEADRACE_HOST") == self.env["HEADRACE_HOST"]:
                    process.kill()

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, which must be a good one."""
        done = programs.run(
            [sys.executable, "-m", *command],
            env=self.env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done

    def until(self, condition: Any, what: str) -> None:
        def holds() -> bool:
            assert self.process.alive(), self.process.tail()
            return bool(condition())

        wait_until(holds, what, LIMIT_S)

    def state(self, gpu: int) -> dict[str, Any]:
        """What a simulated server counts, and when it was asked."""
        url = f"http://127.0.0.1:{self.port + gpu}/_sim/state"
        told: dict[str, Any] = HTTP.get(url).json()
        return {**told, "at_s": time.monotonic()}

    def runs_at(self, gpu: int, *, requests: int, tokens_per_s: float) -> None:
        """Wait until a server has run so many requests for a while, at this rate by its clock."""

        def holds() -> bool:
            first = self.state(gpu)
            time.sleep(WINDOW_S)
            then = self.state(gpu)
            if not first["running"] == then["running"] == requests:
                return False
            tokens = then["generated_tokens"] - first["generated_tokens"]
            rate = tokens / (then["at_s"] - first["at_s"]) / SPEED
            return bool(abs(rate / tokens_per_s - 1) < 0.05)

        self.until(holds, f"gpu{gpu} at {requests} requests and {tokens_per_s} tokens/s")

    def quicken(self, factor: float) -> None:
        """Let the servers that there are now run faster; those that are launched later do not."""
        for gpu in range(GPUS):
            url = f"http://127.0.0.1:{self.port + gpu}/_sim/faults"
            fault = {"kind": "slow", "factor": factor}
            HTTP.post(url, json=fault).raise_for_status()

    def figures(self) -> dict[str, Any]:
        with client_for(resolve_redis(self.env["HEADRACE_REDIS"])) as client:
            seen = snapshot.read(client, RUN)
        assert seen is not None
        return seen.figures()

    def groups(self) -> list[tuple[str, str | None, int | None]]:
        return [
            (each["state"], each["strategy"], each["cap"])
            for each in self.figures()["worker_groups"]
        ]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    try:
        yield made
    finally:
        made.end()


def test_another_strategy_under_load_nearly_doubles_the_rate_and_costs_no_answer(
    node: Node,
) -> None:
    records = node.folder / ".headrace" / "servers"
    node.until(lambda: len(list(records.glob("gpu*.json"))) == GPUS, "eight servers")
    prompts = write_prompts(node.folder / f"{RUN}.jsonl", PROMPTS)
    enqueued = ("enqueue", str(prompts), "--output", str(node.folder / "out"))
    node.call("producer", *enqueued, "--max-tokens", "4096")
    node.until(lambda: node.groups() == [("ready", "extra_buffer", 32)] * GPUS, "eight at work")
    for gpu in (0, GPUS - 1):
        node.runs_at(gpu, requests=32, tokens_per_s=670)

    node.quicken(4)
    flags = ("--strategy", "no_buffer", "--at-once", "4", "--json")
    told = json.loads(node.call("workers", "restart", *flags).stdout)

    assert told["ok"]
    assert [each["name"].partition("@")[0] for each in told["servers"]] == [
        f"gpu{gpu}" for gpu in range(GPUS)
    ]
    for each in told["servers"]:
        assert each["state"] == "restarted"
        assert (each["before"]["strategy"], each["before"]["cap"]) == ("extra_buffer", 32)
        assert (each["after"]["strategy"], each["after"]["cap"]) == ("no_buffer", 72)
    node.runs_at(GPUS - 1, requests=72, tokens_per_s=1180)
    assert node.groups() == [("ready", "no_buffer", 72)] * GPUS
    shown = " ".join(node.call("producer", "status", RUN).stdout.split())
    assert "no_buffer" in shown
    assert "strategy extra_buffer -> no_buffer, cap 32 -> 72" in shown

    node.quicken(10)
    node.until((node.folder / "out" / "_SUCCESS").exists, "the end of the run")
    node.call("producer", "verify", RUN, "--input", str(prompts))
    figures = node.figures()
    assert (figures["completed"], figures["failed"]) == (PROMPTS, 0)
    assert (figures["retries"], figures["duplicates_dropped"]) == (0, 0)
    served = read_log(node.folder / "served.jsonl").served
    asked = [each for each in served if not each.rid.startswith("headrace-probe")]
    assert len(asked) == PROMPTS, "each prompt was asked once: what was open ended by itself"
