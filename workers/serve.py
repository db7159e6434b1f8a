"""Serve one prompt: attempt after attempt until it has ended or goes back (protocol.md §4).

`serve` returns what became of the prompt as a value; it records nothing itself, so that the engine
alone decides what leaves the process.
"""

import asyncio
import datetime as dt
import random
import time
from typing import Protocol

import msgspec

from common.errors import RedisUnusableError, ServerUnusableError
from common.models import Claim, Params, Result
from workers.answers import Answer
from workers.clamp import clamped_request
from workers.faults import AttemptError, Kind, ServerAnswer, Verdict, after_probe, classify, wait_s
from workers.holdings import Open
from workers.oddities import Lately
from workers.requests import Request, build_request, read_prompt
from workers.rids import Rids
from workers.rows import (
    Completion,
    Failure,
    Origin,
    RowTooLargeError,
    completion_row,
    failure_row,
)
from workers.token_ids import lacking

ATTEMPT_PAUSE_S = 0.2
"""Between a charged attempt and the next, so that a quick fault does not spin."""


class Returned(msgspec.Struct, frozen=True):
    """The prompt goes back to its queue, uncharged.

    Attributes:
        died: The server died with it.
        fault: What is wrong with the server, for people; empty when nothing is.
        config: The fault is one of configuration: stop claiming and say so.
        misfit: Why this server can serve no more of the prompt's run; empty as a rule.
    """

    died: bool = False
    fault: str = ""
    config: bool = False
    misfit: str = ""


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

    def cuts(self, prompt_tokens: int) -> bool:
        """Whether the server has cut a prompt of so many tokens to what fits."""

    def ask_for_rest(self, rest_s: float) -> None:
        """Take note that the server wants to be left alone for so long."""

    def rest_s(self) -> float:
        """How much of that is left."""


class Charger(Protocol):
    """Charges attempts durably."""

    async def charge(self, claim: Claim, reason: str, *, before: int) -> int:
        """Count an attempt in Redis.

        Args:
            claim: Whose.
            reason: One word.
            before: Attempts so far.

        Returns:
            How many this try has now.
        """


class Prompter:
    """Serves prompts at one server with one process's ids."""

    def __init__(self, server: Server, charger: Charger, rids: Rids) -> None:
        self.server = server
        self.charger = charger
        self.rids = rids
        self.lately = Lately()

    async def serve(self, job: Open, params: Params, timeout_s: float) -> Result | Returned:
        """Make attempts until the prompt has ended or must go back.

        Args:
            job: The claim, whose `rid` is kept up to date for aborts.
            params: Its run's.
            timeout_s: Time limit of one attempt.
        """
        try:
            serving = _Serving(self, job, params=params, timeout_s=timeout_s)
        except ServerUnusableError as error:
            return Returned(fault=str(error), config=True)
        except ValueError as error:
            verdict = Verdict(kind=Kind.PROMPT, reason="unreadable", message=str(error))
            return failed(job.claim, verdict, attempts=None, server=self.server.origin.server)
        return serving.misfit() or await serving.run()


class _Serving:
    """One prompt in its slot.

    Raises:
        ServerUnusableError: At making: the server does not tell what the request needs.
        ValueError: At making: the prompt cannot be read.
    """

    def __init__(self, prompter: Prompter, job: Open, *, params: Params, timeout_s: float) -> None:
        self._server = prompter.server
        self._charger = prompter.charger
        self._rids = prompter.rids
        self._lately = prompter.lately
        self._job = job
        self._params = params
        self._timeout_s = timeout_s
        self._attempts = job.claim.attempts
        self._refusals = 0
        self._prompt = read_prompt(job.claim.prompt)
        self._request = self._build()

    async def run(self) -> Result | Returned:
        """Make attempts until the prompt has ended or must go back."""
        while True:
            self._job.rid = self._request.rid
            outcome = await self._attempt()
            verdict = await self._settle(classify(self._request, outcome), outcome)
            self._job.rid = ""
            ended = self._end(verdict, outcome) or await self._go_on(verdict)
            if ended is not None:
                return ended

    def misfit(self) -> Returned | None:
        """Refuse what a server of this version could not answer, before anything is asked."""
        why = lacking(self._request, self._server.origin.server_version)
        return Returned(misfit=why) if why else None

    def _build(self) -> Request:
        return build_request(
            self._prompt,
            self._params,
            model=self._server.origin.model,
            rid=self._rids.next(self._job.slot),
            context_length=self._server.context_length,
        )

    async def _attempt(self) -> ServerAnswer | AttemptError:
        try:
            return await self._server.generate(
                self._request, self._timeout_s, fresh=self._job.alone
            )
        except AttemptError as error:
            return error

    async def _settle(self, verdict: Verdict, outcome: ServerAnswer | AttemptError) -> Verdict:
        """Ask the server for a token where the verdict depends on it.

        A status that reads as configuration is this prompt's own when others are served: without
        that question one odd prompt would stop the whole group for ever.
        """
        if verdict.kind is Kind.PROBE:
            return after_probe(verdict, alive=await self._server.alive())
        reads_as_ours = verdict.kind is Kind.CONFIG and isinstance(outcome, ServerAnswer)
        if reads_as_ours and await self._server.alive():
            return msgspec.structs.replace(verdict, kind=Kind.ANSWER)
        return verdict

    def _end(
        self, verdict: Verdict, outcome: ServerAnswer | AttemptError
    ) -> Result | Returned | None:
        """Say what the prompt ends as, None when another attempt may follow."""
        if verdict.kind is Kind.COMPLETED:
            return self._completed(verdict, outcome)
        if self._job.leaving:
            # Aborted by us: whoever did it has said what becomes of the job.
            return Returned()
        if verdict.kind is Kind.SERVER:
            return self._died(verdict)
        if verdict.kind is Kind.CONFIG:
            return Returned(fault=f"{verdict.reason} (HTTP {verdict.status})", config=True)
        if verdict.kind is Kind.PROMPT and not self._clamp(outcome):
            return self._failed(verdict, self._attempts + 1)
        return None

    async def _go_on(self, verdict: Verdict) -> Result | None:
        """Get ready for another attempt; a failure when there shall be none."""
        if verdict.kind is Kind.PROMPT:
            return None  # a smaller request stands ready
        if verdict.kind is Kind.LOAD:
            await self._rest(verdict)
        elif verdict.kind is Kind.ANSWER:
            self._attempts = await self._charge(verdict)
            if self._attempts >= self._params.attempts:
                return self._failed(verdict, self._attempts)
            await asyncio.sleep(ATTEMPT_PAUSE_S)
        self._request = self._build()
        return None

    async def _rest(self, verdict: Verdict) -> None:
        """Wait after a refusal: as long as the server asks all of us to, else longer each time."""
        self._job.resting = True
        self._refusals += 1
        jitter = random.random()  # noqa: S311 - spreading, not secrecy
        if verdict.retry_after_s is not None:
            self._server.ask_for_rest(verdict.retry_after_s)
        left_s = wait_s(verdict, refusals=self._refusals, jitter=jitter)
        while left_s > 0:
            await asyncio.sleep(left_s)
            left_s = self._server.rest_s() * (1 + jitter / 4)
        self._job.resting = False

    async def _charge(self, verdict: Verdict) -> int:
        before = self._attempts
        try:
            charged = await self._charger.charge(self._job.claim, verdict.reason, before=before)
        except RedisUnusableError:
            # Redis is away: counted here, so that this process does not try for ever.
            return before + 1
        return max(before + 1, charged)

    def _clamp(self, outcome: ServerAnswer | AttemptError) -> bool:
        """Make the second request of a run that asks for what the context leaves, if it is due."""
        if not isinstance(outcome, ServerAnswer):
            return False
        smaller = clamped_request(
            self._request, outcome.status, outcome.body, rid=self._rids.next(self._job.slot)
        )
        if smaller is not None:
            self._request = smaller
        return smaller is not None

    def _died(self, verdict: Verdict) -> Result | Returned:
        reached = verdict.reason != "refused"
        if reached and convicts(self._job):
            return poison(self._job.claim, server=self._server.origin.server)
        return Returned(died=reached, fault=verdict.reason)

    def _completed(self, verdict: Verdict, outcome: ServerAnswer | AttemptError) -> Result:
        if verdict.answer is None or not isinstance(outcome, ServerAnswer):
            raise AssertionError("a completion has an answer")
        claim = msgspec.structs.replace(self._job.claim, attempts=self._attempts)
        flags = self._flags(verdict.flags, verdict.answer)
        done = Completion(
            request=self._request,
            answer=verdict.answer,
            origin=self._server.origin,
            flags=flags,
            latency_s=outcome.latency_s,
            completed_at=utc_now(),
        )
        try:
            row = completion_row(claim, self._prompt, done)
        except RowTooLargeError as error:
            too_large = Verdict(kind=Kind.PROMPT, reason="too_large", message=str(error))
            return self._failed(too_large, self._attempts + 1)
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
            flags=flags,
        )

    def _flags(self, flags: tuple[str, ...], answer: Answer) -> tuple[str, ...]:
        """Add to what an answer tells of itself what others and the server tell of it."""
        claim, text = self._job.claim, answer.choices[0].content or ""
        if self._lately.same(claim.run, claim.fingerprint, text):
            flags += ("same_answer",)
        if self._server.cuts(answer.usage.prompt_tokens):
            flags += ("prompt_cut",)
        return flags

    def _failed(self, verdict: Verdict, attempts: int) -> Result:
        server = self._server.origin.server
        return failed(self._job.claim, verdict, attempts=attempts, server=server)


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
    moment = dt.datetime.fromtimestamp(seconds, dt.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
