"""What users are told of a run that did not end well, and of one that did, by real processes."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.fleet import Fleet, write_prompts
from tests.support.watching import figures, of_prompts, wait_state

RUN = "job"
BAD = "BAD"


def prompts(path: Path, *, count: int, bad: int) -> Path:
    """Rows of which the last `bad` are refused by the servers."""
    with path.open("w") as file:
        for i in range(count):
            text = f"say {i} {BAD if i >= count - bad else ''}"
            file.write(json.dumps({"id": i, "prompt": text}) + "\n")
    return path


def ask(fleet: Fleet, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = fleet.producer(*arguments, "--json", check=False)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.cases
@pytest.mark.parametrize(
    ("count", "bad", "status"), [(10, 4, "completed_with_failures"), (10, 10, "failed")]
)
def test_b90_failed_rows_are_never_called_done(
    tmp_path: Path, count: int, bad: int, status: str
) -> None:
    with Fleet(tmp_path, latency="fixed:0.05", fault=f"bad_params:match={BAD}") as fleet:
        fleet.enqueue(prompts(tmp_path / f"{RUN}.jsonl", count=count, bad=bad))
        fleet.start_group()
        fleet.start_sink("sink", "--poll", "0.1")
        fleet.wait_done(RUN)
        fleet.wait(lambda: ask(fleet, "status", RUN)[1]["status"] == status, status)

        code, told = ask(fleet, "status", RUN)
        assert (told["completed"], told["failed"]) == (count - bad, bad)
        assert code == 1

        code, told = ask(fleet, "verify", RUN)
        assert (code, told["proven"], told["ok"]) == (1, True, False)
        assert (told["completed"], told["failed"]) == (count - bad, bad)

        exported = fleet.producer(
            "export", RUN, "--to", "a.jsonl", "--failures", "f.jsonl", check=False
        )
        assert exported.returncode == 1
        failures = [json.loads(line) for line in (tmp_path / "f.jsonl").read_text().splitlines()]
        assert [row["id"] for row in failures] == list(range(count - bad, count))
        assert {row["status"] for row in failures} == {400}
        assert all(row["message"] for row in failures)


@pytest.mark.cases
def test_b51_b54_a_run_in_two_parts_is_one_run_in_the_order_of_its_input(tmp_path: Path) -> None:
    """The first part's objects stay as they are; the figures cover both."""
    with Fleet(tmp_path, servers=1, latency="lognormal:0.05:1") as fleet:
        file = write_prompts(tmp_path / f"{RUN}.jsonl", 60)
        fleet.enqueue(file, "--limit", "20")
        group, sink = fleet.start_group(), fleet.start_sink("sink", "--poll", "0.1")
        first = fleet.wait_done(RUN)
        before = {path.name: path.read_bytes() for path in (tmp_path / "out/shards").iterdir()}
        assert ask(fleet, "status", RUN)[1]["status"] == "completed"
        group.stop()
        sink.stop()

        fleet.processes.clear()
        fleet.enqueue(file)
        fleet.start_group()
        fleet.start_sink("sink", "--poll", "0.1")
        fleet.wait_done(RUN)

        for name, data in before.items():
            assert (tmp_path / "out/shards" / name).read_bytes() == data
        code, told = ask(fleet, "status", RUN)
        assert (code, told["status"], told["completed"]) == (0, "completed", 60)
        assert told["s3_uploaded"] == 60
        assert told["total_output_tokens"] > first.output_tokens
        rows = fleet.rows()
        assert told["total_output_tokens"] == sum(
            row["usage"]["completion_tokens"]  # type: ignore[index]
            for row in rows
        )
        fleet.verify(RUN, "--input", str(file))
        fleet.producer("export", RUN, "--to", "a.jsonl")
        exported = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
        assert [row["line"] for row in exported] == list(range(1, 61))
        fleet.processes["sink"].stop()
        note = json.loads((tmp_path / "state" / RUN / "progress.json").read_text())
        assert (note["total"], note["status"]) == (60, "completed")


def test_rows_that_name_a_model_are_asked_of_no_other(tmp_path: Path) -> None:
    """SGLang answers for any name, so nobody else would notice."""
    rows = [{"id": n, "prompt": f"say {n}", "model": "another"} for n in range(3)]
    path = tmp_path / "job.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    with Fleet(tmp_path, latency="0.01", cap=4) as fleet:
        fleet.enqueue(path)
        fleet.start_group()
        wait_state(fleet, "wrong_model")

        assert "wants model another, this server serves tiny" in figures(fleet, "gpu0").detail
        assert of_prompts(fleet) == []

        rows = [row | {"model": "tiny:adapter"} for row in rows]
        path = tmp_path / "adapter.jsonl"
        path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        fleet.output = str(tmp_path / "adapter")
        fleet.enqueue(path)
        fleet.wait(lambda: fleet.counts("adapter").completed == 3, "the adapter's run")
