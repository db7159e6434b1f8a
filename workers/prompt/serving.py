"""One prompt in its slot: attempt after attempt until it has ended or goes back (protocol.md §4).

What it says at once are charged attempts, and the finished turns of a prompt with several; the
limits of attempts and of time hold for each turn. A process that has lost its slots opens nothing,
no second attempt either, and what it had open may have been aborted by whoever has them now: such
an end is neither the answer's fault nor the server's.
"""

import asyncio
import random
import time

import msgspec

from common.crashpoints import reached
from common.errors import RedisUnusableError
from common.models import Params, Result, Turn
from common.utc import utc_now
from workers.client.answers import Answer
from workers.client.clamp import clamped_request
from workers.client.faults import (
    AttemptError,
    Kind,
    NotSentError,
    ServerAnswer,
    Verdict,
    after_probe,
    classify,
    wait_s,
)
from workers.client.requests import Request, build_request, read_prompt
from workers.client.rows import MAX_ROW_BYTES, Completion, RowTooLargeError, completion_row
from workers.client.token_ids import lacking
from workers.prompt.job import Open
from workers.prompt.needs import Needs
from workers.prompt.outcomes import Returned, answer_of, failed, kept_turns
from workers.prompt.turns import USELESS, Conversation

ATTEMPT_PAUSE_S = 0.2
"""Between a charged attempt and the next, so that a quick fault does not spin."""


class Serving:
    """One prompt in its slot.

    Raises:
        ServerUnusableError: At making: the server does not tell what the request needs.
        ValueError: At making: the prompt cannot be read.
    """

    def __init__(self, needs: Needs, job: Open, *, params: Params, timeout_s: float) -> None:
        self._server = needs.server
        self._charger = needs.charger
        self._rids = needs.rids
        self._lately = needs.lately
        self._turns = needs.turns
        self._slots = needs.slots
        self._job = job
        self._params = params
        self._timeout_s = timeout_s
        self._attempts = job.claim.attempts
        self._refusals = 0
        self._prompt = read_prompt(job.claim.prompt)
        self._talk: Conversation | None = None
        if self._prompt.turns:
            self._talk = Conversation(self._prompt, job.claim.turns)
        self._request = self._build()

    async def run(self) -> Result | Returned:
        """Make attempts until the prompt has ended or must go back."""
        while True:
            self._job.rid = self._request.rid
            began_s = time.monotonic()
            outcome = await self._attempt()
            if isinstance(outcome, ServerAnswer):
                reached("serve.answered")
            verdict = classify(self._request, outcome)
            if isinstance(outcome, NotSentError) or self._taken_from_us(verdict, began_s):
                return Returned()
            verdict = await self._settle(verdict, outcome)
            self._job.rid = ""
            if verdict.kind is Kind.COMPLETED and isinstance(outcome, ServerAnswer):
                ended = await self._came(verdict, outcome)
            else:
                ended = self._end(verdict, outcome) or await self._go_on(verdict)
            if ended is not None:
                return ended
            if self._job.leaving or not self._slots.may_go_on():
                # Whoever has the job next goes on with its attempts and behind its turns.
                return Returned()

    def _taken_from_us(self, verdict: Verdict, began_s: float) -> bool:
        """Whether the request was aborted while another process may have had our slots."""
        return verdict.reason == "aborted" and not self._slots.held_since(began_s)

    def misfit(self) -> Returned | None:
        """Refuse what a server of this version could not answer, before anything is asked."""
        why = lacking(self._request, self._server.origin.server_version)
        return Returned(misfit=why) if why else None

    def _build(self) -> Request:
        self._job.turn = self._talk.number if self._talk else None
        return build_request(
            self._talk.prompt if self._talk else self._prompt,
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

    async def _came(self, verdict: Verdict, outcome: ServerAnswer) -> Result | Returned | None:
        """Take an answer: the completion, or one turn of several."""
        flags = self._flags(verdict.flags, answer_of(verdict))
        verdict = msgspec.structs.replace(verdict, flags=flags)
        if self._talk and not self._talk.is_last:
            return await self._next_turn(self._talk, verdict, outcome)
        return self._completed(verdict, outcome)

    def _end(
        self, verdict: Verdict, outcome: ServerAnswer | AttemptError
    ) -> Result | Returned | None:
        """Say what the prompt ends as, None when another attempt may follow."""
        if self._job.leaving:
            # Aborted by us: whoever did it has said what becomes of the job.
            return Returned()
        if verdict.kind is Kind.SERVER:
            # A status comes with the server's own words, which may quote the prompt.
            fault = verdict.message if verdict.status is None else verdict.reason
            return Returned(died=verdict.reason != "refused", fault=fault or verdict.reason)
        if verdict.kind is Kind.CONFIG:
            return Returned(fault=f"{verdict.reason} (HTTP {verdict.status})", config=True)
        if verdict.kind is Kind.PROMPT and not self._clamp(outcome):
            return self._failed(verdict, self._attempts + 1)
        return None

    async def _go_on(self, verdict: Verdict) -> Result | Returned | None:
        """Get ready for another attempt; a failure when there shall be none."""
        if verdict.kind is Kind.PROMPT:
            return None  # a smaller request stands ready
        if verdict.kind is Kind.LOAD:
            await self._rest(verdict)
        elif verdict.kind is Kind.ANSWER:
            charged = await self._charge(verdict)
            if not charged:
                return Returned()  # another process has the job by now
            self._attempts = charged
            if charged >= self._params.attempts:
                return self._failed(verdict, self._attempts)
            await asyncio.sleep(ATTEMPT_PAUSE_S)
        self._request = self._build()
        return None

    async def _rest(self, verdict: Verdict) -> None:
        """Wait after a refusal: as long as the server asks all of us to, else longer each time."""
        self._job.resting = True
        self._refusals += 1
        if verdict.status is None:
            self._server.say_limit(verdict.message)
        jitter = random.random()  # noqa: S311 - spreading, not secrecy
        if verdict.retry_after_s is not None:
            self._server.ask_for_rest(verdict.retry_after_s)
        left_s = wait_s(verdict, refusals=self._refusals, jitter=jitter)
        while left_s > 0:
            await asyncio.sleep(left_s)
            left_s = self._server.rest_s() * (1 + jitter / 4)
        self._job.resting = False

    async def _next_turn(
        self, talk: Conversation, verdict: Verdict, outcome: ServerAnswer
    ) -> Result | Returned | None:
        """Keep a turn that has come and get ready for the next one; None when that may begin."""
        talk.finish_turn(answer_of(verdict), self._figures(talk, verdict, outcome))
        self._attempts = self._refusals = 0
        if len(talk.kept) > MAX_ROW_BYTES:
            return self._too_large(RowTooLargeError(len(talk.kept)))
        word = await self._turns.keep(kept_turns(self._job.claim, talk.kept))
        await self._until_rested()
        if word in USELESS:
            return Returned()
        self._request = self._build()
        return None

    async def _until_rested(self) -> None:
        """Wait while the server wants to be left alone."""
        self._job.resting = True
        while (left_s := self._server.rest_s()) > 0:  # noqa: ASYNC110 - it knows how long
            await asyncio.sleep(left_s)
        self._job.resting = False

    def _figures(self, talk: Conversation, verdict: Verdict, outcome: ServerAnswer) -> Turn:
        answer = answer_of(verdict)
        return Turn(
            at=talk.at,
            finish_reason=answer.choices[0].finish_reason,
            usage=answer.usage,
            latency_s=round(outcome.latency_s, 3),
            attempts=self._attempts + 1,
            server=self._server.origin.server,
            completed_at=utc_now(),
            flags=list(verdict.flags),
        )

    async def _charge(self, verdict: Verdict) -> int:
        """Count an attempt; 0 when the job is not ours any more."""
        before = self._attempts
        try:
            charged = await self._charger.charge(self._job.claim, verdict.reason, before=before)
        except RedisUnusableError:
            # Redis is away: counted here, so that this process does not try for ever.
            return before + 1
        return charged and max(before + 1, charged)

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

    def _completed(self, verdict: Verdict, outcome: ServerAnswer) -> Result:
        answer, talk = answer_of(verdict), self._talk
        done = Completion(
            request=self._request,
            answer=answer,
            origin=self._server.origin,
            flags=verdict.flags,
            latency_s=outcome.latency_s,
            completed_at=utc_now(),
        )
        attempts = self._attempts
        if talk:
            done = talk.completed(done, self._figures(talk, verdict, outcome))
            attempts = talk.attempts - 1
        claim = msgspec.structs.replace(self._job.claim, attempts=attempts)
        try:
            row = completion_row(claim, self._prompt, done)
        except RowTooLargeError as error:
            return self._too_large(error)
        usage = done.usage or answer.usage
        tokens = usage.prompt_tokens, usage.completion_tokens
        return claim.ended("completed", row, tokens=tokens, flags=done.flags)

    def _flags(self, flags: tuple[str, ...], answer: Answer) -> tuple[str, ...]:
        """Add to what an answer tells of itself what others and the server tell of it."""
        claim, text = self._job.claim, answer.choices[0].content or ""
        if self._lately.same(claim.run, claim.fingerprint, text):
            flags += ("same_answer",)
        if self._server.cuts(answer.usage.prompt_tokens):
            flags += ("prompt_cut",)
        return flags

    def _too_large(self, error: RowTooLargeError) -> Result:
        verdict = Verdict(kind=Kind.PROMPT, reason="too_large", message=str(error))
        return self._failed(verdict, self._attempts + 1)

    def _failed(self, verdict: Verdict, attempts: int) -> Result:
        server = self._server.origin.server
        turn = self._talk.number if self._talk else None
        return failed(self._job.claim, verdict, attempts=attempts, server=server, turn=turn)
