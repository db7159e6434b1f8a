"""Serve one prompt: attempt after attempt until it has ended or goes back (protocol.md §4).

`serve` returns what became of the prompt as a value; it records nothing itself, so that the engine
alone decides what leaves the process.
"""

import asyncio
import datetime
import random
import time
from typing import Protocol

import msgspec

from common.errors import RedisUnusableError, ServerUnusableError
from common.models import Claim, Params, Result
from workers.clamp import clamped_request
from workers.faults import AttemptError, Kind, ServerAnswer, Verdict, after_probe, classify, wait_s
from workers.holdings import Open
from workers.rids import Rids
from workers.requests import RawPrompt, Request, build_request, read_prompt
from workers.rows import (
    Completion,
    Failure,
    Origin,
    RowTooLargeError,
    completion_row,
    failure_row,
)

ATTEMPT_PAUSE_S = 0.2
"""Between a charged attempt and the next, so that a quick fault does not spin."""


class Returned(msgspec.Struct, frozen=True):
    """The prompt goes back to its queue, uncharged.

    Attributes:
        died: The server died with it.
        fault: What is wrong with the server, for people; empty when nothing is.
        config: The fault is one of configuration: stop claiming and say so.
    """

    died: bool = False
    fault: str = ""
    config: bool = False


class Server(Protocol):
    """What serving a prompt needs of its server; `workers.watch` gives it."""

    @property
    def origin(self) -> Origin:
        """What result rows say of where they came from."""

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and answer together, None when the server does not say."""

    async def generate(
        self, request: Request, deadline_s: float, *, fresh: bool = False
    ) -> ServerAnswer:
        """Send a request, if so told on a fresh connection; raises `AttemptError`."""

    async def alive(self) -> bool:
        """Ask for one token; True when it came."""

    def ask_for_rest(self, rest_s: float) -> None:
        """Take note that the server wants to be left alone for so long."""

    def rest_s(self) -> float:
        """How much of that is left."""


class Charger(Protocol):
    """Charges attempts durably."""

    async def charge(self, claim: Claim, reason: str, *, before: int) -> int:
        """Count an attempt in Redis, `before` being those so far; returns how many this try has."""


class Prompter:
    """Serves prompts at one server with one process's ids."""

    def __init__(self, server: Server, charger: Charger, rids: Rids) -> None:
        self._server = server
        self._charger = charger
        self._rids = rids

    async def serve(self, job: Open, params: Params, timeout_s: float) -> Result | Returned:
        """Make attempts until the prompt has ended or must go back.

        Args:
            job: The claim, whose `rid` is kept up to date for aborts.
            params: Its run's.
            timeout_s: Time limit of one attempt.
        """
        claim = job.claim
        try:
            prompt = read_prompt(claim.prompt)
            request = self._build(job, prompt, params)
        except ServerUnusableError as error:
            return Returned(fault=str(error), config=True)
        except ValueError as error:
            return self._failed(
                claim, Verdict(kind=Kind.PROMPT, reason="unreadable", message=str(error))
            )
        attempts, refusals = claim.attempts, 0
        while True:
            job.rid = request.rid
            outcome = await self._attempt(request, timeout_s, fresh=job.alone)
            verdict = await self._settle(classify(request, outcome), outcome)
            job.rid = ""
            if verdict.kind is Kind.COMPLETED:
                return self._completed(claim, attempts, prompt, request, verdict, outcome)
            if job.leaving:
                # Aborted by us: whoever did it has said what becomes of the job.
                return Returned()
            smaller = self._clamped(job, request, outcome)
            if smaller is not None:
                request = smaller
                continue
            if verdict.kind in {Kind.SERVER, Kind.CONFIG}:
                return self._gone(job, verdict)
            if verdict.kind is Kind.PROMPT:
                return self._failed(claim, verdict, attempts + 1)
            if verdict.kind is Kind.LOAD:
                refusals += 1
                await self._rest(job, verdict, refusals)
            elif verdict.kind is Kind.ANSWER:
                attempts = await self._charge(claim, attempts, verdict)
                if attempts >= params.attempts:
                    return self._failed(claim, verdict, attempts)
                await asyncio.sleep(ATTEMPT_PAUSE_S)
            request = self._build(job, prompt, params)

    async def _rest(self, job: Open, verdict: Verdict, refusals: int) -> None:
        """Wait after a refusal: as long as the server asks every one of us to, else longer each time."""
        job.resting = True
        jitter = random.random()  # noqa: S311 - spreading, not secrecy
        if verdict.retry_after_s is not None:
            self._server.ask_for_rest(verdict.retry_after_s)
        await asyncio.sleep(wait_s(verdict, refusals=refusals, jitter=jitter))
        while (left_s := self._server.rest_s()) > 0:
            await asyncio.sleep(left_s * (1 + jitter / 4))
        job.resting = False

    def _build(self, job: Open, prompt: RawPrompt, params: Params) -> Request:
        return build_request(
            prompt,
            params,
            model=self._server.origin.model,
            rid=self._rids.next(job.slot),
            context_length=self._server.context_length,
        )

    async def _attempt(
        self, request: Request, timeout_s: float, *, fresh: bool
    ) -> ServerAnswer | AttemptError:
        try:
            return await self._server.generate(request, timeout_s, fresh=fresh)
        except AttemptError as error:
            return error

    async def _settle(self, verdict: Verdict, outcome: ServerAnswer | AttemptError) -> Verdict:
        """Ask the server for a token where the verdict depends on it.

        A status that reads as configuration is this prompt's own when others are served: without
        that question one odd prompt would stop the whole group for ever.
        """
        if verdict.kind is Kind.PROBE:
            return after_probe(verdict, alive=await self._server.alive())
        if verdict.kind is Kind.CONFIG and isinstance(outcome, ServerAnswer):
            if await self._server.alive():
                return msgspec.structs.replace(verdict, kind=Kind.ANSWER)
        return verdict

    async def _charge(self, claim: Claim, attempts: int, verdict: Verdict) -> int:
        try:
            return max(
                attempts + 1, await self._charger.charge(claim, verdict.reason, before=attempts)
            )
        except RedisUnusableError:
            # Redis is away: counted here, so that this process does not try for ever.
            return attempts + 1

    def _clamped(
        self, job: Open, request: Request, outcome: ServerAnswer | AttemptError
    ) -> Request | None:
        if not isinstance(outcome, ServerAnswer):
            return None
        return clamped_request(
            request, outcome.status, outcome.body, rid=self._rids.next(job.slot)
        )

    def _gone(self, job: Open, verdict: Verdict) -> Result | Returned:
        if verdict.kind is Kind.CONFIG:
            return Returned(fault=f"{verdict.reason} (HTTP {verdict.status})", config=True)
        reached = verdict.reason != "refused"
        if reached and convicts(job):
            return poison(job.claim, server=self._server.origin.server)
        return Returned(died=reached, fault=verdict.reason)

    def _completed(
        self,
        claim: Claim,
        attempts: int,
        prompt: RawPrompt,
        request: Request,
        verdict: Verdict,
        outcome: ServerAnswer | AttemptError,
    ) -> Result:
        if verdict.answer is None or not isinstance(outcome, ServerAnswer):
            raise AssertionError("a completion has an answer")
        claim = msgspec.structs.replace(claim, attempts=attempts)
        done = Completion(
            request=request,
            answer=verdict.answer,
            origin=self._server.origin,
            flags=verdict.flags,
            latency_s=outcome.latency_s,
            completed_at=utc_now(),
        )
        try:
            row = completion_row(claim, prompt, done)
        except RowTooLargeError as error:
            too_large = Verdict(kind=Kind.PROMPT, reason="too_large", message=str(error))
            return self._failed(claim, too_large, attempts + 1)
        return Result(
            run=claim.run,
            uid=claim.uid,
            key=claim.key,
            fingerprint=claim.fingerprint,
            try_=claim.try_,
            outcome="completed",
            row=row,
            input_tokens=verdict.answer.usage.prompt_tokens,
            output_tokens=verdict.answer.usage.completion_tokens,
            flags=verdict.flags,
        )

    def _failed(self, claim: Claim, verdict: Verdict, attempts: int | None = None) -> Result:
        return failed(claim, verdict, attempts=attempts, server=self._server.origin.server)


def convicts(job: Open) -> bool:
    """Whether a death of the server is this prompt's: alone there, after deaths with others."""
    return job.alone and job.claim.deaths >= 1


def poison(claim: Claim, *, server: str) -> Result:
    """Make the failure of a prompt with which the server died while it was alone there."""
    verdict = Verdict(kind=Kind.PROMPT, reason="poison", message="the server died with it, alone")
    return failed(claim, verdict, attempts=None, server=server)


def failed(claim: Claim, verdict: Verdict, *, attempts: int | None, server: str) -> Result:
    """Make the failure of a prompt from the verdict on its last attempt."""
    failure = Failure(
        reason=verdict.reason,
        status=verdict.status,
        message=verdict.message,
        server=server,
        attempts=claim.attempts if attempts is None else attempts,
        failed_at=utc_now(),
    )
    return Result(
        run=claim.run,
        uid=claim.uid,
        key=claim.key,
        fingerprint=claim.fingerprint,
        try_=claim.try_,
        outcome="failed",
        row=failure_row(claim, failure),
        reason=verdict.reason,
    )


def utc_now() -> str:
    """Give the wall time as ISO 8601 in UTC, to the millisecond."""
    seconds = time.time()
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
