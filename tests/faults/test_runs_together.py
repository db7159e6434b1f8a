"""Several runs with the same ids at once, on real worker groups: none is mixed up with another."""

from pathlib import Path

import pytest

from tests.acceptance.test_main_job import answers_its_own_request
from tests.support.fleet import Fleet, read_rows, write_prompts

QUICK = ("--batch-seconds", "1", "--first-batch-seconds", "1")
COUNT = 150


@pytest.mark.timeout(400)
def test_runs_with_equal_ids_keep_to_themselves_and_no_stuck_one_blocks_another(
    tmp_path: Path,
) -> None:
    folder = {name: tmp_path / f"out_{name}" for name in ("wrong", "paused", "gone", "a", "b")}
    flags = {
        "wrong": ["--priority", "9", "--model", "another"],
        "paused": ["--priority", "8"],
        "gone": ["--priority", "7"],
        "a": ["--max-tokens", "11", "--temperature", "0.5"],
        "b": ["--max-tokens", "22", "--seed", "7"],
    }
    with Fleet(tmp_path, servers=2, latency="lognormal:0.05:1", cap=16) as fleet:
        for name, more in flags.items():
            file = write_prompts(tmp_path / f"{name}.jsonl", COUNT, text=f"{name} {{i}}")
            tokens = [] if "--max-tokens" in more else ["--max-tokens", "33"]
            fleet.producer("enqueue", str(file), "--output", str(folder[name]), *tokens, *more)
        fleet.producer("pause", "paused")
        fleet.producer("cancel", "gone", "--yes")
        for gpu in range(2):
            fleet.start_group(gpu)
        fleet.start_sink("sink", *QUICK)

        for name in ("a", "b"):
            fleet.wait((folder[name] / "_SUCCESS").exists, f"run {name} to end")
        assert fleet.counts("paused").queued == fleet.counts("wrong").queued == COUNT
        fleet.producer("resume", "paused")
        fleet.wait((folder["paused"] / "_SUCCESS").exists, "the resumed run to end")

        for name, most in (("a", 11), ("b", 22), ("paused", 33)):
            rows = read_rows(folder[name], ("shards",))
            assert sorted(str(row["id"]) for row in rows) == sorted(f"p{i}" for i in range(COUNT))
            assert all(answers_its_own_request(row) for row in rows)
            assert all(f"{name} " in str(row["messages"]) for row in rows)
            assert {params_of(row)["max_tokens"] for row in rows} == {most}
        assert {params_of(row)["temperature"] for row in read_rows(folder["a"], ("shards",))} == {
            0.5
        }
        assert read_rows(folder["wrong"], ("shards",)) == []
        assert len(read_rows(folder["gone"], ("failures",))) == COUNT
        assert fleet.prompt_requests() == 3 * COUNT


def params_of(row: dict[str, object]) -> dict[str, object]:
    params = row["params"]
    assert isinstance(params, dict)
    return params


@pytest.mark.timeout(400)
def test_a_run_that_paused_itself_goes_on_after_retry_and_resume(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 100)
    with Fleet(tmp_path, latency="0", cap=2) as fleet:
        fleet.simulator.control("bad_params", match="say ")
        fleet.enqueue(prompts)
        fleet.start_group()
        fleet.start_sink("sink", *QUICK)
        fleet.wait(lambda: paused(fleet), "the pause")
        fleet.wait(lambda: fleet.in_flight("job") == 0, "what was in flight to end")
        failed = fleet.counts("job").failed
        fleet.simulator.clear()

        retried = fleet.producer("retry", "job", "--reason", "bad_request")
        resumed = fleet.producer("resume", "job")
        counts = fleet.wait_done("job")

        assert f"{failed} prompts of {failed} get a new try" in retried.stderr
        assert "faults in a row and no success" in retried.stderr
        assert "`producer resume job`" in retried.stderr
        assert "faults in a row" in resumed.stderr
        assert (counts.completed, counts.failed) == (100, 0)
        fleet.verify("job")


def paused(fleet: Fleet) -> bool:
    state = fleet.runs.state("job")
    return state is not None and state.paused is not None
