"""What a worker group does for its runs while there is nothing to claim."""

import time
from pathlib import Path

import pytest
from rq import Queue
from rq.job import Job

from common import names
from tests.support.fleet import Fleet, write_prompts
from tests.support.watching import QUICK_SINK, timed

pytestmark = pytest.mark.timeout(400)

RUN = "job"
QUICK = timed(audit_every_s=0.5)


def test_what_rq_empty_took_comes_back_without_anybody_asking(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 30)
    with Fleet(tmp_path, latency="0.05", cap=4, env=QUICK) as fleet:
        fleet.enqueue(prompts)
        Queue(RUN, connection=fleet.client).empty()  # type: ignore[no-untyped-call]
        assert fleet.client.llen(names.rq_queue(RUN)) == 0

        process = fleet.start_group()
        fleet.wait(lambda: fleet.counts(RUN).completed == 30, "all to be completed")

        assert "restored 30 lost bodies" in process.log.read_text()
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait_done(RUN)


def test_a_job_cancelled_with_rq_ends_as_cancelled(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 10)
    with Fleet(tmp_path, latency="0.05", cap=4, env=QUICK) as fleet:
        fleet.enqueue(prompts)
        key = next(iter(fleet.client.scan_iter(f"{names.RQ_JOB_STEM}*"))).decode()
        Job.fetch(key.removeprefix(names.RQ_JOB_STEM), connection=fleet.client).cancel()

        fleet.start_group()
        fleet.wait(lambda: fleet.counts(RUN).queued == fleet.in_flight(RUN) == 0, "its end")

        assert (fleet.counts(RUN).completed, fleet.counts(RUN).cancelled) == (9, 1)


def test_a_restarted_redis_is_reconciled_where_no_sink_is(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 60)
    with Fleet(tmp_path, latency="0.2", cap=4, env=QUICK) as fleet:
        fleet.enqueue(prompts)
        fleet.start_group()
        fleet.wait(lambda: fleet.counts(RUN).completed >= 8, "8 completions")

        fleet.redis.restart()
        fleet.wait(lambda: fleet.counts(RUN).completed == 60, "all to be completed")

        assert fleet.prompt_requests() == 60


def test_a_directory_that_is_not_this_run_is_left_alone(tmp_path: Path) -> None:
    # As on another machine: the path exists there and holds something else, or nothing.
    prompts = write_prompts(tmp_path / "job.jsonl", 60)
    with Fleet(tmp_path, latency="0.2", cap=4, env=QUICK) as fleet:
        fleet.enqueue(prompts)
        Path(fleet.output).rename(tmp_path / "elsewhere")
        Path(fleet.output).mkdir()
        fleet.start_group()
        fleet.wait(lambda: fleet.counts(RUN).completed >= 8, "8 completions")

        fleet.redis.restart()
        fleet.wait(lambda: fleet.in_flight(RUN) == 0, "what is in flight to end")
        done = fleet.counts(RUN).completed
        looked_s = time.monotonic()
        fleet.wait(lambda: time.monotonic() - looked_s > 4, "several looks of the caretaker")

        assert list(Path(fleet.output).iterdir()) == []
        assert fleet.counts(RUN).completed == done < 60
