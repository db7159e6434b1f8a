"""The control endpoint: arm faults, and look at what the servers have seen.

    POST   /_sim/faults   one fault or a list (see `faults`); 200 with what is armed now
    GET    /_sim/faults   what is armed, by server
    DELETE /_sim/faults   disarm all request faults and revive all servers
    GET    /_sim/state    counts, by server

Every server's port answers it for that server, as long as it lives, whatever key it asks for.
The simulator's own control port answers for all of them, also when they are dead.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from workers.simulator import errors
from workers.simulator.faults import SERVER_KINDS, Fault
from workers.simulator.server import SimulatedServer
from workers.simulator.wire import Connection, Reply, Request


class Control:
    """Carries faults out on the servers of one simulator."""

    def __init__(self, servers: Sequence[SimulatedServer]) -> None:
        self._servers = servers
        self._tasks: set[asyncio.Task[None]] = set()

    # --- over HTTP -------------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        """See `wire.Handler`."""

    def closed(self, connection: Connection) -> None:
        """See `wire.Handler`."""

    def handle(self, connection: Connection, request: Request) -> None:
        """Answer on the control port, for all servers."""
        self.answer(None, connection, request)

    def answer(self, index: int | None, connection: Connection, request: Request) -> None:
        """Answer for the server at `index`; None means all."""
        chosen = self._servers if index is None else [self._servers[index]]
        if request.head.path == "/_sim/state":
            states = [state_of(server) for server in chosen]
            connection.send(_json(states if index is None else states[0]))
            return
        if request.head.path != "/_sim/faults":
            connection.send(errors.NOT_FOUND)
            return
        if request.head.method == "POST":
            try:
                faults = _decode(request.body)
                for fault in faults:
                    self._check(fault)
            except (msgspec.DecodeError, ValueError) as error:
                connection.send(Reply(400, msgspec.json.encode({"error": str(error)})))
                return
            for fault in faults:
                self.arm(fault, index)
        elif request.head.method == "DELETE":
            self.clear(chosen)
        armed = {str(server.index): server.record.faults.armed() for server in chosen}
        connection.send(_json(armed))

    # --- the faults ------------------------------------------------------------------------------

    def arm(self, fault: Fault, index: int | None = None) -> None:
        """Let a fault happen, now or after its `after_s`.

        Args:
            fault: Which; each server that it is for gets its own copy, with its own count.
            index: The server it is for when it does not say so itself; None means all.

        Raises:
            ValueError: If there is no such server.
        """
        self._check(fault)
        place = fault.server if fault.server is not None else index
        for server in self._servers if place is None else [self._servers[place]]:
            own = msgspec.structs.replace(fault)
            self._later(own.after_s, self._begin, server, own)

    def _check(self, fault: Fault) -> None:
        if fault.server is not None and not 0 <= fault.server < len(self._servers):
            raise ValueError(
                f"there is no server {fault.server}, only 0..{len(self._servers) - 1}"
            )

    def clear(self, servers: Sequence[SimulatedServer] | None = None) -> None:
        """Disarm all request faults and revive the servers."""
        for server in self._servers if servers is None else servers:
            server.record.faults.clear()
            self._spawn(server, 0.0)

    def _begin(self, server: SimulatedServer, fault: Fault) -> None:
        kind = fault.kind
        if kind not in SERVER_KINDS:
            server.record.faults.arm(fault)
            return
        if kind == "revive":
            self._spawn(server, fault.starting_s)
            return
        if kind == "die":
            server.die(fault)
        elif kind == "refuse":
            server.refuse()
        elif kind == "slow":
            server.slow(fault.factor)
        else:
            server.set_state(_STATES[kind])
        if fault.for_s is not None:
            self._later(fault.for_s, self._spawn, server, fault.starting_s)

    def _later(self, delay: float, call: Callable[..., None], *arguments: Any) -> None:
        if delay:
            asyncio.get_running_loop().call_later(delay, call, *arguments)
        else:
            call(*arguments)

    def _spawn(self, server: SimulatedServer, starting_s: float) -> None:
        # The loop keeps weak references to tasks only.
        task = asyncio.get_running_loop().create_task(server.revive(starting_s=starting_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


_STATES: dict[str, Any] = {
    "starting": "starting",
    "draining": "draining",
    "hang": "hung",
    "stall": "stalled",
}


def state_of(server: SimulatedServer) -> dict[str, Any]:
    """Give the counts of one server, as /_sim/state shows them."""
    # Whoever has seen a request counted here may kill us next, and look for it in the log.
    server.record.journal.flush()
    tally, serving = server.record.tally, server.serving
    engine = None if serving is None else serving.engine
    return {
        "server": server.index,
        "port": server.record.port,
        "state": server.state,
        "open": tally.open,
        "max_open": tally.max_open,
        "served": tally.served,
        "running": len(engine.running) if engine else 0,
        "queued": len(engine.waiting) if engine else 0,
        "cap": engine.pool.cap if engine else 0,
        "generated_tokens": engine.generated if engine else 0,
        "retractions": engine.retractions if engine else 0,
        "aborted": serving.aborted if serving else 0,
        "connections": server.connection_count,
    }


def _decode(body: bytes) -> list[Fault]:
    many = body.lstrip().startswith(b"[")
    return (
        msgspec.json.decode(body, type=list[Fault])
        if many
        else [msgspec.json.decode(body, type=Fault)]
    )


def _json(value: Any) -> Reply:
    return Reply(200, msgspec.json.encode(value))
