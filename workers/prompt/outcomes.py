"""Make what leaves a prompt's service beside completions: failures, finished turns, returns."""

import msgspec

from common.models import Claim, KeptTurns, Result
from common.secrecy import without_secrets
from common.utc import utc_now
from workers.client.answers import Answer
from workers.client.faults import Kind, Verdict
from workers.client.rows import Failure, failure_row
from workers.prompt.job import Open

DEATHS, DEATHS_ALONE = 5, 2
"""Deaths that convict, and how many of them alone at the server.

Servers also die for reasons of their own, and one that does so while an innocent prompt is tried
alone must not convict it. In 25 simulated runs with many such deaths, one death alone convicted 7
innocent prompts, and this rule none. A prompt that was found by halving brings the deaths with it:
the rule costs one restart more, not three.
"""


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


def convicts(job: Open) -> bool:
    """Whether this death of the server convicts the prompt that was open there."""
    claim = job.claim
    return job.alone and claim.died_alone + 1 >= DEATHS_ALONE and claim.deaths + 1 >= DEATHS


def poison(job: Open, *, server: str) -> Result:
    """Make the failure of a prompt with which its server died again and again, at last alone."""
    claim = job.claim
    message = f"the server died with it {claim.deaths + 1} times, the last times alone"
    verdict = Verdict(kind=Kind.PROMPT, reason="poison", message=message)
    return failed(claim, verdict, attempts=None, server=server, turn=job.turn)


def failed(
    claim: Claim, verdict: Verdict, *, attempts: int | None, server: str, turn: int | None = None
) -> Result:
    """Make the failure of a prompt, or of its turn, from the verdict on the last attempt."""
    failure = Failure(
        reason=verdict.reason,
        status=verdict.status,
        # A server may repeat what it was sent, our key among it.
        message=without_secrets(verdict.message),
        server=server,
        attempts=claim.attempts if attempts is None else attempts,
        failed_at=utc_now(),
        turn=turn,
    )
    return claim.ended("failed", failure_row(claim, failure), reason=verdict.reason)


def kept_turns(claim: Claim, turns: bytes) -> KeptTurns:
    """Make what Redis keeps of a prompt that goes on, from its finished turns."""
    return KeptTurns(
        run=claim.run,
        uid=claim.uid,
        key=claim.key,
        fingerprint=claim.fingerprint,
        try_=claim.try_,
        turns=turns,
    )


def answer_of(verdict: Verdict) -> Answer:
    """Give the answer of a completion."""
    if verdict.answer is None:
        raise AssertionError("a completion has an answer")
    return verdict.answer
