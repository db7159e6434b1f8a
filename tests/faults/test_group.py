"""Worker groups that are killed, stopped, doubled, or left without Redis, and their jobs.

Real processes; the bound and the redo are judged by the simulated servers' log.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from rq.command import send_shutdown_command
from rq.worker import Worker

from common import connect, names
from common.queue.jobs import LEASE_MS, SLOT_TTL_MS
from tests.support.fleet import Fleet, write_prompts
from tests.support.server_process import ServerProcess, free_port, wait_until
from tests.support.watching import (
    QUICK_SINK,
    exit_code,
    figures,
    leased,
    members,
    of_prompts,
    open_now,
    state,
    timed,
    wait_state,
)
from workers.lives import process_start

pytestmark = pytest.mark.timeout(400)

RUN = "job"
PASSWORD = "hunter2"


# --- death ---------------------------------------------------------------------------------------


def test_a_group_started_again_takes_over_within_five_seconds(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 40)
    # The server does not notice by itself that a client has gone, and ignores a mere prefix. Its
    # answers take many minutes, but their tokens move.
    options: dict[str, Any] = {"known_rids_only": True, "disconnect_poll": 100}
    options |= {"rate_max": 50, "rate_half": 8, "answer_tokens": "fixed:2000"}
    with Fleet(tmp_path, cap=8, **options) as fleet:
        fleet.enqueue(prompts, "--max-tokens", "2000")
        first = fleet.start_group(0, "--concurrency", "8")
        fleet.wait(lambda: open_now(fleet) == 8, "a full server")
        held = set(leased(fleet, RUN))

        first.kill()
        again_s = time.monotonic()
        fleet.start_group(0, "--concurrency", "8")
        fleet.wait(lambda: aborted(fleet) == 8, "the old requests to be aborted", 40)
        fleet.wait(lambda: open_now(fleet) == 8, "the server to be full again", 40)
        took_s = time.monotonic() - again_s

        # Five seconds on a quiet machine; here it must only be no lease's end that did it.
        assert took_s < LEASE_MS / 1000 / 2, "the start of a process included"
        assert fleet.max_open() <= 8 + 1
        # Those that had been held ready too, as the new process comes to fetch them.
        fleet.wait(
            lambda: set(leased(fleet, RUN)) >= held, "the dead one's prompts to be held", 40
        )
        assert sorted(members(fleet, "lost"))[-len(held) :] == [1] * len(held)
        assert members(fleet, "attempts") == [0] * 40
        assert len(slot_holders_of_processes(fleet)) == 1
        fleet.processes["gpu0"].kill()


def aborted(fleet: Fleet) -> int:
    return int(fleet.simulator.state()["aborted"])


def rids_ended(fleet: Fleet, rids: set[str]) -> bool:
    ended = {each.rid for each in of_prompts(fleet) if each.end is not None}
    return rids <= ended


def slot_holders(fleet: Fleet, index: int = 0) -> list[bytes]:
    """What stands in the hash of a server's slots."""
    [key] = list(fleet.client.scan_iter(names.slots(f"*:{fleet.simulator.ports[index]}")))
    return cast("list[bytes]", fleet.client.hvals(key))


def test_another_group_takes_the_jobs_of_a_dead_one_after_their_lease(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 12)
    timing = {"lease_s": 3.0, "leases_every_s": 0.5, "reap_every_s": 0.5}
    with Fleet(tmp_path, servers=2, latency="0.2", cap=8, env=timed(**timing)) as fleet:
        fleet.simulator.control("no_answer", 0, match="say ")
        fleet.enqueue(prompts)
        dead = fleet.start_group(0)
        fleet.wait(lambda: fleet.in_flight(RUN) >= 8, "the first group to hold jobs")
        dead.kill()
        del fleet.processes["gpu0"]
        fleet.start_group(1)
        fleet.start_sink("sink", *QUICK_SINK)

        counts = fleet.wait_done(RUN, 30)

        assert (counts.completed, counts.failed, counts.retries) == (12, 0, 0)
        assert counts.duplicates_dropped == 0


def test_nobody_reaps_before_its_own_renewals_held_for_a_lease(tmp_path: Path) -> None:
    # After an outage of Redis every lease has run out, and whoever lives renews first.
    prompts = write_prompts(tmp_path / "job.jsonl", 20)
    timing = {"lease_s": 2.0, "leases_every_s": 0.3, "reap_every_s": 0.05}
    with Fleet(tmp_path, servers=2, latency="fixed:6", cap=8, env=timed(**timing)) as fleet:
        fleet.enqueue(prompts)
        fleet.start_group(0, "--concurrency", "8")
        fleet.start_group(1, "--concurrency", "8")
        fleet.wait(lambda: min(open_now(fleet, 0), open_now(fleet, 1)) == 8, "two full servers")
        began_s = time.monotonic()

        fleet.redis.freeze()
        wait_until(lambda: time.monotonic() - began_s > 3, "an outage longer than a lease")
        fleet.redis.thaw()
        fleet.start_sink("sink", *QUICK_SINK)
        counts = fleet.wait_done(RUN)

        assert (counts.completed, fleet.prompt_requests()) == (20, 20)


def test_a_predecessor_whose_pid_belongs_to_another_process_now_is_dead(tmp_path: Path) -> None:
    # B64: containers give the same pids again.
    prompts = write_prompts(tmp_path / "job.jsonl", 8)
    with Fleet(tmp_path, latency="0.2", cap=4) as fleet:
        fleet.enqueue(prompts)
        group = f"gpu0@{socket.gethostname()}"
        plant_holder(fleet, pid=os.getpid(), started="1", group=group, slots=6)

        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        began_s = time.monotonic()
        fleet.wait_done(RUN)

        assert time.monotonic() - began_s < SLOT_TTL_MS / 1000, "its slots were not waited for"


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_live_process_of_the_same_name_keeps_its_slots(tmp_path: Path, where: str) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 30)
    with Fleet(tmp_path, latency="0.3", cap=4) as fleet:
        fleet.enqueue(prompts)
        host = socket.gethostname()
        started = process_start(os.getpid()) if where == "here" else "1"
        plant_holder(
            fleet,
            pid=os.getpid(),
            started=started,
            group=f"gpu0@{host}",
            host=host if where == "here" else "another-host",
            slots=3,
        )

        fleet.start_group(0, "--concurrency", "4")
        fleet.wait(lambda: len(of_prompts(fleet)) >= 4, "four requests")

        assert fleet.max_open() <= 1
        assert b"planted" in b"".join(slot_holders(fleet))


def plant_holder(
    fleet: Fleet, *, pid: int, started: str, group: str, host: str = "", slots: int = 4
) -> None:
    """Let a process that we make up hold slots of the first server, for as long as the test."""
    host = host or socket.gethostname()
    about = {"host": host, "pid": pid, "started": started, "most": slots}
    holder = {
        "slots": slots,
        "deadline_ms": (time.time() + 600) * 1000,
        "rid_prefix": "planted-",
        "group": group,
        "about": msgspec.json.encode(about).decode(),
    }
    server = f"http://{socket.gethostname()}:{fleet.simulator.ports[0]}"
    run_id = connect.server_run_id(fleet.client)
    now_ms = time.time() * 1000
    fleet.client.hset(
        names.slots(server),
        mapping={"planted": msgspec.json.encode(holder), "run_id": run_id, "since": now_ms},
    )


# --- stopping ------------------------------------------------------------------------------------


def test_sigterm_lets_what_is_open_end_and_gives_the_rest_back(tmp_path: Path) -> None:
    # B94.
    prompts = write_prompts(tmp_path / "job.jsonl", 60)
    with Fleet(tmp_path, latency="fixed:2", cap=8, known_rids_only=True) as fleet:
        fleet.simulator.control("no_answer", match="say 1")
        fleet.enqueue(prompts)
        process = fleet.start_group(0, "--concurrency", "8", "--grace", "4")
        fleet.wait(lambda: open_now(fleet) == 8, "a full server")
        requests = len(of_prompts(fleet))

        process.send(signal.SIGTERM)
        told_s = time.monotonic()
        wait_until(lambda: not process.alive(), "its end", 10)
        took_s = time.monotonic() - told_s

        counts = fleet.counts(RUN)
        assert exit_code(process) == 128 + signal.SIGTERM
        assert 3 < took_s < 7
        assert counts.completed >= 1
        assert (counts.in_flight, counts.failed, counts.retries) == (0, 0, 0)
        assert len(of_prompts(fleet)) == requests, "nothing was opened after the signal"
        assert open_now(fleet) == 0, "what did not end was aborted"
        assert members(fleet, "attempts") == members(fleet, "lost") == [0] * counts.queued
        assert len(fleet.client.lrange(names.rq_queue(RUN), 0, -1)) == counts.queued
        assert not slot_holders_of_processes(fleet)
        del fleet.processes["gpu0"]


def slot_holders_of_processes(fleet: Fleet) -> list[bytes]:
    return [value for value in slot_holders(fleet) if value.startswith(b"{")]


def test_what_was_given_back_runs_elsewhere_at_once(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 30)
    with Fleet(tmp_path, servers=2, latency="0.1", cap=8) as fleet:
        fleet.simulator.control("no_answer", 0, match="say ")
        fleet.enqueue(prompts)
        first = fleet.start_group(0, "--grace", "0")
        fleet.wait(lambda: open_now(fleet) > 0, "open requests")

        first.send(signal.SIGTERM)
        wait_until(lambda: not first.alive(), "its end", 10)
        del fleet.processes["gpu0"]
        fleet.start_group(1)
        fleet.start_sink("sink", *QUICK_SINK)
        counts = fleet.wait_done(RUN)

        assert (counts.completed, counts.failed, counts.retries) == (30, 0, 0)


def test_a_second_sigterm_does_not_wait(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 20)
    with Fleet(tmp_path, latency="0", cap=8) as fleet:
        fleet.simulator.control("no_answer", match="say ")
        fleet.enqueue(prompts)
        process = fleet.start_group(0, "--grace", "50")
        fleet.wait(lambda: open_now(fleet) >= 8, "a full server")

        process.send(signal.SIGTERM)
        wait_state(fleet, "draining")
        process.send(signal.SIGTERM)
        wait_until(lambda: not process.alive(), "its end", 5)

        assert (fleet.counts(RUN).in_flight, fleet.counts(RUN).queued) == (0, 20)
        assert open_now(fleet) == 0
        del fleet.processes["gpu0"]


def test_a_slot_that_waits_for_a_full_server_does_not_hold_up_the_stop(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 4)
    with Fleet(tmp_path, latency="1", cap=4) as fleet:
        fleet.simulator.control("queue_full", retry_after="100", match="say ")
        fleet.enqueue(prompts)
        process = fleet.start_group(0, "--grace", "50")
        fleet.wait(lambda: len(of_prompts(fleet)) > 0, "a refusal")
        wait_until(lambda: open_now(fleet) == 0, "its end")

        process.send(signal.SIGTERM)
        wait_until(lambda: not process.alive(), "its end", 5)

        assert fleet.counts(RUN).in_flight == 0
        del fleet.processes["gpu0"]


def test_sigterm_while_waiting_for_a_server_ends_at_once(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        fleet.simulator.control("die")
        process = fleet.start_group()
        wait_state(fleet, "waiting")

        process.send(signal.SIGTERM)
        wait_until(lambda: not process.alive(), "its end", 4)

        assert exit_code(process) == 128 + signal.SIGTERM
        del fleet.processes["gpu0"]


def test_sigterm_while_the_server_stalls_ends_at_once(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        fleet.simulator.control("stall")
        process = fleet.start_group()
        wait_state(fleet, "waiting")

        process.send(signal.SIGTERM)
        wait_until(lambda: not process.alive(), "its end", 6)

        del fleet.processes["gpu0"]


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_sigterm_while_redis_is_away_ends_quickly(tmp_path: Path, how: str) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 20)
    with Fleet(tmp_path, latency="0.5", cap=4) as fleet:
        fleet.enqueue(prompts)
        process = fleet.start_group(0, "--grace", "1")
        fleet.wait(lambda: fleet.counts(RUN).completed >= 4, "4 completions")

        if how == "killed":
            fleet.redis.kill()
        else:
            fleet.redis.freeze()
        wait_until(lambda: open_now(fleet) == 0, "what was open to end", 10)
        process.send(signal.SIGTERM)
        told_s = time.monotonic()
        wait_until(lambda: not process.alive(), "its end", 20)
        took_s = time.monotonic() - told_s

        assert took_s < 10
        assert exit_code(process) == 128 + signal.SIGTERM
        assert "Traceback" not in process.log.read_text()
        del fleet.processes["gpu0"]
        if how == "killed":
            fleet.redis.start()
        else:
            fleet.redis.thaw()


def test_rq_shutdown_command_drains(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 20)
    with Fleet(tmp_path, latency="0.5", cap=4) as fleet:
        fleet.enqueue(prompts)
        process = fleet.start_group()
        fleet.wait(lambda: fleet.counts(RUN).completed >= 4, "4 completions")

        [worker] = Worker.all(connection=fleet.client)
        assert worker.name.startswith(f"gpu0@{socket.gethostname()}-")
        send_shutdown_command(fleet.client, worker.name)
        wait_until(lambda: not process.alive(), "its end", 10)

        counts = fleet.counts(RUN)
        assert (counts.in_flight, counts.failed) == (0, 0)
        assert Worker.all(connection=fleet.client) == []
        del fleet.processes["gpu0"]


# --- one server, one worker group ----------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["127.0.0.1", "localhost", "the host's name"])
def test_a_second_group_for_one_server_is_refused(tmp_path: Path, spelling: str) -> None:
    name = socket.gethostname() if spelling == "the host's name" else spelling
    with Fleet(tmp_path, latency="0.1") as fleet:
        fleet.start_group(0)
        wait_state(fleet, "ready")
        fleet.wait(lambda: len(slot_holders_of_processes(fleet)) == 1, "its slots")
        # The server itself listens on 127.0.0.1 only, so the other name must lead there too.
        url = f"http://{name}:{fleet.simulator.ports[0]}"
        if spelling == "the host's name" and not leads_here(name):
            pytest.skip("cannot run here: this host's name is no loopback address")
        second = fleet.spawn("second", "workers", "start", "--gpu", "7", "--server", url)

        wait_until(lambda: not second.alive(), "its end", 20)

        assert exit_code(second) == 4
        assert f"gpu0@{socket.gethostname()}" in second.tail()
        assert "Traceback" not in second.log.read_text()
        assert fleet.processes["gpu0"].alive()
        del fleet.processes["second"]


def leads_here(name: str) -> bool:
    return socket.gethostbyname(name).startswith("127.")


def test_two_hosts_are_told_apart_by_their_names(tmp_path: Path) -> None:
    # B64: same pid, same GPU number, another HEADRACE_HOST.
    prompts = write_prompts(tmp_path / "job.jsonl", 100)
    with Fleet(tmp_path, servers=2, latency="0.2", cap=4) as fleet:
        fleet.enqueue(prompts)
        for index, host in enumerate(("node-a", "node-b")):
            fleet.env["HEADRACE_HOST"] = host
            fleet.spawn(
                host, "workers", "start", "--gpu", "0", "--server", fleet.simulator.urls[index]
            )
        for host in ("node-a", "node-b"):
            wait_state(fleet, "ready", name=host)
        fleet.start_sink("sink", *QUICK_SINK)

        groups = {figures(fleet, host).group for host in ("node-a", "node-b")}
        workers = sorted(worker.name.rpartition("-")[0] for worker in Worker.all(fleet.client))
        counts = fleet.wait_done(RUN)

        assert groups == {"gpu0@node-a", "gpu0@node-b"}
        assert workers == ["gpu0@node-a", "gpu0@node-b"]
        assert counts.completed == 100


@pytest.mark.parametrize(
    ("concurrency", "cap", "most"), [("16", 4, 6), ("3", 16, 3), ("auto", 40, 44)]
)
def test_the_bound_is_reached_and_never_exceeded(
    tmp_path: Path, concurrency: str, cap: int, most: int
) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", most * 8)
    with Fleet(tmp_path, latency="0.3", cap=cap) as fleet:
        fleet.enqueue(prompts)
        fleet.start_group(0, "--concurrency", concurrency)
        fleet.start_sink("sink", *QUICK_SINK)

        fleet.wait_done(RUN)

        assert fleet.max_open() == most


def test_a_server_that_comes_back_smaller_gets_no_more_than_its_new_bound(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 300)
    with Fleet(tmp_path, latency="0.2", cap=32) as fleet:
        fleet.enqueue(prompts)
        fleet.start_group()
        fleet.wait(lambda: fleet.counts(RUN).completed >= 50, "50 completions")

        fleet.simulator.kill()
        restarted = restart_with(fleet, "--cap", "4")
        fleet.wait(lambda: fleet.counts(RUN).completed >= 120, "70 more")

        opened = [each for each in of_prompts(fleet) if each.begin > restarted]
        assert most_at_once(opened) == 6


def restart_with(fleet: Fleet, *arguments: str) -> float:
    """Start the simulator again with other options; Unix time just before."""
    simulator = fleet.simulator
    for name, value in zip(arguments[::2], arguments[1::2], strict=True):
        place = simulator._arguments.index(name)
        simulator._arguments[place + 1] = value
    now = time.time()
    simulator.restart()
    return now


def most_at_once(served: list) -> int:  # type: ignore[type-arg]
    """The most of these requests that were open at one instant."""
    marks = [(each.begin, 1) for each in served]
    marks += [(each.end, -1) for each in served if each.end is not None]
    open_count = most = 0
    for _, step in sorted(marks):
        open_count += step
        most = max(most, open_count)
    return most


def test_a_cold_server_is_filled_slowly(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 60)
    with Fleet(tmp_path, latency="0", cap=30) as fleet:
        fleet.simulator.control("no_answer", match="say ")
        fleet.enqueue(prompts)
        fleet.start_group(0, "--ramp", "8")
        fleet.wait(lambda: open_now(fleet) >= 24, "24 open requests")

        begins = sorted(each.begin for each in of_prompts(fleet))[:24]
        # Seen from the server, on a machine that may be slow now and then.
        assert begins[-1] - begins[0] > 23 / 8 - 0.75
        assert all(begins[i + 12] - begins[i] > 0.75 for i in range(len(begins) - 12))
        fleet.processes["gpu0"].kill()


# --- Redis ---------------------------------------------------------------------------------------


def test_redis_killed_in_mid_run_costs_nothing_that_was_in_flight(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 150)
    with Fleet(tmp_path, latency="fixed:1", cap=10) as fleet:
        fleet.enqueue(prompts)
        process = fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait(lambda: fleet.counts(RUN).completed >= 30, "30 completions")

        fleet.redis.kill()
        wait_until(lambda: open_now(fleet) == 0, "what was in flight to end", 10)
        fleet.redis.start()
        counts = fleet.wait_done(RUN)

        assert (counts.completed, counts.failed, counts.duplicates_dropped) == (150, 0, 0)
        assert fleet.prompt_requests() == 150, "nothing was generated twice"
        assert process.alive()
        assert "is away" in process.log.read_text()
        fleet.verify(RUN)


def test_a_frozen_redis_stops_the_claims_and_no_more(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 60)
    with Fleet(tmp_path, latency="0.5", cap=4) as fleet:
        fleet.enqueue(prompts)
        process = fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait(lambda: fleet.counts(RUN).completed >= 8, "8 completions")

        fleet.redis.freeze()
        wait_until(lambda: open_now(fleet) == 0, "what was in flight to end", 10)
        time.sleep(1)
        fleet.redis.thaw()
        counts = fleet.wait_done(RUN)

        assert (counts.completed, fleet.prompt_requests()) == (60, 60)
        assert process.alive()


def test_no_redis_at_the_start_ends_it_with_4_and_no_password(tmp_path: Path) -> None:
    port = free_port()
    with Fleet(tmp_path) as fleet:
        for arguments in (("--gpu", "0"), ("--gpu", "0-1")):
            process = ServerProcess(
                [sys.executable, "-m", "workers", "start", *arguments,
                 "--redis", "redis://user:" + PASSWORD + f"@127.0.0.1:{port}/3"],
                log=tmp_path / f"log{arguments[1]}",
                env=fleet.env,
            )  # fmt: skip

            wait_until(partial(ended, process), "its end", 15)

            said = process.log.read_text()
            assert exit_code(process) == 4
            assert f"127.0.0.1:{port}/3" in said
            assert PASSWORD not in said
            assert "Traceback" not in said


def ended(process: ServerProcess) -> bool:
    return not process.alive()


def test_claims_wait_while_rq_is_suspended(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 20)
    with Fleet(tmp_path, latency="0.05", cap=4) as fleet:
        fleet.enqueue(prompts)
        rq(fleet, "suspend")
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        wait_state(fleet, "ready")
        looked_s = time.monotonic()
        fleet.wait(lambda: time.monotonic() - looked_s > 1.5, "a while")
        assert fleet.prompt_requests() == 0

        rq(fleet, "resume")
        counts = fleet.wait_done(RUN)

        assert counts.completed == 20


def rq(fleet: Fleet, *command: str) -> str:
    """Call RQ's own command line."""
    done = subprocess.run(
        [sys.executable, "-m", "rq.cli", *command, "-u", fleet.redis.url],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stdout


# --- which runs ----------------------------------------------------------------------------------


def test_a_run_of_another_model_gets_no_job_taken(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 5)
    with Fleet(tmp_path, latency="0.05", model="tiny") as fleet:
        fleet.enqueue(prompts, "--model", "huge")
        process = fleet.start_group()

        wait_state(fleet, "wrong_model")

        shown = figures(fleet, "gpu0")
        assert "huge" in shown.detail
        assert "tiny" in shown.detail
        assert (fleet.in_flight(RUN), fleet.prompt_requests()) == (0, 0)
        assert process.alive()


def test_runs_of_two_models_each_find_their_server(tmp_path: Path) -> None:
    with Fleet(tmp_path, latency="0.05", model="tiny", env=timed()) as fleet:
        fleet.enqueue(write_prompts(tmp_path / "other.jsonl", 5), "--model", "huge")
        fleet.output = str(tmp_path / "out-job")
        fleet.enqueue(write_prompts(tmp_path / "job.jsonl", 5), "--model", "tiny")
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)

        counts = fleet.wait_done(RUN)

        assert counts.completed == 5
        wait_state(fleet, "ready")
        seen_s = time.monotonic()
        while time.monotonic() - seen_s < 1:
            assert state(fleet) == "ready", "a server that has work is in no wrong place"
        assert fleet.counts("other").queued == 5


def test_a_server_with_another_context_than_the_run_began_with_gets_no_job(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 40)
    with Fleet(tmp_path, latency="0.2", cap=4, context_length=32768) as fleet:
        fleet.enqueue(prompts)
        fleet.start_group()
        fleet.wait(lambda: fleet.counts(RUN).completed >= 8, "8 completions")

        fleet.simulator.kill()
        restarted = restart_with(fleet, "--context-length", "16384")
        wait_state(fleet, "wrong_model")

        assert "context_length" in figures(fleet, "gpu0").detail
        assert [each for each in of_prompts(fleet) if each.begin > restarted] == []


def test_rq_worker_serves_a_run_to_its_end(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 30)
    with Fleet(tmp_path, latency="0.05", cap=4) as fleet:
        fleet.enqueue(prompts)
        fleet.env |= {
            "HEADRACE_SERVER": fleet.simulator.urls[0],
            "HEADRACE_GPU": "3",
            "HEADRACE_CONCURRENCY": "2",
            "HEADRACE_RAMP": "1000",
        }
        process = fleet.spawn(
            "gpu3", "rq.cli", "worker", "-w", "workers.group.SlotWorker", RUN,
            "-u", fleet.redis.url,
        )  # fmt: skip
        fleet.start_sink("sink", *QUICK_SINK)

        counts = fleet.wait_done(RUN)

        assert counts.completed == 30
        assert fleet.max_open() == 2
        assert figures(fleet, "gpu3").group == f"gpu3@{socket.gethostname()}"
        process.send(signal.SIGTERM)
        wait_until(lambda: not process.alive(), "its end", 5)
        assert exit_code(process) == 0
        del fleet.processes["gpu3"]


def test_rq_worker_without_names_serves_all_runs(tmp_path: Path) -> None:
    with Fleet(tmp_path, latency="0.05", cap=4) as fleet:
        fleet.enqueue(write_prompts(tmp_path / "job.jsonl", 5))
        fleet.env |= {"HEADRACE_SERVER": fleet.simulator.urls[0]}
        fleet.spawn(
            "gpu0", "rq.cli", "worker", "-w", "workers.group.SlotWorker", "-u", fleet.redis.url
        )
        fleet.start_sink("sink", *QUICK_SINK)

        assert fleet.wait_done(RUN).completed == 5


def test_a_job_without_a_readable_body_fails_by_itself(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 10)
    with Fleet(tmp_path, latency="0.05", cap=4) as fleet:
        fleet.enqueue(prompts)
        damaged = next(iter(fleet.client.scan_iter(f"{names.RQ_JOB_STEM}*")))
        fleet.client.hset(damaged, "request", b"\xff{no JSON")
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)

        counts = fleet.wait_done(RUN)

        assert (counts.completed, counts.failed) == (9, 1)
        [row] = fleet.rows("failures")
        assert (row["reason"], row["attempts"]) == ("unreadable", 0)


def test_a_run_made_anew_under_the_same_name_gets_none_of_the_old_results(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 6)
    with Fleet(tmp_path, latency="fixed:4", cap=4) as fleet:
        fleet.enqueue(prompts)
        process = fleet.start_group()
        fleet.wait(lambda: open_now(fleet) >= 4, "open requests")
        old = {each.rid for each in of_prompts(fleet)}

        fleet.client.flushall()
        fleet.output = str(tmp_path / "out-anew")
        fleet.enqueue(prompts)
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait(lambda: rids_ended(fleet, old), "the old requests to end")
        counts = fleet.wait_done(RUN, 30)

        assert (counts.completed, counts.failed) == (6, 0)
        assert len(fleet.rows()) == 6
        assert process.alive()
