"""A run pins its model: real servers that differ in one thing get no job of it, and are named."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from common import names
from tests.support.fleet import Fleet, write_prompts
from tests.support.watching import QUICK_SINK
from workers.simulator.launch import SimulatorProcess

pytestmark = pytest.mark.timeout(400)

RUN = "job"

OTHERWISE: dict[str, dict[str, Any]] = {
    "model_path": {"info": 'model_path="models/tiny-v2"'},
    "context_length": {"context_length": 16384},
    "template_hash": {"info": 'chat_template="other.jinja"'},
    "reasoning_parser": {"info": 'reasoning_parser="qwen3"'},
    "sampling_defaults": {"info": 'sampling_defaults="openai"'},
}


def start_other(fleet: Fleet, gpu: int, url: str) -> None:
    command = ("workers", "start", "--gpu", str(gpu), "--server", url, "--ramp", "10000")
    fleet.spawn(f"gpu{gpu}", *command)


def status(fleet: Fleet) -> dict[str, Any]:
    told = json.loads(fleet.producer("status", RUN, "--json", check=False).stdout)
    assert isinstance(told, dict)
    return told


def test_servers_that_differ_in_one_thing_get_no_job_and_are_named_while_others_go_on(
    tmp_path: Path,
) -> None:
    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(Fleet(tmp_path, latency="0.1", cap=2))
        fleet.enqueue(write_prompts(tmp_path / f"{RUN}.jsonl", 4), "--keep-open")
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait(lambda: fleet.counts(RUN).completed == 4, "the run to begin")
        others = [
            stack.enter_context(SimulatorProcess(servers=1, latency="0.1", **options))
            for options in OTHERWISE.values()
        ]
        for gpu, other in enumerate(others, 1):
            start_other(fleet, gpu, other.urls[0])
        fleet.wait(lambda: len(status(fleet)["warnings"]) >= len(others), "all to be named")
        assert status(fleet)["status"] != "wrong_model", "one of them fits"
        fleet.enqueue(write_prompts(tmp_path / f"{RUN}.jsonl", 40))

        counts = fleet.wait_done(RUN)

        told = status(fleet)
        states = {group["group"].partition("@")[0]: group for group in told["worker_groups"]}
        served = [sum("probe" not in each.rid for each in o.account().served) for o in others]
    assert counts.completed == 40
    assert served == [0] * len(others)
    assert states["gpu0"]["state"] == "ready"
    for gpu, member in enumerate(OTHERWISE, 1):
        assert states[f"gpu{gpu}"]["state"] == "wrong_model"
        assert states[f"gpu{gpu}"]["detail"].startswith(f"{member} ")
        log = fleet.processes[f"gpu{gpu}"].log.read_text()
        assert log.count("it gets no job of this run") == 1, "said once"


def test_the_pin_outlives_a_wiped_redis(tmp_path: Path) -> None:
    with Fleet(tmp_path, latency="0.1", cap=2) as fleet:
        prompts = write_prompts(tmp_path / f"{RUN}.jsonl", 30)
        fleet.enqueue(prompts, "--limit", "4")
        group, sink = fleet.start_group(), fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait_done(RUN)
        pinned = json.loads((tmp_path / "out" / names.PINNED).read_bytes())
        for name, process in (("gpu0", group), ("sink", sink)):
            process.stop()
            del fleet.processes[name]
        fleet.client.flushall()

        with SimulatorProcess(servers=1, latency="0.1", info='reasoning_parser="x"') as other:
            start_other(fleet, 1, other.urls[0])
            fleet.enqueue(prompts)
            fleet.wait(lambda: status(fleet)["status"] == "wrong_model", "the other to be named")

            told = status(fleet)
            assert "reasoning_parser x instead of None" in " ".join(told["warnings"])
            fleet.start_group()
            fleet.start_sink("sink", *QUICK_SINK)
            counts = fleet.wait_done(RUN)
            served = sum("probe" not in each.rid for each in other.account().served)
    assert (counts.completed, served) == (30, 0)
    assert pinned["reasoning_parser"] is None
    assert pinned["model_path"] == "models/tiny"
