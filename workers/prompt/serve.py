"""Serve one prompt: who serves it, and what becomes of it when we ourselves fail at that.

`serve` returns what became of the prompt as a value; it records nothing itself, so that the engine
alone decides what leaves the process. An error of ours while one prompt is served is charged to
that prompt as `internal_error`, so that an odd one ends by itself and not with the process again
and again.
"""

import logging

from common.errors import RedisUnusableError, ServerUnusableError
from common.mishaps import stack_of
from common.models import Params, Result
from workers.client.faults import Kind, Verdict
from workers.client.oddities import Lately
from workers.prompt.job import Open
from workers.prompt.needs import Charger, Needs, Server, SlotHolder, TurnStore
from workers.prompt.outcomes import Returned, failed
from workers.prompt.serving import Serving
from workers.rids import Rids

log = logging.getLogger(__name__)


class Prompter:
    """Serves prompts at one server with one process's ids."""

    def __init__(
        self, server: Server, charger: Charger, rids: Rids, *, turns: TurnStore, slots: SlotHolder
    ) -> None:
        self._needs = Needs(
            server=server, charger=charger, rids=rids, lately=Lately(), turns=turns, slots=slots
        )

    async def serve(self, job: Open, params: Params, timeout_s: float) -> Result | Returned:
        """Make attempts until the prompt has ended or must go back.

        Args:
            job: The claim, whose `rid` is kept up to date for aborts.
            params: Its run's.
            timeout_s: Time limit of one attempt.
        """
        try:
            return await self._serve(job, params, timeout_s)
        except Exception as error:  # noqa: BLE001 - one odd prompt must not end the process
            return await self._stumble(job, params, error)

    async def _serve(self, job: Open, params: Params, timeout_s: float) -> Result | Returned:
        try:
            serving = Serving(self._needs, job, params=params, timeout_s=timeout_s)
        except ServerUnusableError as error:
            return Returned(fault=str(error), config=True)
        except ValueError as error:
            verdict = Verdict(kind=Kind.PROMPT, reason="unreadable", message=str(error))
            return failed(
                job.claim, verdict, attempts=None, server=self._needs.server.origin.server
            )
        return serving.misfit() or await serving.run()

    async def _stumble(self, job: Open, params: Params, error: Exception) -> Result | Returned:
        """Charge an attempt for an error of ours; the last one is the prompt's end."""
        kind, claim = type(error).__name__, job.claim
        log.error(
            "serving key %s of run %s failed by an error of ours, %s:\n%s",
            claim.key.hex(),
            claim.run,
            kind,
            stack_of(error),
        )
        verdict = Verdict(
            kind=Kind.ANSWER,
            reason="internal_error",
            message=f"{kind} in Headrace; the worker group's log says where",
        )
        try:
            charged = await self._needs.charger.charge(claim, verdict.reason, before=None)
        except RedisUnusableError:
            return Returned()
        if charged < params.attempts:
            return Returned()
        return failed(claim, verdict, attempts=charged, server=self._needs.server.origin.server)
