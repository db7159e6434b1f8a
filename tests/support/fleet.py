"""A whole deployment of real processes: Redis, simulated servers, worker groups, sink, producer.

Every part is the command that a user types, in a process of its own, so that a test may kill it.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import redis

from common.models import Counts
from common.queue import Runs
from tests.support import programs
from tests.support.redis_server import RedisServer
from tests.support.server_process import ServerProcess, wait_until
from workers.simulator.launch import SimulatorProcess
from workers.simulator.log import Served

REPOSITORY = Path(__file__).resolve().parents[2]
HASH_MARK = "sim:"
OTHER_SETTINGS = REPOSITORY / "tests" / "support" / "other_settings"


class Fleet:
    """Redis and simulated servers from the start; worker groups and sinks as a test starts them.

    Args:
        folder: Where everything goes; a test's tmp_path.
        servers: Simulated GPUs.
        output: The run's output; the default is a directory below `folder`.
        redis: A server of the caller's; the default is a Valkey with an append-only file.
        simulator: Options of the simulator by name.
    """

    def __init__(
        self,
        folder: Path,
        *,
        servers: int = 1,
        output: str | None = None,
        redis: RedisServer | None = None,
        env: Mapping[str, str] | None = None,
        **simulator: Any,
    ) -> None:
        self.folder = folder
        self.output = output or str(folder / "out")
        self.redis = redis or RedisServer("valkey", appendonly=True)
        self._own_redis = redis is None
        self.simulator = SimulatorProcess(servers=servers, **simulator)
        self.env = {**os.environ, "PYTHONPATH": str(REPOSITORY), **(env or {})}
        self.processes: dict[str, ServerProcess] = {}
        self._lives = 0

    def __enter__(self) -> Self:
        if self._own_redis:
            self.redis.start()
        self.env["HEADRACE_REDIS"] = self.redis.url
        self.simulator.__enter__()
        self.client: redis.Redis = self.redis.client()
        self.runs = Runs(self.client)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.processes.values():
            process.stop()
        self.simulator.close()
        self.client.close()
        if self._own_redis:
            self.redis.remove()

    # --- commands -------------------------------------------------------------------

    def producer(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a producer command to its end."""
        done = programs.run(
            [sys.executable, "-m", "producer", *args],
            env=self.env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(f"producer {args} ended with {done.returncode}: {done.stderr}")
        return done

    def enqueue_arguments(self, file: Path, *extra: str) -> list[str]:
        """The usual enqueue of a file."""
        tokens = () if "--max-tokens" in extra else ("--max-tokens", "64")
        return ["enqueue", str(file), "--output", self.output, *tokens, *extra]

    def enqueue(self, file: Path, *extra: str) -> subprocess.CompletedProcess[str]:
        return self.producer(*self.enqueue_arguments(file, *extra))

    def spawn(self, name: str, *command: str) -> ServerProcess:
        """Start a command under a name; an earlier process of that name must have ended."""
        self._lives += 1
        process = ServerProcess(
            [sys.executable, "-m", *command],
            log=self.folder / f"{name}-{self._lives}.log",
            env=self.env,
        )
        self.processes[name] = process
        return process

    def start_group(self, gpu: int = 0, *extra: str) -> ServerProcess:
        """One worker group at the simulated server of that number."""
        ramp = () if "--ramp" in extra else ("--ramp", "10000")
        url = self.simulator.urls[gpu]
        command = ("workers", "start", "--gpu", str(gpu), "--server", url, *ramp, *extra)
        return self.spawn(f"gpu{gpu}", *command)

    def start_sink(self, name: str = "sink", *extra: str) -> ServerProcess:
        state = str(self.folder / "state")
        return self.spawn(name, "workers", "sink", "--state-dir", state, *extra)

    def set_for_new_processes(self, **settings: float) -> None:
        """Start what is started from now on with settings of `tests/support/other_settings`."""
        self.env["PYTHONPATH"] = f"{OTHER_SETTINGS}{os.pathsep}{REPOSITORY}"
        self.env |= {f"HEADRACE_TEST_{key.upper()}": str(value) for key, value in settings.items()}

    # --- looking --------------------------------------------------------------------

    def counts(self, run: str) -> Counts:
        """The run's counters; they must add up at every reading."""
        counts = self.runs.counts(run)
        parts = counts.completed + counts.failed + counts.cancelled
        assert parts + counts.in_flight + counts.queued == counts.total, counts
        return counts

    def wait(self, condition: Callable[[], bool], what: str, limit_s: float = 150) -> None:
        """Wait for a condition; a process that ended by itself is named with its last words."""

        def holds() -> bool:
            for name, process in self.processes.items():
                assert process.alive(), f"{name} ended: {process.tail()}"
            return condition()

        wait_until(holds, what, limit_s)

    def wait_done(self, run: str, limit_s: float = 300) -> Counts:
        """Wait until every prompt has ended and the store says so."""
        self.wait(lambda: self.has_ended(run), f"run {run} to end ({self.counts(run)})", limit_s)
        return self.counts(run)

    def has_ended(self, run: str) -> bool:
        return (Path(self.output) / "_SUCCESS").exists() and self._all_stored(run)

    def _all_stored(self, run: str) -> bool:
        counts = self.counts(run)
        return counts.queued == counts.in_flight == counts.stream_entries == 0

    def in_flight(self, run: str) -> int:
        return self.counts(run).in_flight

    def verify(self, run: str, *extra: str) -> None:
        """`producer verify` must prove the run."""
        done = self.producer("verify", run, "--output", self.output, *extra, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def rows(self, *folders: str) -> list[dict[str, object]]:
        """All rows of the store's shards (or other folders)."""
        return list(read_rows(Path(self.output), folders or ("shards",)))

    def probes(self) -> int:
        """How many one-token probes the servers answered."""
        return sum(served.rid.startswith("headrace-probe") for served in self.served())

    def prompt_requests(self) -> int:
        """How many requests for prompts reached the servers."""
        return len(self.served()) - self.probes()

    def served(self) -> list[Served]:
        return list(self.simulator.account().served)

    def max_open(self) -> int:
        """The most requests that any server had open at once."""
        return max(self.simulator.account().max_open.values(), default=0)


def read_rows(output: Path, folders: Sequence[str]) -> list[dict[str, object]]:
    """Read every row below a directory output."""
    from common.store.frames import decompress

    return [
        msgspec.json.decode(line)
        for folder in folders
        for path in sorted((output / folder).glob("*.zst"))
        for line in decompress(path.read_bytes()).splitlines()
    ]


def write_prompts(path: Path, count: int, *, prefix: str = "p", text: str = "say {i}") -> Path:
    """Write a JSONL of made-up prompts with the ids p0, p1, …"""
    with path.open("wb") as file:
        for i in range(count):
            row = {"id": f"{prefix}{i}", "prompt": text.format(i=i)}
            file.write(msgspec.json.encode(row) + b"\n")
    return path


def kill_group(process: ServerProcess) -> None:
    """SIGKILL."""
    os.kill(process.pid, signal.SIGKILL)
    process.kill()
