"""One simulated server: its port, its routes, and the states that it can be in."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial

from workers.simulator.faults import Fault
from workers.simulator.journal import Journal
from workers.simulator.record import ServerRecord
from workers.simulator.routes import Routes, State
from workers.simulator.serving import Serving
from workers.simulator.settings import Settings
from workers.simulator.wire import Connection, Request

_SWEEP_S = 0.25


class SimulatedServer:
    """One port that behaves as one SGLang server.

    Attributes:
        index: Its place among the servers of this simulator, from 0.
        record: Its port, armed faults and counts.
        state: What it is doing.
        serving: Its requests; None while it is dead.
        on_listening: Called whenever it has come up with an empty engine.
    """

    def __init__(
        self,
        index: int,
        settings: Settings,
        journal: Journal,
        control: Callable[[int, Connection, Request], None],
    ) -> None:
        self.index = index
        self.record = ServerRecord(settings.all_ports[index], journal)
        self.state: State = "dead"
        self.serving: Serving | None = None
        self.on_listening: Callable[[SimulatedServer], None] | None = None
        self._settings = settings
        self._connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._reviving = asyncio.Lock()
        self._routes = Routes(settings, partial(control, index))

    # --- life ------------------------------------------------------------------------------------

    async def start(self, *, state: State = "ready") -> None:
        """Listen, with an empty engine."""
        self.serving = Serving(self._settings, self.record, self.die)
        await self._listen()
        self.slow(1.0)
        self.record.journal.start(port=self.record.port, cap=self.serving.engine.pool.cap)
        self.set_state(state)
        if self._sweeper is None:
            self._sweep()
        if self.on_listening is not None:
            self.on_listening(self)

    async def _listen(self) -> None:
        if self._listener is not None:
            return
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", self.record.port))
        except OSError as error:
            listener.close()
            raise OSError(error.errno, f"port {self.record.port}: {error.strerror}") from error
        self.record.port = listener.getsockname()[1]
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            partial(Connection, self), sock=listener, backlog=4096
        )

    def set_state(self, state: State) -> None:
        """Change what the server does with requests; `dead` and `refusing` have own methods."""
        self.state = state
        if self.serving is not None:
            self.serving.engine.freeze(frozen=state in {"starting", "hung", "stalled"})

    def die(self, fault: Fault) -> None:
        """Close the port at once and reset every connection, after `linger_s` of silence."""
        if self.serving is None:
            return
        if fault.exit:
            self.serving.die()
            self.record.journal.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        self.state = "dead"
        self._unlisten()
        self.serving.engine.stop()
        serving, self.serving = self.serving, None
        connections = list(self._connections)
        if fault.linger_s:
            loop = asyncio.get_running_loop()
            loop.call_later(fault.linger_s, _drop, serving, connections)
        else:
            _drop(serving, connections)

    def slow(self, factor: float) -> None:
        """Run at this share of the pace that the server was started with."""
        if self.serving is not None:
            self.serving.engine.set_factor(factor * self._settings.slow.get(self.index, 1.0))

    @property
    def connection_count(self) -> int:
        """Connections open now, idle ones included."""
        return len(self._connections)

    def refuse(self) -> None:
        """Take no new connections; what is open goes on to its answer."""
        self.state = "refusing"
        self._unlisten()
        for connection in list(self._connections):
            connection.close_after = True
            if not connection.busy:
                connection.close()

    async def revive(self, *, starting_s: float = 0.0) -> None:
        """Come back from any state, a dead server with an empty engine."""
        async with self._reviving:
            await self._revive(starting_s)

    async def _revive(self, starting_s: float) -> None:
        if self.serving is None:
            await self.start(state="starting" if starting_s else "ready")
            if starting_s:
                loop = asyncio.get_running_loop()
                loop.call_later(starting_s, self._started)
            return
        await self._listen()
        self.slow(1.0)
        self.set_state("ready")

    def _started(self) -> None:
        if self.state == "starting":
            self.set_state("ready")

    def _unlisten(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _sweep(self) -> None:
        """Close connections that have been idle for too long, as uvicorn does."""
        self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)
        oldest = time.monotonic() - self._settings.keep_alive_s
        for connection in [each for each in self._connections if not each.busy]:
            if connection.idle_since < oldest:
                connection.close()

    # --- connections -----------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        """See `wire.Handler`."""
        self._connections.add(connection)

    def closed(self, connection: Connection) -> None:
        """See `wire.Handler`."""
        self._connections.discard(connection)
        if self.serving is not None:
            self.serving.left(connection)

    def handle(self, connection: Connection, request: Request) -> None:
        """See `wire.Handler`."""
        serving = self.serving
        if serving is not None:
            self._routes.answer(connection, request, serving, self.state)


def _drop(serving: Serving, connections: list[Connection]) -> None:
    serving.die()
    for connection in connections:
        connection.reset()
