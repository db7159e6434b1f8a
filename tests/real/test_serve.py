"""`workers serve` over a real SGLang: launched, told of in words, killed and stopped in a run."""

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.conftest import REPOSITORY
from tests.real.pipeline import Pipeline, as_chat, human_eval, say
from tests.real.server import Place
from tests.support.server_process import ServerProcess, steady_port, wait_until
from tests.support.skips import skip_cannot_run
from workers.engine.lives import process_start
from workers.supervisor.processes import ServerProcesses
from workers.supervisor.records import ServerRecord, read_record

pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

_LOGGED = re.compile(r"max_running_requests=(\d+), context_len=")

HOST = "real"
NAME = f"gpu0@{HOST}"
START_LIMIT_S = 300.0
FOUND_LIMIT_S = 60.0

ON_CPU = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
}
FLAGS = (
    *("--served-model-name", "tiny", "--device", "cpu", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--max-total-tokens", "16384", "--context-length", "2048"),
    *(
        "--max-running-requests",
        "32",
        "--max-mamba-cache-size",
        "12",
        "--disable-overlap-schedule",
    ),
)
"""As start.sh has them, with a pool of states that ends its requests at 4."""


class Served:
    """`workers serve` in a folder, and what it says of its server."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.folder = folder
        self.port = steady_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [
            *(sys.executable, "-m", "workers", "serve", "--gpu", "0", "--port", str(self.port)),
            *("--model", str(place.model), "--python", str(place.venv / "bin" / "python")),
            *("--", *FLAGS),
        ]
        environment = {
            **os.environ,
            **ON_CPU,
            "HEADRACE_HOST": HOST,
            "PYTHONPATH": str(REPOSITORY),
        }
        self.process = ServerProcess(command, log=folder / "serve.txt", env=environment)

    @property
    def said(self) -> str:
        return self.process.log.read_text()

    @property
    def log(self) -> str:
        return (self.folder / "sglang_logs" / "sglang_gpu0.log").read_text(errors="replace")

    def record(self) -> ServerRecord:
        found = read_record(self.folder / ".headrace", NAME)
        assert found is not None
        return found

    def ready(self, restarts: int) -> tuple[ServerRecord, float]:
        """Wait for the server's n-th start to give a token; its record, and how long it took."""
        began_s = time.monotonic()

        def holds() -> bool:
            assert self.process.alive(), self.process.tail()
            found = read_record(self.folder / ".headrace", NAME)
            return found is not None and (found.state, found.restarts) == ("ready", restarts)

        wait_until(holds, f"a ready server after {restarts} restarts", START_LIMIT_S)
        return self.record(), time.monotonic() - began_s

    def members(self) -> list[psutil.Process]:
        found = self.record()
        assert found.server is not None
        return list(ServerProcesses.found(found.server, found.mark, None).members())

    def scheduler(self) -> psutil.Process:
        return next(each for each in self.members() if "sglang::scheduler" in each.cmdline()[0])

    def end(self) -> None:
        with suppress(AssertionError):
            left = self.members()
            self.process.kill()
            for process in left:
                with suppress(psutil.Error):
                    process.kill()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    place = Place.found()
    if place is None:
        skip_cannot_run("no SGLang is set up; `make real` does that, once")
    made = Served(place, tmp_path)
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
    assert _LOGGED.findall(served.log) == ["4"]
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
