"""`workers up`: one process that runs a node, whatever of it dies, and stops it in order."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.test_group_parent import free_tens
from tests.support.fleet import Fleet, write_prompts
from tests.support.server_process import steady_port, wait_until
from tests.support.up_node import LIMIT_S, UpNode, environment, runs, told_json, workers_up
from tests.support.watching import open_now
from workers.simulator.log import read_log

pytestmark = pytest.mark.timeout(400)

RUN = "job"
GROUPS = ("worker group gpu0", "worker group gpu1")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path, servers=2, latency="fixed:0.05", cap=4) as made:
        yield made


def attach(fleet: Fleet) -> tuple[str, ...]:
    """The flags for the fleet's servers, one by its port and one by its URL."""
    first, second = fleet.simulator.ports[0], fleet.simulator.urls[1]
    return ("--attach", f"{first},{second}", "--gpu", "0-1")


def enqueued(fleet: Fleet, prompts: int) -> None:
    fleet.enqueue(write_prompts(fleet.folder / f"{RUN}.jsonl", prompts))


def test_a_node_serves_a_run_to_its_end_and_says_how_it_ended(fleet: Fleet) -> None:
    fleet.simulator.control("bad_params", match="say 1.")
    fleet.enqueue(write_prompts(fleet.folder / f"{RUN}.jsonl", 60, text="say {i}."))

    node = UpNode(fleet, *attach(fleet), "--run", RUN, "--until-done")

    assert node.wait_end() == 1, "one prompt failed"
    assert f"all that was asked for has ended: run {RUN} has ended" in node.said()
    counts = fleet.counts(RUN)
    assert (counts.completed, counts.failed) == (59, 1)
    assert fleet.prompt_requests() == 60
    assert [row.name for row in node.record().rows] == ["redis", *GROUPS, "sink"]
    assert {row.state for row in node.record().rows} == {"ready", "ended"}
    assert {row.restarts for row in node.record().rows} == {0}
    assert {state["state"] for state in fleet.simulator.states()} == {"ready"}, "not touched"


def test_whatever_dies_is_started_again_and_nothing_is_lost_or_doubled(fleet: Fleet) -> None:
    first = UpNode(fleet, *attach(fleet))
    # Before it has a lease, which would have to run out first.
    victim = first.part("sink")
    victim.kill()
    first.wait_next_life("sink", victim.pid)
    enqueued(fleet, 400)
    fleet.wait(lambda: open_now(fleet, 0) > 0 and open_now(fleet, 1) > 0, "requests")
    victim = first.part(GROUPS[0])
    victim.kill()
    first.wait_next_life(GROUPS[0], victim.pid)
    assert f"{GROUPS[0]} ended with -9: starting it again" in first.said()
    assert first.row(GROUPS[1]).restarts == 0

    family = first.family()
    first.kill()
    second = UpNode(fleet, *attach(fleet), "--run", RUN, "--until-done")

    assert second.wait_end() == 0
    counts = fleet.counts(RUN)
    assert (counts.completed, counts.failed, len(fleet.rows())) == (400, 0, 400)
    fleet.verify(RUN)
    assert fleet.max_open() <= 4 + 2, "never more than the bound"
    wait_until(lambda: not any(map(runs, family)), "their end", LIMIT_S)


def test_a_node_is_seen_elsewhere_is_the_only_one_and_stores_all_when_it_stops(
    fleet: Fleet,
) -> None:
    node = UpNode(fleet, *attach(fleet), "--grace", "100")
    for name in GROUPS:
        node.wait_row(name, "ready")
    fleet.simulator.control("slow", factor=1e-4)
    enqueued(fleet, 100)
    fleet.wait(lambda: open_now(fleet, 0) >= 4 and open_now(fleet, 1) >= 4, "full servers")

    table = workers_up(fleet, node.env, "--status")
    told = told_json(workers_up(fleet, node.env, "--status", "--json"))
    same = workers_up(fleet, node.env, *attach(fleet))
    elsewhere = workers_up(fleet, node.env, *attach(fleet), "--state-dir", "other")

    assert table.returncode == 0
    assert all(name in table.stdout for name in ("redis", *GROUPS, "sink"))
    assert told["pid"] == node.process.pid
    assert [row["state"] for row in told["rows"]] == ["ready", "ready", "ready", "running"]
    assert [done.returncode for done in (same, elsewhere)] == [5, 5]
    assert f"(pid {node.process.pid}) already runs on .headrace" in same.stderr
    assert f"(pid {node.process.pid}) already runs with gpu0@" in elsewhere.stderr

    # A unit's stop reaches every process at once: the sink still has to be the last.
    family = node.family()
    for each in [psutil.Process(node.process.pid), *family]:
        each.send_signal(signal.SIGTERM)
    node.wait_row(GROUPS[0], "draining")
    fleet.simulator.control("slow", factor=1)

    assert node.wait_end() == 143
    counts = fleet.counts(RUN)
    assert counts.in_flight == counts.failed == counts.stream_entries == 0
    assert counts.completed == fleet.prompt_requests() == len(fleet.rows()) >= 8
    assert not any(map(runs, family))
    assert node.said().index("worker group gpu0: ended") < node.said().index("sink: ended")
    assert workers_up(fleet, node.env, "--status").returncode == 1


def test_a_second_signal_does_not_wait(fleet: Fleet) -> None:
    fleet.simulator.control("no_answer", match="say")
    enqueued(fleet, 20)
    node = UpNode(fleet, *attach(fleet), "--grace", "10000")
    fleet.wait(lambda: open_now(fleet, 0) >= 4, "a full server")

    node.process.send(signal.SIGTERM)
    node.wait_row(GROUPS[0], "draining")
    node.process.send(signal.SIGINT)

    assert node.wait_end() == 143
    counts = fleet.counts(RUN)
    assert (counts.in_flight, counts.queued, counts.failed) == (0, 20, 0)


def test_a_part_that_cannot_run_takes_no_other_down(fleet: Fleet) -> None:
    port = fleet.simulator.ports[0]
    enqueued(fleet, 10)

    # Two worker groups at one server: whichever comes second is refused.
    node = UpNode(fleet, "--attach", f"{port},http://localhost:{port}", "--gpu", "0-1")

    fleet.wait(lambda: fleet.counts(RUN).completed == 10, "all prompts, by one of them")
    wait_until(
        lambda: "restarting" in {node.row(name).state for name in GROUPS},
        "the other one to be refused",
        LIMIT_S,
    )
    assert node.said().count("cannot run now (exit 4), and is tried again now and then") == 1
    [refused] = [row for row in node.record().rows if row.state == "restarting"]
    assert "is driven by worker group gpu" in refused.says


def test_a_node_says_whom_it_waits_for_and_nothing_of_an_earlier_life(fleet: Fleet) -> None:
    logs = fleet.folder / ".headrace" / "logs"
    logs.mkdir(parents=True)
    for name in ("group-gpu0", "sink"):
        (logs / f"{name}.log").write_text("2026-11-30 10:00:00 INFO an earlier life\n")
    port = steady_port()

    node = UpNode(fleet, "--attach", f"http://127.0.0.1:{port}")
    node.wait_row(GROUPS[0], "waiting")
    node.process.send(signal.SIGTERM)

    assert node.wait_end() == 143
    assert "an earlier life" not in node.said()
    assert f"worker group gpu0: waiting: the server at http://127.0.0.1:{port} cannot be" in (
        node.said()
    )


def test_a_node_without_any_gpu_that_can_be_served_ends(fleet: Fleet) -> None:
    node = UpNode(fleet, *attach(fleet), HEADRACE_TIMING="{")

    assert node.wait_end() == 2
    assert "no GPU here can be served" in node.said()


def test_a_wrong_setting_of_a_part_is_found_before_any_is_started(fleet: Fleet) -> None:
    node = UpNode(fleet, *attach(fleet), HEADRACE_BATCH_ROWS="0")

    assert node.wait_end() == 2
    assert "--batch-rows" in node.said()
    assert not (fleet.folder / ".headrace" / "logs" / "sink.log").exists()


def test_an_embedded_redis_comes_back_and_is_the_last_to_end(fleet: Fleet) -> None:
    home = fleet.folder / "redis"
    node = UpNode(fleet, *attach(fleet), "--redis", f"embedded:{home}")
    node.wait_row("redis", "ready")
    first = int((home / "valkey.pid").read_text())

    os.kill(first, signal.SIGKILL)
    wait_until(lambda: node.row("redis").restarts == 1, "its next life", LIMIT_S)
    node.wait_row("redis", "ready")
    second = int((home / "valkey.pid").read_text())

    node.process.send(signal.SIGTERM)
    assert node.wait_end() == 143
    wait_until(lambda: not psutil.pid_exists(second), "the end of Redis", LIMIT_S)
    assert node.record().rows[0].state == "ended"


def test_a_redis_that_is_not_there_ends_it_at_once(fleet: Fleet) -> None:
    env = environment(fleet)
    done = workers_up(fleet, env, *attach(fleet), "--redis", "redis://127.0.0.1:1/0")

    assert done.returncode == 4


# --- with servers of its own ---------------------------------------------------------------------


def simulated(fleet: Fleet) -> UpNode:
    """A node with two simulated GPUs; its servers write what they see in one file."""
    port = str(free_tens())
    return UpNode(
        fleet,
        *("--simulate", "2", "--port", port, "--redis", f"embedded:{fleet.folder / 'redis'}"),
        HEADRACE_SIM_LOG=str(fleet.folder / "served.jsonl"),
        HEADRACE_SIM_LOAD="0",
        HEADRACE_SIM_LATENCY="fixed:0.2",
        HEADRACE_DRAIN_LIMIT="30",
    )


def test_a_simulated_node_is_a_whole_one_whatever_of_it_dies(fleet: Fleet) -> None:
    first = simulated(fleet)
    fleet.env["HEADRACE_REDIS"] = f"embedded:{fleet.folder / 'redis'}"
    ready = first.wait_row("server gpu0", "ready")
    assert ready.says.startswith("SGLang 0.5.23, no_buffer, cap 72")
    enqueued(fleet, 400)
    for name in GROUPS:
        first.wait_row(name, "ready")

    # A server, then who watches it: the server of that one runs on and is taken over.
    killed = first.server("gpu0")
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: first.server("gpu0") != killed, "the next server", LIMIT_S)
    first.wait_row("server gpu0", "ready")
    taken_over = first.server("gpu1")
    watcher = first.part("server gpu1")
    watcher.kill()
    first.wait_next_life("server gpu1", watcher.pid)
    first.wait_row("server gpu1", "ready")
    assert first.server("gpu1") == taken_over

    # The node itself: the next one goes on with the same servers.
    servers = {first.server(gpu) for gpu in ("gpu0", "gpu1")}
    first.kill()
    second = UpNode(fleet, *first.arguments, env=first.env)
    for gpu in ("gpu0", "gpu1"):
        second.wait_row(f"server {gpu}", "ready")
        second.wait_row(f"worker group {gpu}", "ready")
    assert {second.server(gpu) for gpu in ("gpu0", "gpu1")} == servers
    wait_until((Path(fleet.output) / "_SUCCESS").exists, "the end of the run", LIMIT_S)
    second.process.send(signal.SIGTERM)

    assert second.wait_end() == 143
    wait_until(lambda: not any(map(psutil.pid_exists, servers)), "their end", LIMIT_S)
    done = fleet.producer("verify", RUN, "--output", fleet.output, check=False)
    assert done.returncode == 0, done.stdout
    account = read_log(fleet.folder / "served.jsonl")
    assert max(account.max_open.values()) <= 79, "never more than the bound"
