"""Cases of what is written to logs, however long something goes wrong."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fleet import Fleet
from tests.support.telltale import API_KEY, PROMPT, telltale_server
from tests.support.watching import QUICK_SINK, timed, write_rows

pytestmark = pytest.mark.timeout(600)

RUN = "job"
ROWS = 100
MOST_BYTES = 200_000
"""What 20 MB for 10,000 rows of 10 KiB leave these."""

MOST_LINE_BYTES = 4_096
_FAILED = re.compile(r"prompts failed(?: in the last \d+ s)?: ([0-9,]+) (\w+)")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Prompts of 10 KiB."""
    return [f"{PROMPT} {n} ".ljust(10_240, "x") for n in range(ROWS)]


def logs(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in folder.glob("*.log"):
        yield path.name, path.read_bytes()


def check_logs(folder: Path) -> None:
    for name, log in logs(folder):
        assert len(log) < MOST_BYTES, name
        assert max(map(len, log.splitlines()), default=0) < MOST_LINE_BYTES, name
        assert PROMPT.encode() not in log, name
        assert API_KEY.encode() not in log, name
        assert b"Traceback" not in log, name


def log_of(fleet: Fleet, name: str) -> str:
    return fleet.processes[name].log.read_text()


class Lifting:
    """Lifts the pause that twenty faults in a row bring, each time; counts how often."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.times = 0

    def ended(self) -> bool:
        state = self.fleet.runs.state(RUN)
        if state is not None and state.paused:
            self.fleet.runs.resume(RUN)
            self.times += 1
        return self.fleet.has_ended(RUN)


@pytest.mark.parametrize(
    ("word", "told"), [("refuse 400", "bad_request"), ("refuse 500", "server_error")]
)
def test_b93_a_server_that_refuses_everything_with_the_prompt_fills_no_log(
    tmp_path: Path, texts: list[str], word: str, told: str
) -> None:
    prompts = write_rows(tmp_path / f"{RUN}.jsonl", [f"{word} {text}" for text in texts])
    env = {**os.environ, **timed(), "HEADRACE_API_KEY": API_KEY}
    with telltale_server() as url, Fleet(tmp_path, env=env) as fleet:
        fleet.enqueue(prompts)
        fleet.spawn("gpu0", "workers", "start", "--gpu", "0", "--server", url, "--ramp", "10000")
        fleet.start_sink("sink", *QUICK_SINK)
        lifting = Lifting(fleet)
        fleet.wait(lifting.ended, "every prompt to fail", 400)
        fleet.processes["gpu0"].stop()

        assert fleet.counts(RUN).failed == ROWS
        assert lifting.times > 0
        # Every failure is told, few lines tell them.
        found = _FAILED.findall(log_of(fleet, "gpu0"))
        assert {reason for _, reason in found} == {told}
        assert sum(int(count.replace(",", "")) for count, _ in found) == ROWS
        assert len(found) <= ROWS // 5
        check_logs(tmp_path)
        for row in fleet.rows("failures"):
            assert len(str(row["message"])) <= 2_000
            assert API_KEY not in str(row["message"])


def test_b93_a_redis_and_a_store_that_stay_away_fill_no_log(
    tmp_path: Path, texts: list[str]
) -> None:
    prompts = write_rows(tmp_path / f"{RUN}.jsonl", texts)
    with Fleet(tmp_path, latency="0.01", cap=16) as fleet:
        fleet.enqueue(prompts)
        # A file in the place of a folder: every write of a shard is refused.
        (Path(fleet.output) / "shards").touch()
        fleet.start_group()
        fleet.start_sink("sink", "--batch-rows", "1", "--poll", "0.01")
        fleet.wait(lambda: fleet.counts(RUN).completed == ROWS, "all answers", 240)
        fleet.wait(lambda: "nothing is lost" in log_of(fleet, "sink"), "the sink to say so", 240)
        fleet.redis.kill()
        fleet.wait(
            lambda: "waiting for Redis" in log_of(fleet, "sink"), "the sink to say that too", 240
        )
        fleet.wait(lambda: "Redis is away" in log_of(fleet, "gpu0"), "the worker group too", 240)
        fleet.redis.start()
        (Path(fleet.output) / "shards").unlink()
        fleet.wait_done(RUN, limit_s=300)
        fleet.verify(RUN)

        check_logs(tmp_path)
