"""A supervisor in this process over simulated SGLang servers, which are real processes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.server_process import steady_port
from tests.support.tls import TLS
from workers.simulator.environment import simulated_python
from workers.stop_request import StopRequest
from workers.supervisor.emptying import Emptying
from workers.supervisor.plan import ServeOptions
from workers.supervisor.processes import MARK, ServerProcesses
from workers.supervisor.records import ServerRecord, read_record
from workers.supervisor.supervisor import Supervisor

LIMIT_S = 90.0
NAME = "gpu0@test"

HYBRID = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_conv_kernel_dim": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_size": 128,
}


class Supervised:
    """One state directory, one port, and whoever supervises there.

    Args:
        folder: A test's tmp_path.
        monkeypatch: Of that test: the server's variables are this process's.
        version: SGLang's, simulated.
    """

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, version: str = "0.5.23"
    ) -> None:
        self.folder = folder
        self.port = steady_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.journal = folder / "requests.jsonl"
        self.stop = StopRequest()
        self.task: asyncio.Task[None] | None = None
        self.redis: Any = None
        self.seen: list[ServerRecord] = []
        self.set = monkeypatch.setenv
        self.launched: list[ServerProcesses] = []
        self._keep_launched(monkeypatch)
        self.set("HEADRACE_SIM_LOAD", "0")
        self.set("HEADRACE_SIM_SPEED", "50")
        self.set("HEADRACE_SIM_LOG", str(self.journal))
        model = folder / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(HYBRID))
        self._options: dict[str, Any] = {
            "name": NAME,
            "gpus": (0,),
            "model": str(model),
            "python": str(simulated_python(folder / "sim", version)),
            "port": self.port,
            "state_dir": folder / "state",
            "log_dir": folder / "logs",
            "drain_limit_s": 30.0,
        }

    def _keep_launched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Know what is launched, so that it ends with the test whatever its supervisor does."""
        start = ServerProcesses.start

        def kept(*args: Any, **told: Any) -> ServerProcesses:
            made = start(*args, **told)
            self.launched.append(made)
            return made

        monkeypatch.setattr(ServerProcesses, "start", kept)

    async def state(self) -> dict[str, Any]:
        """What the server counts."""
        async with httpx.AsyncClient(verify=TLS, timeout=60) as client:
            told: dict[str, Any] = (await client.get(f"{self.url}/_sim/state")).json()
            return told

    async def counts(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until something holds of what the server counts."""
        async with asyncio.timeout(LIMIT_S):
            while not condition(await self.state()):  # noqa: ASYNC110 - another process counts
                await asyncio.sleep(0.02)

    def options(self, **changes: Any) -> ServeOptions:
        return ServeOptions(**{**self._options, **changes})

    @property
    def state_dir(self) -> Path:
        return self.folder / "state"

    @property
    def log(self) -> str:
        """All that the servers wrote."""
        paths = sorted((self.folder / "logs").glob("*"), reverse=True)
        return "".join(path.read_text(errors="replace") for path in paths)

    def begin(self, **changes: Any) -> None:
        """Let a supervisor begin."""
        self.stop = StopRequest()
        emptying = Emptying(self.redis, server=f"http://test:{self.port}", name=NAME)
        supervisor = Supervisor(self.options(**changes), self.stop, emptying)
        self.task = asyncio.create_task(supervisor.run())

    async def until(self, condition: Callable[[ServerRecord], bool], what: str) -> ServerRecord:
        """Wait until something holds of the record; every other one that is met is in `seen`."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                found = read_record(self.state_dir, NAME)
                if found is not None:
                    if not self.seen or self.seen[-1] != found:
                        self.seen.append(found)
                    if condition(found):
                        return found
                if self.task is not None and self.task.done() and self.task.exception():
                    raise AssertionError(f"not {what}: it ended") from self.task.exception()
                await asyncio.sleep(0.02)
        raise AssertionError(what)

    async def ready(self, after: int = 0) -> ServerRecord:
        """Wait until a server is ready whose first process is another than `after`."""

        def holds(record: ServerRecord) -> bool:
            other = record.server is not None and record.server.pid != after
            return record.state == "ready" and other

        return await self.until(holds, f"a ready server after {after}")

    async def ended(self) -> None:
        """Wait for the supervisor's own end."""
        assert self.task is not None
        async with asyncio.timeout(LIMIT_S):
            await self.task

    async def leave(self) -> None:
        """Take the supervisor away as SIGKILL would: nothing of it runs any more."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])

    def servers(self) -> list[psutil.Process]:
        """First processes of servers on this port, by whoever launched them."""
        return [each for each in marked(self.folder) if str(self.port) in each.cmdline()]


def marked(folder: Path) -> list[psutil.Process]:
    """All processes of servers that run an environment below a folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            environment = process.environ()
            if MARK in environment and str(folder) in environment.get("HEADRACE_SIM_LOG", ""):
                found.append(process)
    return found


@asynccontextmanager
async def supervised(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str = "0.5.23",
    env: Mapping[str, str] | None = None,
    **changes: Any,
) -> AsyncIterator[Supervised]:
    """A supervisor over one simulated server; all of both has ended with the block."""
    world = Supervised(folder, monkeypatch, version)
    for name, value in (env or {}).items():
        world.set(name, value)
    world.begin(**changes)
    try:
        yield world
    finally:
        await world.leave()
        for processes in world.launched:
            processes.end()


def scheduler_of(pid: int) -> psutil.Process:
    """The scheduler of a server."""
    [child] = psutil.Process(pid).children()
    return child
