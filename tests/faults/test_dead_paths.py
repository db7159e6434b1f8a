"""A path to Redis on which nothing passes and no connection ends: all go on by themselves."""

from pathlib import Path

import pytest

from tests.support.fleet import Fleet, write_prompts
from tests.support.redis_proxy import redis_proxy
from tests.support.server_process import ServerProcess, wait_until
from tests.support.watching import QUICK_SINK, exit_code, of_prompts, open_now

RUN, OTHER = "job", "other"
PROMPTS, MANY = 800, 20_000
BACK_S = 120
"""The limit of the case."""
REDIS_WAIT_S = 3
"""Instead of 20 s, which each call in flight takes to be given up: that takes 20 to 40 s more."""


@pytest.mark.timeout(400)
def test_b75_after_a_silent_path_all_go_on_by_themselves(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / f"{RUN}.jsonl", PROMPTS)
    many = write_prompts(tmp_path / f"{OTHER}.jsonl", MANY)
    with (
        Fleet(tmp_path, latency="fixed:0.2", cap=16) as fleet,
        redis_proxy(fleet.redis.port) as proxy,
    ):
        fleet.env["HEADRACE_REDIS"] = proxy.url
        fleet.set_for_new_processes(redis_wait_s=REDIS_WAIT_S)
        fleet.enqueue(prompts)
        fleet.start_group(0, "--concurrency", "16", "--run", RUN)
        fleet.start_sink("sink", *QUICK_SINK)
        arguments = ["enqueue", str(many), "--output", str(tmp_path / OTHER), "--max-tokens", "8"]
        fleet.wait(lambda: fleet.counts(RUN).completed >= 50, "fifty completions")
        enqueue = aside(fleet, "enqueue", *arguments)
        wait_until(lambda: OTHER in fleet.runs.names(), "the other run to begin")

        proxy.hold()
        told = fleet.counts(RUN).completed
        fleet.wait(lambda: open_now(fleet) == 0, "what is open to be answered")
        assert len(of_prompts(fleet)) > told, "answers that Redis has not heard of"
        held = proxy.held
        status = aside(fleet, "status", "status", RUN, "--json")
        wait_until(lambda: proxy.held > held, "the status to be held as well")
        proxy.release()

        for command in (enqueue, status):
            ends_well_or_with_a_line(command)
        if exit_code(enqueue):
            fleet.producer(*arguments)
        assert fleet.counts(OTHER).total == MANY
        counts = fleet.wait_done(RUN, BACK_S)
        assert (counts.completed, counts.failed, counts.retries) == (PROMPTS, 0, 0)
        assert len(fleet.rows()) == PROMPTS
        fleet.verify(RUN)


def aside(fleet: Fleet, name: str, *arguments: str) -> ServerProcess:
    """A producer command that runs beside, and may end."""
    fleet.spawn(name, "producer", *arguments)
    return fleet.processes.pop(name)


def ends_well_or_with_a_line(command: ServerProcess) -> None:
    wait_until(lambda: not command.alive(), f"its end: {command.tail()}", BACK_S)
    said = command.log.read_text()
    assert exit_code(command) == 0 or len(said.splitlines()) == 1, said
