"""All servers of one process, on one event loop."""

import asyncio
import contextlib
import gc
import os
from collections.abc import Callable, Sequence
from functools import partial

import uvloop

from common.stops import stop_signals
from workers.simulator import text
from workers.simulator.control import Control
from workers.simulator.faults import Fault
from workers.simulator.journal import Journal
from workers.simulator.server import SimulatedServer
from workers.simulator.settings import Settings
from workers.simulator.sglang_log import SglangLog
from workers.simulator.wire import Connection


class Simulator:
    """N servers, their log and their control port.

    Attributes:
        servers: The servers, by place.
        control: Carries out faults on them.
        control_port: Where it listens; 0 before `start`.
    """

    def __init__(self, settings: Settings) -> None:
        self.servers: list[SimulatedServer] = []
        self.control = Control(self.servers)
        self.control_port = 0
        self._settings = settings
        self._journal = Journal(settings.log)
        for index in range(len(settings.all_ports)):
            server = SimulatedServer(index, settings, self._journal, self.control.answer)
            self.servers.append(server)
            if settings.sglang_log is not None:
                server.on_listening = SglangLog(settings, settings.sglang_log).attach

    async def start(self) -> None:
        """Listen on all ports.

        Raises:
            OSError: If a port is taken.
        """
        text.warm()
        for server in self.servers:
            await server.start()
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(partial(Connection, self.control), "127.0.0.1", 0)
        self.control_port = listener.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Write what is left of the log; the process is about to end."""
        self._journal.close()


def run(
    settings: Settings,
    faults: Sequence[Fault],
    on_ready: Callable[[Simulator], None],
    *,
    until_eof: bool = False,
) -> int | None:
    """Serve until a signal asks to stop.

    Args:
        settings: How.
        faults: Armed as soon as all servers listen.
        on_ready: Called then.
        until_eof: End also when standard input does: whoever started this has gone.

    Returns:
        Number of the signal that ended it, None when none did.

    Raises:
        OSError: If a port is taken.
    """
    return uvloop.run(_main(settings, faults, on_ready, until_eof=until_eof))


async def _main(
    settings: Settings,
    faults: Sequence[Fault],
    on_ready: Callable[[Simulator], None],
    *,
    until_eof: bool,
) -> int | None:
    simulator = Simulator(settings)
    stop: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, _stop, stop, int(number))
    if until_eof:
        loop.add_reader(0, _stop_at_eof, stop)
    with contextlib.closing(simulator):
        await simulator.start()
        # Requests leave no cycles behind: looking for some at every 700th object costs a tenth.
        gc.freeze()
        gc.set_threshold(100_000, 50, 50)
        for fault in faults:
            simulator.control.arm(fault)
        on_ready(simulator)
        return await stop


def _stop(stop: "asyncio.Future[int | None]", number: int | None) -> None:
    if not stop.done():
        stop.set_result(number)


def _stop_at_eof(stop: "asyncio.Future[int | None]") -> None:
    if not os.read(0, 4096):
        _stop(stop, None)
