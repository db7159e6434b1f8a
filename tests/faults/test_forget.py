"""`producer forget` beside worker groups and sinks that serve another run with the same ids."""

from pathlib import Path

import pytest

from common import names
from tests.acceptance.test_main_job import answers_its_own_request
from tests.support.fleet import Fleet, read_rows, write_prompts

QUICK = ("--batch-seconds", "1", "--first-batch-seconds", "1")


@pytest.mark.timeout(400)
def test_a_paused_run_is_forgotten_while_another_goes_on_and_comes_back_from_its_store(
    tmp_path: Path,
) -> None:
    one = write_prompts(tmp_path / "one.jsonl", 300, text="one {i}")
    two = write_prompts(tmp_path / "two.jsonl", 600, text="two {i}")
    with Fleet(tmp_path, latency="lognormal:0.2:1", cap=16) as fleet:
        out = str(tmp_path / "out_two")
        fleet.enqueue(one, "--priority", "1")
        fleet.producer("enqueue", str(two), "--output", out, "--max-tokens", "32")
        fleet.start_group(0, "--concurrency", "16")
        fleet.start_sink("sink", *QUICK)
        fleet.wait(lambda: fleet.counts("one").completed >= 50, "some completions")

        at_work = fleet.producer("forget", "one", "--yes", check=False)
        fleet.producer("pause", "one")
        fleet.wait(lambda: not fleet.in_flight("one"), "what is open to end")
        fleet.wait(lambda: not fleet.counts("one").stream_entries, "the sink to store it")
        done = fleet.counts("one").completed
        fleet.producer("forget", "one", "--yes")
        left = [key.decode() for key in fleet.client.scan_iter("*:one*")]
        fleet.wait(lambda: fleet.counts("two").completed >= 100, "the other run to go on")
        fleet.producer("resume", "one", "--output", fleet.output)
        fleet.wait(lambda: fleet.has_ended("one"), "the run that came back to end")
        fleet.wait((Path(out) / "_SUCCESS").exists, "the other run to end")

        assert at_work.returncode == 5
        assert "gpu0@" in at_work.stderr
        assert 50 <= done < 300
        mine = {names.tombstone("one"), "rq:workers:one"}
        assert [key for key in left if key not in mine and ":notified:" not in key] == []
        fleet.verify("one")
        assert fleet.producer("verify", "two").returncode == 0
        for folder, word, count in ((Path(fleet.output), "one", 300), (Path(out), "two", 600)):
            rows = read_rows(folder, ("shards",))
            assert len({row["key"] for row in rows}) == len(rows) == count
            assert {row["id"] for row in rows} == {f"p{i}" for i in range(count)}
            assert all(answers_its_own_request(row) for row in rows)
            assert all(word in str(row["messages"]) for row in rows)
