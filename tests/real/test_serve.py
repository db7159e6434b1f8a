"""`workers serve` over a real SGLang: launched, told of in words, killed and stopped in a run."""

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.real.conftest import found_place
from tests.real.launched import FLAGS, Launched
from tests.real.pipeline import Pipeline, as_chat, human_eval, say
from tests.real.server import START_LIMIT_S, Place
from tests.support.server_process import ServerProcess, wait_until
from workers.lives import process_start
from workers.supervisor.records import ServerRecord

pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

FOUND_LIMIT_S = 60.0


class Served(Launched):
    """`workers serve` in a folder, and what it says of its server."""

    def __init__(self, place: Place, folder: Path) -> None:
        super().__init__(place, folder)
        self.process = ServerProcess(
            [sys.executable, "-m", "workers", "serve", *self.flags, "--", *FLAGS],
            log=folder / "serve.txt",
            env=self.env,
        )

    @property
    def said(self) -> str:
        return self.process.log.read_text()

    def ready(self, restarts: int) -> tuple[ServerRecord, float]:
        """Wait for the server's n-th start to give a token; its record, and how long it took."""
        began_s = time.monotonic()
        return self.wait_ready(restarts), time.monotonic() - began_s


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(found_place(), tmp_path)
    yield made
    made.end()


def test_a_limited_server_is_told_of_in_words_and_survives_the_ends_of_its_scheduler(
    served: Served, tmp_path: Path
) -> None:
    found, start_s = served.ready(0)
    loads = httpx.get(f"{served.url}/v1/loads", timeout=30)
    told = loads.json()["loads"][0]["max_running_requests"] if loads.is_success else None
    say(
        "serve",
        version=found.version,
        cap=found.cap,
        states=found.mamba_states,
        start=f"{start_s:.0f} s",
    )
    assert found.cap == 4
    assert served.caps() == [4]
    assert told in {4, None}
    assert (found.strategy, found.mamba_states, found.kv_tokens) == ("no_buffer", 12, 16384)
    assert "4 requests at once: the mamba pool binds (12 states, 3 a request)" in served.said

    rows = as_chat(human_eval()[:80])
    with Pipeline(tmp_path, served.url) as run:
        run.enqueue(rows, 48)
        run.start_workers()
        sink = run.start_sink()
        run.watch_until(lambda counts: counts.completed >= 10, "10 answers")
        group = run.group()
        assert group is not None
        assert group.cap == found.cap

        served.scheduler().kill()
        _, killed_s = served.ready(1)
        run.watch_until(lambda counts: counts.completed >= 30, "30 answers")

        served.scheduler().send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        wait_until(lambda: served.record().state != "ready", "the hang", START_LIMIT_S)
        found_s = time.monotonic() - began_s
        _, stopped_s = served.ready(2)
        run.watch_to_the_end(sink)
        code, verdict = run.verify()
        completed, failed, counts = run.completions(), run.failures(), run.counts()

    say(
        "ends of the scheduler",
        killed=f"a token after {killed_s:.0f} s",
        stopped=f"found after {found_s:.0f} s, a token {stopped_s:.0f} s later",
    )
    assert code == 0, verdict
    assert failed == []
    assert len(completed) == len(rows)
    assert {row["attempts"] for row in completed} == {1}
    assert counts.duplicates_dropped == 0
    assert found_s <= FOUND_LIMIT_S

    left = [process.pid for process in served.members()]
    assert left
    served.process.send(signal.SIGTERM)
    wait_until(lambda: not served.process.alive(), "its end", START_LIMIT_S)
    # Whoever adopts them may be slow to take note of their ends.
    assert [pid for pid in left if process_start(pid)] == []
