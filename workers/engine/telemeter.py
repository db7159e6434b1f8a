"""Follow the server's log, and put a sample of everything into Redis every few seconds.

Nothing waits for any of it: a Redis that is away or full takes no sample (they are counted), and a
log that cannot be read leaves the server's pages.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

from common.crashpoints import reached
from common.errors import RedisUnusableError
from common.group_figures import GroupFigures
from common.mishaps import stack_of
from common.telemetry import Sample, ServerCounters, sample_of
from workers.engine.core import Core
from workers.engine.desk import RedisDesk
from workers.servers.log_tail import LogTail

log = logging.getLogger(__name__)

LOOKS = 10
"""How often it is looked which runs are served, between two samples."""


class Telemeter:
    """The telemetry of one process.

    Args:
        core: What is told of.
        figures: Gives what is published.

    Attributes:
        dropped: Samples that Redis did not take.
    """

    def __init__(self, core: Core, figures: Callable[[], GroupFigures]) -> None:
        self.dropped = 0
        self._core = core
        self._figures = figures
        self._tail = LogTail(core.options.find_log)
        self._reading = RedisDesk("log")
        self._sampling = RedisDesk("telemetry")
        # uid of each run of which a prompt was held since the last sample; those that were before,
        # when there were any; and what was completed by the last sample.
        self._served: set[str] = set()
        self._last: set[str] = set()
        self._completed = 0
        self._failed = False

    async def run(self) -> None:
        """Follow and sample for ever."""
        try:
            await asyncio.gather(self._follow(), self._sample())
        finally:
            self._reading.close()
            self._sampling.close()

    async def _follow(self) -> None:
        while True:
            with self._harmless():
                noted = await self._reading.ask(self._tail.read)
                self._core.watch.telemetry.note_log(noted, time.monotonic())
            await asyncio.sleep(self._core.timing.load_every_s)

    async def _sample(self) -> None:
        while True:
            for _ in range(LOOKS):
                self._look()
                await asyncio.sleep(self._core.timing.sample_every_s / LOOKS)
            with self._harmless():
                sample = self._made()
                taken = await self._sampling.ask(partial(self._add, sample))
                self.dropped += not taken

    def _look(self) -> None:
        holdings = self._core.holdings
        self._served.update(job.claim.uid for job in holdings.open.values())
        self._served.update(ready.claim.uid for ready in holdings.ready.values())
        self._served.update(result.uid for result in holdings.unsent.values())

    def _made(self) -> Sample:
        self._look()
        figures = self._figures()
        # Quick answers may all come and go between two looks.
        served = self._served or (self._last if figures.completed > self._completed else set())
        self._served, self._last, self._completed = set(), served or self._last, figures.completed
        runs = dict.fromkeys(served, 0)
        for job in self._core.holdings.open.values():
            runs[job.claim.uid] = runs.get(job.claim.uid, 0) + 1
        now = self._core.watch.telemetry.figures(time.monotonic())
        counters = ServerCounters(
            gen_tokens_total=now.load.gen_tokens_total,
            prompt_tokens_total=now.load.prompt_tokens_total,
            cached_tokens_total=now.load.cached_tokens_total,
            retracted_total=now.load.retracted_total,
            prefill_tokens_per_s=now.prefill_tokens_per_s,
            counted_by=now.load.counted_by,
        )
        return sample_of(figures, counters, runs=runs, dropped=self.dropped)

    def _add(self, sample: Sample) -> bool:
        """Give Redis a sample, in the desk's thread; whatever it says, nobody is told."""
        try:
            self._core.groups.samples.add(self._core.jobs.group, sample)
        except RedisUnusableError:
            return False
        reached("sample.kept")
        return True

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """Let no fault of telemetry's own end what serves prompts; it is told once."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is
            if not self._failed:
                self._failed = True
                where = stack_of(error)
                log.error("telemetry has a fault of ours here:\n%s", where)  # noqa: TRY400 - no text
