"""A real SGLang server that `workers serve` launches: its record, its log and its processes."""

import re
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil

from tests.real.server import LOOK_EVERY_S, SCHEDULER, START_LIMIT_S, Place, answered
from tests.support.producer_cli import environment
from tests.support.server_process import ServerProcess, steady_port, wait_until
from workers.supervisor.processes import ServerProcesses
from workers.supervisor.records import ServerRecord, read_record

HOST = "real"
NAME = f"gpu0@{HOST}"

ON_CPU = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
}
ASKED, STATES = 32, 12
FLAGS = (
    *("--served-model-name", "tiny", "--device", "cpu", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--max-total-tokens", "16384", "--context-length", "2048"),
    *("--max-running-requests", str(ASKED), "--max-mamba-cache-size", str(STATES)),
    "--disable-overlap-schedule",
)
"""As start.sh has them, with a pool of states that ends its requests at 4."""

_SUMMARY = re.compile(r"max_running_requests=(\d+), context_len=")
_RUNNING = re.compile(r"#running-req: (\d+)")


class Launched:
    """The one server that `workers serve`, or `workers up`, runs in a folder.

    Args:
        place: Where SGLang and the model are.
        folder: In which the command is called.

    Attributes:
        process: The command, once the test has started it.
    """

    process: ServerProcess

    def __init__(self, place: Place, folder: Path) -> None:
        self.folder = folder
        self.port = steady_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.flags = (
            *("--gpu", "0", "--port", str(self.port), "--model", str(place.model)),
            *("--python", str(place.venv / "bin" / "python")),
        )
        self.variables = {**ON_CPU, "HEADRACE_HOST": HOST}
        self.env = environment(self.variables)

    @property
    def log(self) -> str:
        """The server's own, of all its lives."""
        return (self.folder / "sglang_logs" / "sglang_gpu0.log").read_text(errors="replace")

    def caps(self) -> list[int]:
        """The cap as each of its starts told it."""
        return list(map(int, _SUMMARY.findall(self.log)))

    def most_running(self) -> list[int]:
        """How many requests ran at most in each of its lives, by its log."""
        lives = _SUMMARY.split(self.log)[2::2]
        return [max(map(int, _RUNNING.findall(life)), default=0) for life in lives]

    def statuses(self) -> Counter[tuple[str, int]]:
        """How often each (path, status) was answered."""
        return answered(self.log)

    def record(self) -> ServerRecord:
        found = read_record(self.folder / ".headrace", NAME)
        assert found is not None
        return found

    def is_ready(self, restarts: int) -> bool:
        """Whether the server's n-th start has given a token; the command has to live."""
        assert self.process.alive(), self.process.tail()
        found = read_record(self.folder / ".headrace", NAME)
        return found is not None and (found.state, found.restarts) == ("ready", restarts)

    def wait_ready(self, restarts: int) -> ServerRecord:
        """Wait for the server's n-th start to give a token."""
        what = f"a ready server after {restarts} restarts"
        wait_until(lambda: self.is_ready(restarts), what, START_LIMIT_S, every_s=LOOK_EVERY_S)
        return self.record()

    def members(self) -> list[psutil.Process]:
        """All processes of the server."""
        found = self.record()
        assert found.server is not None
        return list(ServerProcesses.found(found.server, found.mark, None).members())

    def scheduler(self) -> psutil.Process:
        return next(each for each in self.members() if SCHEDULER in each.cmdline()[0])

    def end(self) -> None:
        """Kill the command, and the server, which outlives it."""
        left: list[psutil.Process] = []
        with suppress(AssertionError):
            left = self.members()
        self.process.kill()
        for process in left:
            with suppress(psutil.Error):
                process.kill()
