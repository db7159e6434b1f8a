"""The main job, as a user runs it: a file becomes a complete and exact set of completions."""

import subprocess
import sys
from pathlib import Path

import pytest

from common import snapshot
from tests.support.fleet import HASH_MARK, Fleet, write_prompts
from workers.simulator.hashing import request_hash

pytestmark = pytest.mark.timeout(400)


def test_a_file_becomes_one_completion_a_prompt(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 500)
    with Fleet(tmp_path, servers=2, latency="lognormal:0.1:1", cap=16) as fleet:
        fleet.enqueue(prompts)
        fleet.start_group(0)
        fleet.start_group(1)
        fleet.start_sink()

        counts = fleet.wait_done("job")

        assert (counts.total, counts.completed) == (500, 500)
        rows = fleet.rows()
        assert sorted(str(row["id"]) for row in rows) == sorted(f"p{i}" for i in range(500))
        assert all(answers_its_own_request(row) for row in rows)
        assert fleet.simulator.account().requests == 500 + fleet.probes()
        fleet.verify("job")


def test_the_same_command_again_finishes_what_the_first_left(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 100)
    with Fleet(tmp_path, latency="0", cap=8) as fleet:
        fleet.enqueue(prompts)
        fleet.start_group()
        fleet.start_sink()
        fleet.wait_done("job")
        write_prompts(prompts, 150)

        again = fleet.enqueue(prompts)
        fleet.wait(lambda: fleet.has_ended("job"), "the longer run to end")

        assert "50" in again.stderr
        assert fleet.counts("job").completed == 150
        fleet.verify("job")


def test_rq_info_shows_depth_executing_and_a_worker_a_gpu(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 200)
    with Fleet(tmp_path, servers=2, latency="fixed:30", cap=4) as fleet:
        fleet.enqueue(prompts)
        fleet.start_group(0, "--concurrency", "4")
        fleet.start_group(1, "--concurrency", "4")
        fleet.wait(lambda: fleet.in_flight("job") >= 8, "both servers to be full")
        fleet.wait(lambda: "busy" in rq_info(fleet), "RQ's record of the workers")

        shown = rq_info(fleet)

        depth = 200 - fleet.in_flight("job")
        assert f"queue job {depth}, {200 - depth} executing" in shown
        assert shown.count("worker gpu0@") == shown.count("worker gpu1@") == 1
        for process in fleet.processes.values():
            process.kill()


def rq_info(fleet: Fleet) -> str:
    """What RQ's own tool prints."""
    command = [sys.executable, "-m", "rq.cli", "info", "-u", fleet.redis.url, "--raw"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def answers_its_own_request(row: dict[str, object]) -> bool:
    """Whether the answer holds the hash of the very request that this row asked."""
    messages = row["messages"]
    assert isinstance(messages, list)
    params = row["params"]
    assert isinstance(params, dict)
    body = {**params, "messages": messages[:-1], "stream": False}
    answer = str(messages[-1]["content"])
    return answer.startswith(f"{HASH_MARK}{request_hash(body)} ")


def test_a_full_server_is_told_of_with_what_binds_and_what_would_give_more(tmp_path: Path) -> None:
    """The job that Headrace was born from: extra_buffer, 160 states, 32 slots."""
    prompts = write_prompts(tmp_path / "job.jsonl", 60)
    # 32 requests at 670 tokens/s: each takes two and a half minutes.
    with Fleet(
        tmp_path,
        env={"HEADRACE_TIMING": '{"load_every_s": 0.5}'},
        answer_tokens="fixed:3150",
        strategy="extra_buffer",
    ) as fleet:
        fleet.enqueue(prompts, "--max-tokens", "4096")
        fleet.start_group(0, "--ramp", "100")
        fleet.wait(lambda: "no_radix" in advice(fleet), "the advice of a full server")

        told = advice(fleet)
        assert "32 requests at once: the mamba pool binds (160 states, 5 a request)" in told
        assert "no prefix is found" in told
        for process in fleet.processes.values():
            process.kill()


def advice(fleet: Fleet) -> str:
    """What `producer status` says somebody should do."""
    seen = snapshot.read(fleet.client, "job")
    assert seen is not None
    return " ".join(seen.figures()["warnings"])
