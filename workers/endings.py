"""Decide where a job goes that leaves its slot: to the finisher, back to its queue, or nowhere.

    a result                     to the finisher
    it goes back (server fault)  to its queue, with a server death where the server died with it
    the server hangs             as if it had died; a suspect that was tried alone is convicted
    lost (ended elsewhere)       nowhere: its request is aborted
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from common.models import Claim, Result
from workers.aborts import abort_all
from workers.faults import Kind, Verdict
from workers.finisher import Finisher
from workers.holdings import Holdings, JobKey, Open
from workers.returns import Returns
from workers.serve import Returned, convicts, failed, poison
from workers.sglang import SGLangClient

Spawn = Callable[[Coroutine[Any, Any, object]], "asyncio.Task[Any]"]


class Endings:
    """What becomes of the jobs of one process.

    Args:
        client: Of the server, for aborts.
        holdings, finisher, returns: Where jobs are, and where they go.
        spawn: Starts a task that nobody waits for.
    """

    def __init__(
        self,
        client: SGLangClient,
        holdings: Holdings,
        *,
        finisher: Finisher,
        returns: Returns,
        spawn: Spawn,
    ) -> None:
        self._client = client
        self._holdings = holdings
        self._finisher = finisher
        self._returns = returns
        self._spawn = spawn

    def settle(self, job: Open, ended: Result | Returned) -> None:
        """Pass on a job that has been served, by what became of it."""
        if isinstance(ended, Result):
            self._finisher.add(ended)
        else:
            self._returns.add(job.key, died=ended.died)

    def hang(self) -> None:
        """Nothing moves at the server: give back everything that is open there."""
        jobs = list(self._holdings.open.values())
        self._abort(jobs)
        for job in jobs:
            if job.rid and convicts(job):
                self._finisher.add(poison(job.claim, server=self._client.url))
            else:
                self._returns.add(job.key, died=bool(job.rid))
            _cancel(job)
        self._returns.add_ready()

    def stop(self, job: Open) -> None:
        """Take a job out of its slot, uncharged; its request is the caller's to abort."""
        self._returns.add(job.key, died=False)
        _cancel(job)

    def lose(self, key: JobKey) -> None:
        """The job has ended elsewhere, or its run was cancelled: stop working on it."""
        job = self._holdings.open.get(key)
        if job is None:
            self._holdings.drop_ready(key)
            return
        self._abort([job])
        _cancel(job)

    def convict(self, claim: Claim) -> None:
        """Worker processes died with this prompt, the last time while it was tried alone."""
        verdict = Verdict(
            kind=Kind.PROMPT,
            reason="poison_worker",
            message="worker processes died with it, the last time alone",
        )
        self._finisher.add(failed(claim, verdict, attempts=None, server=self._client.url))

    def _abort(self, jobs: Iterable[Open]) -> None:
        """Abort requests in passing: nobody waits, and a server that is gone has none."""
        rids = [job.rid for job in jobs if job.rid]
        if rids:
            self._spawn(abort_all(self._client, rids))


def _cancel(job: Open) -> None:
    if job.task is not None:
        job.task.cancel()
