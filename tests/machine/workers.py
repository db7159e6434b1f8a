"""Worker processes as users of the queue, by the rules of the real one, and their servers.

A worker moves only when it is told to. Its clock is the machine's: monotonic, and what was
skipped.
"""

from collections.abc import Callable

import msgspec

from common.models import Choice as AnswerChoice
from common.models import Claim, KeptTurns, Params, Result, Usage
from common.queue import Jobs, SlotReply
from common.queue.jobs import SLOT_TTL_MS
from tests.machine.model import Answer, RunModel
from tests.machine.process import Process
from workers.client.answers import Answer as ServerAnswer
from workers.client.requests import build_request, read_prompt
from workers.client.rows import Completion, Failure, Origin, completion_row, failure_row

BOUND = 3
MARGIN_MS = 2_000
MARK_BYTES = 1 << 40
WHEN = "2026-01-01T00:00:00+00:00"
POISON = "cannot be stored"
PARAMS = Params(max_tokens=16)

JobKey = tuple[str, bytes]


class Server:
    """What is open at one SGLang server: request id -> whose it is."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.open: set[tuple[str, JobKey]] = set()

    def abort(self, epoch: str) -> None:
        self.open = {request for request in self.open if request[0] != epoch}


class Worker:
    """One process of a worker group.

    Attributes:
        ready, open, unsent, returning: Where its jobs are; see `workers.engine.holdings`.
        frozen: How many more times it does nothing when it is told to.
    """

    def __init__(
        self, process: Process, server: Server, *, group: str, clock: Callable[[], float]
    ) -> None:
        self.process = process
        self.server = server
        self.epoch = process.name
        self.jobs = Jobs(process.client, epoch=self.epoch, group=group, server=server.url)
        self.clock = clock
        self.slots = 0
        self.until_ms = 0.0
        self.ready: list[Claim] = []
        self.open: dict[JobKey, Claim] = {}
        self.unsent: dict[JobKey, Result] = {}
        self.returning: dict[JobKey, bool] = {}
        self.turns: dict[JobKey, bytes] = {}
        self.suspects: set[JobKey] = set()
        self.blocked = False
        self.frozen = 0
        self.why = ""

    # --- Slots -----------------------------------------------------------------------------------

    def believes(self) -> int:
        """How many requests it would open now, all in all."""
        return self.slots if self.clock() < self.until_ms else 0

    def take_slots(self, wanted: int) -> str:
        """As the keeper does; returns what was said."""
        before_ms = self.clock()
        # Redis may take note of fewer, and the answer be lost.
        self.slots = min(self.slots, wanted)
        reply = self._take(wanted)
        if reply.what == "wait" and not self.server.open:
            reply = self._take(wanted, quiet=True)
        while reply.what == "settle":
            self.server.abort(reply.other)
            before_ms = self.clock()
            reply = self._take(wanted, settled=reply.other)
        if reply.what == "refused":
            self.slots = 0
        if reply.what == "granted":
            self.slots = reply.slots
            self.until_ms = before_ms + SLOT_TTL_MS - MARGIN_MS
        self.open_some()
        return reply.what

    def give_up_slots(self) -> None:
        self.slots = 0
        self._take(0)

    def _take(self, wanted: int, *, settled: str = "", quiet: bool = False) -> SlotReply:
        holds = self.believes()
        about: dict[str, object] = {"holds": holds} if holds else {}
        return self.jobs.take_slots(
            wanted,
            bound=BOUND,
            rid_prefix=f"{self.epoch}-",
            about={**about, "host": "test", "pid": 1, "started": "1"},
            settled=settled,
            quiet=quiet,
        )

    # --- Jobs ------------------------------------------------------------------------------------

    @property
    def held(self) -> list[JobKey]:
        """What it renews."""
        ready = [(claim.run, claim.key) for claim in self.ready]
        return [*ready, *self.open, *self.unsent]

    def claim(self, count: int) -> list[Claim]:
        """Claim as the engine does: not without slots, nor while results wait for their run."""
        self.why = "busy"
        if not self.believes() or self.blocked or self.suspects:
            return []
        alone = not (self.held or self.returning)
        reply = self.jobs.claim(
            count, stream_mark_bytes=MARK_BYTES, worker_name=self.epoch, alone=alone
        )
        self.why = reply.why
        for claim in reply.claims:
            self.returning.pop((claim.run, claim.key), None)
            self.ready.append(claim)
            if reply.suspects:
                self.suspects.add((claim.run, claim.key))
        self.open_some()
        return list(reply.claims)

    def open_some(self) -> None:
        while self.ready and len(self.open) < self.believes():
            claim = self.ready.pop(0)
            key = claim.run, claim.key
            self.open[key] = claim
            self.server.open.add((self.epoch, key))
            if claim.turns:
                self.turns[key] = claim.turns

    def leave(self, key: JobKey) -> Claim:
        """Take a job out of its slot."""
        self.server.open.discard((self.epoch, key))
        self.suspects.discard(key)
        return self.open.pop(key)

    def lose(self, key: JobKey) -> None:
        """It is another's, or has ended: drop all that there is of it."""
        self.ready = [claim for claim in self.ready if (claim.run, claim.key) != key]
        if key in self.open:
            self.leave(key)
        self.unsent.pop(key, None)
        self.suspects.discard(key)
        self.turns.pop(key, None)

    def end(
        self, key: JobKey, model: RunModel, *, outcome: str, serial: int, poison: bool
    ) -> bool:
        """The server answers one request; False where it was aborted there: given back then."""
        if (self.epoch, key) not in self.server.open:
            self.leave(key)
            self.returning[key] = False
            return False
        claim = self.leave(key)
        self.turns.pop(key, None)
        result = result_of(claim, outcome, text=f"answer {serial}" + POISON * poison)
        model.note_answer(
            claim.key, claim.try_, Answer(outcome, claim.fingerprint, result.row, poison)
        )
        self.unsent[key] = result
        return True

    def convict(self, claim: Claim, model: RunModel) -> None:
        """End what was lost again while it was tried alone."""
        result = result_of(claim, "failed", text="poison_worker")
        model.note_answer(claim.key, claim.try_, Answer("failed", claim.fingerprint, result.row))
        self.unsent[claim.run, claim.key] = result

    def server_died(self) -> None:
        """All that was open there goes back with a death, the rest uncharged."""
        for key in list(self.open):
            self.leave(key)
            self.returning[key] = True
        for claim in self.ready:
            self.returning[claim.run, claim.key] = False
        self.ready.clear()
        self.suspects.clear()

    def kept_turns(self, key: JobKey, line: bytes) -> KeptTurns:
        """One more turn of an open prompt."""
        claim = self.open[key]
        self.turns[key] = self.turns.get(key, b"") + line
        return KeptTurns(
            run=claim.run,
            uid=claim.uid,
            key=claim.key,
            fingerprint=claim.fingerprint,
            try_=claim.try_,
            turns=self.turns[key],
        )

    def mark_repeated(self) -> None:
        self.unsent = {
            key: msgspec.structs.replace(result, repeat=True)
            for key, result in self.unsent.items()
        }


def result_of(claim: Claim, outcome: str, *, text: str) -> Result:
    """The row that the real worker group writes, and the result that carries it."""
    if outcome == "failed":
        row = failure_row(
            claim,
            Failure(reason="bad_request", status=400, message=text, attempts=1, failed_at=WHEN),
        )
        return claim.ended("failed", row, reason="bad_request")
    raw = read_prompt(claim.prompt)
    usage = Usage(prompt_tokens=3, completion_tokens=len(text))
    answer = ServerAnswer(
        choices=[AnswerChoice(index=0, content=text, finish_reason="stop")],
        usage=usage,
        empty=False,
        truncated=False,
        reasoning_cut=False,
    )
    done = Completion(
        request=build_request(raw, PARAMS, model="m", rid="e-1", context_length=None),
        answer=answer,
        origin=Origin(server="http://test", model="m", server_version="0.5.23"),
        flags=(),
        latency_s=1.0,
        completed_at=WHEN,
    )
    return claim.ended("completed", completion_row(claim, raw, done), tokens=(3, len(text)))
