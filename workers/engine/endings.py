"""Decide where a job goes that leaves its slot: to the finisher, back to its queue, or nowhere.

a result                     to the finisher
it goes back (server fault)  to its queue, with a server death where the server died with it
the server hangs             as if it had died
it dies again, with it alone to the finisher, as poison
lost (ended elsewhere)       nowhere: its request is aborted
"""

from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from common.models import Claim, Result
from workers.client.faults import Kind, Verdict
from workers.engine.aborts import abort_all
from workers.engine.core import Core
from workers.engine.finisher import Finisher
from workers.engine.returns import Returns
from workers.prompt.job import JobKey, Open, Ready, same_try
from workers.prompt.outcomes import Returned, convicts, failed, poison

if TYPE_CHECKING:
    import asyncio

Spawn = Callable[[Coroutine[Any, Any, object]], "asyncio.Task[Any]"]


class Endings:
    """What becomes of the jobs of one process.

    Args:
        core: Whose jobs.
        finisher, returns: Where they go.
        spawn: Starts a task that nobody waits for.
    """

    def __init__(self, core: Core, *, finisher: Finisher, returns: Returns, spawn: Spawn) -> None:
        self._client = core.client
        self._stop = core.stop
        self._draining = core.draining
        self._holdings = core.holdings
        self._eligible = core.eligible
        self._finisher = finisher
        self._returns = returns
        self._spawn = spawn

    def settle(self, job: Open, ended: Result | Returned) -> None:
        """Pass on a job that has been served, by what became of it."""
        if isinstance(ended, Result):
            # It may have come while the job was on its way back: then it need not go there.
            self._holdings.returning.pop(job.key, None)
            self._finisher.add(ended)
        elif not job.leaving:
            self._give_back(job, died=ended.died)

    def hang(self) -> None:
        """Nothing moves at the server: give back everything that is open there."""
        jobs = list(self._holdings.open.values())
        for job in jobs:
            self._give_back(job, died=bool(job.rid))
        self._leave(jobs)
        self._returns.add_ready()

    def stop(self, jobs: Iterable[Open]) -> None:
        """Take jobs out of their slots and give them back, uncharged."""
        jobs = list(jobs)
        for job in jobs:
            self._returns.add(job.key, died=False)
        self._leave(jobs)

    def lose(self, key: JobKey) -> None:
        """The job has ended elsewhere, or its run was cancelled: stop working on it."""
        job = self._holdings.open.get(key)
        if job is None:
            self._holdings.drop_ready(key)
        else:
            self._leave([job])

    def lose_strangers(self) -> None:
        """Let go of jobs whose run was made anew: a renewal would lease the new run's to us."""
        claims = [job.claim for job in self._holdings.open.values()]
        claims += [ready.claim for ready in self._holdings.ready.values()]
        for claim in claims:
            record = self._eligible.record(claim.run)
            if record is not None and record.uid != claim.uid:
                self.lose((claim.run, claim.key))

    def admit(self, ready: Ready) -> None:
        """Take a claimed job over; an earlier try of it, or an older run's, is let go of."""
        held = self._holdings.held(ready.key)
        if held is not None and not same_try(held, ready.claim):
            self.lose(ready.key)
        self._holdings.add_ready(ready)

    def convict(self, claim: Claim) -> None:
        """Worker processes died with this prompt, the last time while it was tried alone."""
        verdict = Verdict(
            kind=Kind.PROMPT,
            reason="poison_worker",
            message="worker processes died with it, the last time alone",
        )
        self._finisher.add(failed(claim, verdict, attempts=None, server=self._client.url))

    def _give_back(self, job: Open, *, died: bool) -> None:
        # Whoever stops us may have stopped the server too, and whoever drains the server stops it:
        # that says nothing of its prompts.
        died = died and not self._stop.asked.is_set() and not self._draining.stands
        if died and convicts(job):
            self._finisher.add(poison(job, server=self._client.url))
        else:
            self._returns.add(job.key, died=died)

    def _leave(self, jobs: list[Open]) -> None:
        for job in jobs:
            self._holdings.leave(job)
        if jobs:
            self._spawn(self._end_requests(jobs))

    async def _end_requests(self, jobs: list[Open]) -> None:
        """Abort requests, then close their connections: a server has died of the other order."""
        await abort_all(self._client, [job.rid for job in jobs if job.rid])
        for job in jobs:
            if job.task is not None:
                job.task.cancel()
