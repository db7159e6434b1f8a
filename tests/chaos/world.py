"""The processes, proxies and store of one round."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from common.store import ObjectStore, open_store
from tests.chaos.actors import Actor
from tests.chaos.kit import BATCH_S, RUN, Kit
from tests.chaos.producing import Producing
from tests.chaos.redisside import RedisSide
from tests.chaos.serverlog import ServerLog
from tests.support.fleet import write_prompts
from tests.support.s3 import CREDENTIALS, S3Server
from tests.support.s3_proxy import FaultProxy
from workers.simulator.launch import SimulatorProcess

REPOSITORY = Path(__file__).resolve().parents[2]


class Server:
    """One simulated server in a process of its own, which a thread starts again."""

    def __init__(self, index: int, kit: Kit, folder: Path) -> None:
        self.name = f"server{index}"
        path = folder / f"{self.name}.jsonl"
        self.log = ServerLog(path)
        self.process = SimulatorProcess(
            servers=1, log=path, cap=kit.bound, latency=kit.latency, known_rids_only=True
        )
        self.process.start()
        self.url = self.process.urls[0]
        self._starting: threading.Thread | None = None
        self.failed: list[str] = []

    @property
    def alive(self) -> bool:
        if self._starting is not None and self._starting.is_alive():
            return False
        running = self.process.process
        return running is not None and running.poll() is None

    @property
    def pid(self) -> int:
        return self.process.process.pid if self.process.process else 0

    def start(self) -> None:
        self._starting = threading.Thread(target=self._restart, daemon=True)
        self._starting.start()

    def settle(self) -> None:
        """Wait until it has started."""
        if self._starting is not None:
            self._starting.join(60)

    def _restart(self) -> None:
        for last in (False, False, True):
            try:
                self.process.restart()
            except (RuntimeError, TimeoutError, OSError) as error:
                if last:
                    self.failed.append(f"{self.name}: {error}")
            else:
                return


class World:
    """Everything that runs in a round.

    Attributes:
        folder: Of logs and, as a rule, output.
        groups, sinks: Actors.
        servers: One a group.
        s3: The proxy before S3, None where the output is a directory.
    """

    def __init__(self, kit: Kit, folder: Path) -> None:
        self.kit = kit
        self.folder = folder
        self._close: list[Callable[[], object]] = []
        self.redis = RedisSide(kit.fsync)
        self._close.append(self.redis.close)
        self.s3: FaultProxy | None = None
        self.output = str(folder / "out")
        self._endpoint: str | None = None
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RQ_")},
            **CREDENTIALS,
            **kit.environment(),
            "PYTHONPATH": str(REPOSITORY),
            "HEADRACE_REDIS": self.redis.proxy.url,
        }

    def __enter__(self) -> Self:
        kit = self.kit
        try:
            if kit.store == "s3":
                self._open_s3()
            self.servers = [Server(i, kit, self.folder) for i in range(kit.groups)]
            self._close += [server.process.close for server in self.servers]
            self.groups = [self._group(i) for i in range(kit.groups)]
            self.sinks = [self._sink(i) for i in range(kit.sinks)]
            files = [
                write_prompts(
                    self.folder / f"file{i}.jsonl",
                    kit.prompts // kit.files,
                    prefix=f"f{i}-",
                    text=f"say {{i}} of file {i}",
                )
                for i in range(kit.files)
            ]
            self.producing = Producing(
                kit,
                files,
                output=self.output,
                endpoint=self._endpoint,
                folder=self.folder,
                env=self.env,
            )
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def actors(self) -> list[Actor]:
        return [*self.groups, *self.sinks, *self.producing.actors]

    def store(self) -> ObjectStore:
        """Open the output, past every fault."""
        if self.s3 is not None:
            os.environ.update(CREDENTIALS)
        return open_store(self.output, self._direct if self.s3 is not None else None)

    def close(self) -> None:
        actors = self.actors if hasattr(self, "producing") else []
        for actor in actors:
            actor.thaw()
            actor.kill()
        for close in reversed(self._close):
            close()

    def _open_s3(self) -> None:
        server = S3Server("moto").start()
        self._close.append(server.remove)
        proxy = FaultProxy(server.port)
        proxy.__enter__()
        self._close.append(lambda: proxy.__exit__(None, None, None))
        self.s3 = proxy
        self._direct = server.url
        self._endpoint = proxy.url
        self.output = f"s3://{server.new_bucket()}/runs/{RUN}"

    def _group(self, index: int) -> Actor:
        url = self.servers[index].url
        command = [
            "workers",
            "start",
            "--gpu",
            str(index),
            "--server",
            url,
            "--concurrency",
            str(self.kit.bound),
            "--ramp",
            "10000",
            "--grace",
            "1.5",
        ]
        return Actor(
            "group",
            index,
            command=lambda: command,
            folder=self.folder,
            env=self.env,
        )

    def _sink(self, index: int) -> Actor:
        command = [
            "workers",
            "sink",
            "--state-dir",
            str(self.folder / f"state{index}"),
            "--batch-seconds",
            str(BATCH_S[self.kit.store]),
            "--first-batch-seconds",
            "0.2",
            "--poll",
            "0.05",
            "--grace",
            "3",
        ]
        return Actor(
            "sink",
            index,
            command=lambda: command,
            folder=self.folder,
            env=self.env,
        )
