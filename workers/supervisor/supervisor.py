"""Run one SGLang server for as long as it is wanted: launch it, watch it, end it, launch it anew.

    starting    launched; refused, 503 or warming up: no token yet
    ready       a real token came
    draining    asked to end: an order, a limit of memory, our own end
    down        it died, or nothing moved and no token came; the next one is coming
    failed      it does not start, and another try would only repeat that
    stopped     we were told to end, and it has

`ServerWatch` judges, as in a worker group, so that both mean the same by a server that hangs. Here
it looks also while nothing is open: then a token is asked for every half minute.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from enum import Enum
from typing import NamedTuple

from common.errors import HeadraceError, ServerUnusableError
from workers.client.sglang import SGLangClient
from workers.servers.watch import ServerWatch
from workers.stop_request import StopRequest
from workers.supervisor.book import Book
from workers.supervisor.draining import drain
from workers.supervisor.emptying import Emptying
from workers.supervisor.got import got
from workers.supervisor.last_words import LastWords, last_words
from workers.supervisor.launching import Launcher
from workers.supervisor.plan import Plan, ServeOptions
from workers.supervisor.processes import ServerProcesses
from workers.supervisor.restarts import Restarts
from workers.supervisor.server_log import since_start

log = logging.getLogger(__name__)

LOOK_S = 0.2
SELDOM_S = 15.0
"""Between two looks at memory and at who writes the log."""

LEAST_DRAIN_S = 15.0
"""What an emptied server gets to end by itself: it looks every 5 s whether it may."""


class End(Enum):
    """Why one start of the server is over."""

    STOP = "told to stop"
    LEFT = "whoever started this supervisor is gone"
    ORDER = "asked to launch it anew"
    RECYCLE = "its memory is over the limit"
    DIED = "it died"
    HUNG = "it hangs"
    LATE = "no token within the start limit"
    UNUSABLE = "it refuses us"


_PLANNED = {End.STOP, End.ORDER, End.RECYCLE}


class _Watched(NamedTuple):
    hung: asyncio.Event
    task: "asyncio.Task[None]"


class Supervisor:
    """Supervises one server. One task; `run` is called once.

    Args:
        options: What it is told.
        stop: Whether it is to end.
        emptying: Tells its worker groups before it is ended on purpose.
    """

    def __init__(self, options: ServeOptions, stop: StopRequest, emptying: Emptying) -> None:
        self._options = options
        self._stop = stop
        self._emptying = emptying
        self._restarts = Restarts()
        self._book = Book(options)
        self._launcher = Launcher(options, self._book)
        self._began_s = 0.0
        self._ready_s: float | None = None
        self._why = ""

    async def run(self) -> None:
        """Supervise until told to stop.

        Raises:
            ServerUnusableError: The server does not start, or refuses us.
            BackendError: Somebody else listens on its port.
            UsageError: It cannot be launched as asked.
        """
        try:
            processes = await self._launcher.take_over(self._stop.hurried.is_set)
            while not self._stop.asked.is_set():
                end = await self._one_start(processes)
                processes = None
                if end is End.LEFT:
                    log.warning(
                        "%s: %s; the server runs on for the next one",
                        self._options.name,
                        end.value,
                    )
                    return
        except HeadraceError as error:
            self._book.tell("failed", str(error), server=None)
            raise
        self._book.tell("stopped", "", server=None)

    # --- one start -------------------------------------------------------------------------------

    async def _one_start(self, processes: ServerProcesses | None) -> End:
        plan = self._launcher.plan()
        if processes is None:
            processes = await self._launcher.launch(plan)
        self._began_s, self._ready_s = time.monotonic(), None
        self._book.started(plan, processes, self._launcher.orders)
        async with self._launcher.client(plan) as client:
            watch = ServerWatch(
                client, on_change=lambda: None, timing=self._options.timing, always=True
            )
            async with self._watching(watch) as hung:
                end = await self._until_end(processes, plan, watch, hung)
            return await self._finish(end, processes, watch, client)

    @contextlib.asynccontextmanager
    async def _watching(self, watch: ServerWatch) -> AsyncIterator[_Watched]:
        hung = asyncio.Event()
        task = asyncio.create_task(watch.run(hung.set), name="watch")
        try:
            yield _Watched(hung, task)
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _until_end(
        self, processes: ServerProcesses, plan: Plan, watch: ServerWatch, watched: _Watched
    ) -> End:
        seldom_s = time.monotonic()
        while True:
            end = self._end_now(processes, watched)
            if end is not None:
                return end
            if watch.ready and self._ready_s is None:
                self._note_ready(plan, watch)
            if time.monotonic() - seldom_s >= SELDOM_S:
                seldom_s = time.monotonic()
                self._launcher.keep_log(processes)
                if await self._too_large(processes):
                    return End.RECYCLE
            await asyncio.sleep(LOOK_S)

    def _end_now(self, processes: ServerProcesses, watched: _Watched) -> End | None:
        """Say why this start is over; None while it is not."""
        asked = self._asked()
        if asked is not None:
            return asked
        if not processes.alive:
            return End.DIED
        if watched.hung.is_set():
            return End.HUNG
        limit_s = self._options.start_limit_s
        if self._ready_s is None and limit_s and time.monotonic() - self._began_s > limit_s:
            return End.LATE
        if not watched.task.done():
            return None
        error = watched.task.exception()
        if not isinstance(error, ServerUnusableError):
            raise error or RuntimeError("the watch of the server has ended")
        self._why = str(error)
        return End.UNUSABLE

    def _asked(self) -> End | None:
        """Say what is asked of us now; None for nothing."""
        if self._stop.asked.is_set():
            return End.STOP
        parent = self._options.parent_pid
        if parent is not None and os.getppid() != parent:
            return End.LEFT
        orders = self._launcher.orders
        order = orders.next()
        if order is None:
            return None
        if orders.take(order):
            return End.ORDER
        self._book.tell(serial=orders.serial, refused=orders.refused)
        return None

    def _note_ready(self, plan: Plan, watch: ServerWatch) -> None:
        options = self._options
        self._ready_s = time.monotonic()
        self._restarts.ready()
        self._launcher.proven()
        found = got(
            watch.identity,
            since_start(options.log),
            version=plan.version,
            strategy=plan.strategy,
            shape=plan.shape,
        )
        self._book.ready(found)
        log.info("%s is ready: %s", options.name, found.line)
        if found.advice:
            log.info("%s: %s", options.name, found.advice)

    async def _too_large(self, processes: ServerProcesses) -> bool:
        limit = self._options.rss_limit_bytes
        if limit is None or self._ready_s is None:
            return False
        used = await asyncio.to_thread(processes.rss_bytes)
        if used > limit:
            log.warning(
                "%s: the server's processes hold %.1f GB of memory, more than --rss-limit %.1f GB",
                self._options.name, used / 1e9, limit / 1e9,
            )  # fmt: skip
        return used > limit

    # --- its end ---------------------------------------------------------------------------------

    async def _finish(
        self, end: End, processes: ServerProcesses, watch: ServerWatch, client: SGLangClient
    ) -> End:
        """End what is left of a start, and see to it that the next one may begin."""
        if end is End.LEFT:
            return end
        name = self._options.name
        if end in _PLANNED:
            self._book.tell("draining", end.value)
            log.info("%s: draining: %s", name, end.value)
            if self._ready_s is not None:
                await self._drain(end, processes, watch, client)
            await self._launcher.end(processes)
            await self._emptying.lift()
            if end is End.ORDER:
                self._restarts = Restarts()
            return end
        self._book.tell("down", watch.detail if end is End.HUNG else end.value)
        await self._launcher.end(processes)
        if end is End.UNUSABLE:
            raise ServerUnusableError(f"{name}: {self._why}")
        return await self._after_fault(self._words(end, processes, watch)) or end

    async def _drain(
        self, end: End, processes: ServerProcesses, watch: ServerWatch, client: SGLangClient
    ) -> None:
        limit_s, hurried = self._options.drain_limit_s, self._stop.hurried.is_set
        began_s = time.monotonic()
        await self._emptying.empty(end.value, limit_s=limit_s, hurried=hurried, quiet=watch.quiet)
        left_s = max(LEAST_DRAIN_S, limit_s - (time.monotonic() - began_s))
        why = await drain(processes, client, limit_s=min(limit_s, left_s), hurried=hurried)
        if why:
            log.warning("%s: ending the server at once: %s", self._options.name, why)

    def _words(self, end: End, processes: ServerProcesses, watch: ServerWatch) -> LastWords:
        if end is End.HUNG:
            return LastWords(f"it hung: {watch.detail}")
        if end is End.LATE:
            return LastWords(f"no token within {self._options.start_limit_s:g} s (--start-limit)")
        return last_words(since_start(self._options.log), processes.exit_code)

    async def _after_fault(self, words: LastWords) -> End | None:
        """Wait until the next start is due, or something is asked: that is given back.

        Raises:
            ServerUnusableError: None would do better.
        """
        ready_s = None if self._ready_s is None else time.monotonic() - self._ready_s
        verdict = self._restarts.ended(words, ready_s=ready_s)
        name = self._options.name
        if verdict.wait_s is None:
            if self._launcher.orders.standing is None:
                raise ServerUnusableError(
                    f"{name}: {verdict.text}; its log is {self._options.log}"
                )
            self._launcher.fall_back(verdict.text)
            self._restarts = Restarts()
            return None
        self._book.tell("down", words.text)
        log.warning("%s: %s; starting it again in %.0f s", name, words.text, verdict.wait_s)
        until_s = time.monotonic() + verdict.wait_s
        while time.monotonic() < until_s:
            asked = self._asked()
            if asked is End.ORDER:
                self._restarts = Restarts()
            if asked is not None:
                return asked
            await asyncio.sleep(LOOK_S)
        return None
