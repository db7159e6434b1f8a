"""Launch one server as its orders say, find what an earlier supervisor left, end it whole."""

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from common.crashpoints import reached
from common.errors import BackendError, UsageError
from workers.client.sglang import SGLangClient
from workers.supervisor import environment
from workers.supervisor.book import Book
from workers.supervisor.draining import drain
from workers.supervisor.orders import Orders
from workers.supervisor.plan import Plan, ServeOptions, plan_launch
from workers.supervisor.processes import LogRoom, ServerProcesses, mark_family, new_mark
from workers.supervisor.server_log import heading

if TYPE_CHECKING:
    from workers.supervisor.records import Wanted

log = logging.getLogger(__name__)

LOOK_S = 0.2
PORT_LIMIT_S = 3.0

_KEPT = frozenset({"starting", "ready"})
"""States in which a server is worth taking over."""


class Launcher:
    """Launches and ends one server.

    Args:
        options: Of its supervisor.
        book: Its record.

    Attributes:
        orders: What is asked of it.
    """

    def __init__(self, options: ServeOptions, book: Book) -> None:
        self._options = options
        self._book = book
        self._room = LogRoom()
        self._family = mark_family(options.state_dir, options.name)
        self._launched = 0
        # The order by which the last server ran that gave a token.
        self._proven: Wanted | None = None
        self.orders = Orders(options.state_dir, options.name, options.flags, book.earlier)

    def client(self, plan: Plan) -> SGLangClient:
        """Make a client of the server."""
        url = f"http://{plan.line.host}:{self._options.port}"
        return SGLangClient(url, slots=1, api_key=self._options.api_key or None)

    async def take_over(self, hurried: Callable[[], bool]) -> ServerProcesses | None:
        """Find what runs of an earlier supervisor: keep what we would launch, else end it.

        Args:
            hurried: Whether somebody does not want to wait.

        Raises:
            BackendError, UsageError: See `end` and `plan`.
        """
        earlier = self._book.earlier
        if earlier is None or not earlier.mark:
            await self._end_unrecorded()
            return None
        found = ServerProcesses.found(earlier.server, earlier.mark, earlier.log_writer)
        if not any(found.members()):
            await self._end_unrecorded()
            return None
        name, pid = self._options.name, found.first.pid
        plan = self.plan()
        if found.alive and earlier.launch == plan.hash and earlier.state in _KEPT:
            log.info("%s: taking over the server that runs (pid %d)", name, pid)
            self._book.tell(started_at=earlier.started_at, restarts=earlier.restarts)
            return found
        why = "was launched otherwise" if found.alive else "has lost its first process"
        log.warning("%s: ending the server of an earlier life (pid %d), which %s", name, pid, why)
        if found.alive and earlier.state == "ready":
            async with self.client(plan) as client:
                await drain(found, client, limit_s=self._options.drain_limit_s, hurried=hurried)
        await self.end(found)
        return None

    async def _end_unrecorded(self) -> None:
        """End what was launched while the disk took no record, and was not ended since."""
        find = functools.partial(ServerProcesses.unrecorded, self._family)
        while (found := await asyncio.to_thread(find)) is not None:
            log.warning(
                "%s: ending a server of an earlier life (pid %d) of which there is no record: was "
                "the disk full?",
                self._options.name,
                found.first.pid,
            )
            await self.end(found)

    def plan(self) -> Plan:
        """Plan the next start; an order that cannot be planned is taken back.

        Raises:
            UsageError: The server cannot be launched as its supervisor was called.
        """
        try:
            return plan_launch(self._options, self.orders.standing)
        except UsageError as error:
            if self.orders.standing is None:
                raise
            self.fall_back(str(error))
            return plan_launch(self._options, self.orders.standing)

    def fall_back(self, why: str) -> None:
        """Take the order back that holds, for the one under which a token came, or for none."""
        before = self._proven if self._proven != self.orders.standing else None
        self.orders.refuse(why, before)
        log.error("%s: what was asked for is taken back: %s", self._options.name, why)

    def proven(self) -> None:
        """Take note that a token has come."""
        self._proven = self.orders.standing
        self._options.key_file.unlink(missing_ok=True)

    async def launch(self, plan: Plan) -> ServerProcesses:
        """Launch the server.

        Raises:
            BackendError: Its port is taken, or the system refuses.
        """
        options = self._options
        await _port_free(plan.line.host, options.port)
        for note in plan.notes:
            log.info("%s: %s", options.name, note)
        mark = new_mark(self._family)
        # Before the server is there: whoever comes after us has to find it, wherever we end.
        self._book.launching(mark, at_s=time.time(), restarts=self._launched)
        try:
            key = environment.key_arguments(options.key_file, options.api_key if plan.key else "")
            processes = ServerProcesses.start(
                (*plan.line.arguments, *key),
                env=plan.environment,
                mark=mark,
                log=options.log,
                room=self._room,
                secret=options.api_key,
                heading=heading(plan.line.arguments, plan.version),
            )
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise BackendError(
                f"{options.name}: the server cannot be launched: {where}{error.strerror or error}"
            ) from error
        reached("server.launched")
        self._launched += 1
        log.info(
            "%s: SGLang %s launched (pid %d), its log is %s",
            options.name,
            plan.version,
            processes.first.pid,
            options.log,
        )
        return processes

    def keep_log(self, processes: ServerProcesses) -> None:
        """See that somebody writes the server's log."""
        try:
            if processes.keep_writer(self._options.log, self._room, self._options.api_key):
                log.warning("%s: who wrote the server's log had died", self._options.name)
                self._book.tell(log_writer=processes.writer)
        except OSError as error:
            log.warning("%s: nobody writes its log: %s", self._options.name, error)

    async def end(self, processes: ServerProcesses) -> None:
        """End all processes of the server.

        Raises:
            BackendError: The kernel keeps some: a second server beside them would find no room.
        """
        left = await asyncio.to_thread(processes.end)
        self._options.key_file.unlink(missing_ok=True)
        if left:
            raise BackendError(
                f"{self._options.name}: the server's processes {', '.join(map(str, left))} do not "
                "end on SIGKILL and may hold the GPU: look at them, then start this again"
            )


async def _port_free(host: str, port: int) -> None:
    """Wait a little for a port: what has just ended may have it still, or a short connection."""
    until_s = time.monotonic() + PORT_LIMIT_S
    while True:
        try:
            environment.refuse_taken_port(host, port)
        except BackendError:
            if time.monotonic() >= until_s:
                raise
            await asyncio.sleep(LOOK_S)
        else:
            return
