"""Cases of RQ's habits: stale entries that are cleaned up, jobs that vanish, names that are taken,
two who enqueue at once. All with real processes."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rq import Queue
from rq.registry import clean_registries
from rq.serializers import JSONSerializer
from rq.worker import Worker

from common import names
from tests.support import programs
from tests.support.fleet import Fleet, write_prompts
from tests.support.watching import (
    QUICK_SINK,
    leased,
    of_prompts,
    open_now,
    timed,
)
from workers.timing import Timing

pytestmark = pytest.mark.timeout(400)

RUN = "job"


# --- B59 -----------------------------------------------------------------------------------------


def test_b59_a_dead_groups_jobs_are_back_within_three_minutes() -> None:
    timing = Timing()

    assert timing.lease_s + 2 * timing.reap_every_s + timing.leases_every_s < 180


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_b59_what_a_dead_group_held_is_run_again_elsewhere_and_once(
    tmp_path: Path, how: str
) -> None:
    timing = {"lease_s": 3.0, "leases_every_s": 0.5, "reap_every_s": 0.5}
    with Fleet(tmp_path, servers=2, latency="fixed:0.5", cap=8, env=timed(**timing)) as fleet:
        fleet.simulator.control("no_answer", 0, match="say ")
        fleet.enqueue(write_prompts(tmp_path / f"{RUN}.jsonl", 24))
        dead = fleet.start_group(0, "--concurrency", "8")
        fleet.wait(lambda: open_now(fleet) == 8, "eight open requests")
        fleet.start_sink("sink", *QUICK_SINK)
        if how == "killed":
            dead.kill()
            del fleet.processes["gpu0"]
        else:
            dead.send(signal.SIGSTOP)
        in_flight = [fleet.in_flight(RUN)]
        fleet.start_group(1, "--concurrency", "8")

        def ended() -> bool:
            in_flight.append(fleet.in_flight(RUN))
            return fleet.has_ended(RUN)

        fleet.wait(ended, "the run to end", 40)
        if how == "frozen":
            fleet.simulator.clear()
            dead.send(signal.SIGCONT)
            fleet.wait(lambda: open_now(fleet, 0) == 0, "the woken group to let go", 20)
        counts = fleet.counts(RUN)

        assert (counts.completed, counts.failed, counts.retries) == (24, 0, 0)
        # Beside the dead group's jobs, at most what the other one opens and prefetches.
        assert max(in_flight) <= in_flight[0] + 8 + 8
        assert in_flight[-1] == 0
        assert len(fleet.rows()) == 24
        fleet.verify(RUN)


# --- B61, B63 ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Composite key:DeprecationWarning")
def test_b61_rqs_cleaning_fails_nothing_whatever_stale_entry_it_finds(tmp_path: Path) -> None:
    """Entries of jobs that are done, open, queued and unknown, in every spelling and registry."""
    with Fleet(tmp_path, latency="fixed:0.8", cap=4) as fleet:
        fleet.enqueue(write_prompts(tmp_path / f"{RUN}.jsonl", 16))
        queue = Queue(RUN, connection=fleet.client, serializer=JSONSerializer)
        everyone = queue.job_ids
        fleet.start_group(0, "--concurrency", "4")
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait(lambda: fleet.counts(RUN).completed >= 4, "four completions")
        fleet.wait(lambda: open_now(fleet) == 4, "four open requests")

        for job_id in [*everyone, "f" * 32, "no-id-of-ours"]:
            stale = {job_id: 1, f"{job_id}:old": 1, f"{job_id}:e1": 2}
            fleet.client.zadd(names.rq_started(RUN), stale, nx=True)
        for registry in (queue.finished_job_registry, queue.deferred_job_registry):
            fleet.client.zadd(registry.key, dict.fromkeys(everyone, 1))
        before = fleet.counts(RUN)
        for _ in range(2):
            clean_registries(queue)
            Worker([queue], connection=fleet.client).clean_registries()  # type: ignore[no-untyped-call]
        # RQ has declared failed what is open: that is what the case is about.
        marked = set(queue.failed_job_registry.get_job_ids(cleanup=False))
        after = fleet.counts(RUN)
        counts = fleet.wait_done(RUN)

        assert len(marked & set(everyone)) >= 4
        assert (before.failed, after.failed) == (0, 0)
        assert (counts.completed, counts.failed, counts.total) == (16, 0, 16)
        assert fleet.prompt_requests() == 16, "a prompt was run twice"
        assert queue.failed_job_registry.count == 0


def test_b63_without_a_sink_and_with_deleted_jobs_nothing_is_lost(tmp_path: Path) -> None:
    with Fleet(tmp_path, latency="fixed:0.3", cap=4, env=timed(audit_every_s=1.0)) as fleet:
        fleet.enqueue(write_prompts(tmp_path / f"{RUN}.jsonl", 60))
        fleet.start_group(0, "--concurrency", "4")
        fleet.wait(lambda: fleet.counts(RUN).completed >= 8, "eight completions")
        fleet.wait(lambda: open_now(fleet) == 4, "four open requests")

        held = leased(fleet, RUN)
        queued = [
            job_id for job_id in Queue(RUN, connection=fleet.client).job_ids if job_id not in held
        ]
        doomed = [*held[:2], *queued[-20:]]
        fleet.client.delete(*(names.rq_job(job_id) for job_id in doomed))
        shown = fleet.producer("status", RUN, "--json", check=False)
        fleet.wait(lambda: fleet.counts(RUN).completed >= 36, "what is left to be completed")
        results = fleet.counts(RUN)
        assert fleet.client.ttl(names.results(RUN, 0)) == -1
        fleet.start_sink("sink", *QUICK_SINK)
        resumed = fleet.producer("resume", RUN, "--json")
        counts = fleet.wait_done(RUN)

        assert shown.returncode == 0, shown.stderr
        assert "NoSuchJob" not in shown.stderr
        figures = json.loads(shown.stdout)
        parts = ("completed", "failed", "cancelled", "in_flight", "queued")
        assert sum(figures[part] for part in parts) == figures["total"] == 60
        assert results.stream_entries == results.completed
        assert json.loads(resumed.stdout)["restored"] <= 20
        assert (counts.completed, counts.failed) == (60, 0)
        fleet.verify(RUN)


# --- B64 -----------------------------------------------------------------------------------------


def test_b64_a_group_that_dies_again_and_again_is_back_each_time(tmp_path: Path) -> None:
    count = 80
    with Fleet(tmp_path, latency="0.4", cap=4) as fleet:
        fleet.enqueue(write_prompts(tmp_path / f"{RUN}.jsonl", count))
        records: list[str] = []
        took_s: list[float] = []
        for _ in range(3):
            began_s = time.monotonic()
            group = fleet.start_group()
            done = fleet.counts(RUN).completed
            wait_for_more(fleet, done)
            took_s.append(time.monotonic() - began_s)
            records += [worker.name for worker in Worker.all(connection=fleet.client)]
            group.kill()
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        counts = fleet.wait_done(RUN)

        assert max(took_s) < 5 + 2.5, "five seconds, and the start of a process"
        assert all(name.startswith("gpu0@") for name in records)
        assert len(set(records)) == 3, "two processes shared one record"
        assert (counts.completed, counts.failed, counts.retries) == (count, 0, 0)
        fleet.verify(RUN)


def wait_for_more(fleet: Fleet, done: int) -> None:
    fleet.wait(lambda: fleet.counts(RUN).completed > done, "a completion")


# --- B65 -----------------------------------------------------------------------------------------


def test_b65_whoever_enqueues_at_once_each_prompt_is_asked_once(tmp_path: Path) -> None:
    """The same file twice, one that overlaps it, and one call that asks for retries."""
    whole = write_prompts(tmp_path / "whole.jsonl", 300)
    lines = whole.read_text().splitlines(keepends=True)
    (tmp_path / "part.jsonl").write_text("".join(lines[200:]))
    with Fleet(tmp_path, latency="0", cap=8) as fleet:
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        calls = [
            [*fleet.enqueue_arguments(tmp_path / name), "--run", RUN, "--json", *more]
            for name, more in (
                ("whole.jsonl", []),
                ("whole.jsonl", []),
                ("part.jsonl", []),
                ("whole.jsonl", ["--retry-failed"]),
            )
        ]

        told = at_once(fleet, calls)

        for each, rows in zip(told, (300, 300, 100, 300), strict=True):
            assert each["enqueued"] + each["already_queued"] + each["already_done"] == rows
        assert sum(each["enqueued"] for each in told) == 300
        counts = fleet.wait_done(RUN)
        assert (counts.total, counts.completed) == (300, 300)
        digests = [each.digest for each in of_prompts(fleet)]
        assert len(digests) == len(set(digests)) == 300
        fleet.verify(RUN)


def at_once(fleet: Fleet, calls: list[list[str]]) -> list[dict[str, int]]:
    """Run producer commands side by side; all must end well."""
    running = [
        programs.start(
            [sys.executable, "-m", "producer", *call],
            env={**fleet.env, "HEADRACE_REDIS": fleet.redis.url},
            cwd=fleet.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for call in calls
    ]
    ended = [process.communicate(timeout=60) for process in running]
    assert [process.returncode for process in running] == [0] * len(calls), ended
    return [json.loads(out) for out, _ in ended]
