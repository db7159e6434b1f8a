"""One prompt in its slot: when it is tried again, charged, failed, or given back."""

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from common.errors import RedisUnusableError
from common.models import Claim, KeptTurns, Params, Result
from tests.support.scripted_server import answer
from workers.client.faults import (
    AttemptError,
    AttemptTimeoutError,
    BadEncodingError,
    LocalLimitError,
    NotSentError,
    ServerAnswer,
    ServerGoneError,
)
from workers.client.requests import Request
from workers.client.rows import Origin
from workers.prompt.job import Open, Ready
from workers.prompt.outcomes import Returned, convicts
from workers.prompt.serve import Prompter
from workers.rids import Rids

PROMPT = b'{"id":"a","line":1,"endpoint":"chat","body":{"messages":[]}}'
PARAMS = Params(max_tokens=16)
GOOD = ServerAnswer(status=200, body=answer("hi"), latency_s=0.1)
ABORTED = ServerAnswer(status=200, body=answer("h", finish_reason="abort"), latency_s=0.1)
EMPTY = ServerAnswer(status=200, body=b"", latency_s=0.1)
NOT_FOUND = ServerAnswer(status=404, body=b"{}", latency_s=0.1)
BROKEN = ServerAnswer(status=500, body=b"{}", latency_s=0.1)
RESET = ServerGoneError("reset")
REFUSED = ServerGoneError("refused", reached=False)
LATE = AttemptTimeoutError("late")
SECRET = "words of a prompt"

Outcome = ServerAnswer | AttemptError
Before = Callable[[], None]


class Server:
    """Answers as it is told (`needs.Server`)."""

    origin = Origin(server="http://s", model="m", server_version="0")
    context_length = 1_000

    def __init__(self, *outcomes: Outcome, alive: bool = True) -> None:
        self._outcomes = itertools.chain(outcomes, itertools.repeat(outcomes[-1]))
        self._alive = alive
        self.requests: list[Request] = []
        self.fresh: list[bool] = []
        self.rests: list[float] = []
        self.limits: list[str] = []
        self.before: Before = lambda: None

    async def generate(
        self, request: Request, deadline_s: float, *, fresh: bool = False
    ) -> ServerAnswer:
        assert deadline_s == 5.0
        self.requests.append(request)
        self.fresh.append(fresh)
        self.before()
        outcome = next(self._outcomes)
        if isinstance(outcome, AttemptError):
            raise outcome
        return outcome

    async def alive(self) -> bool:
        return self._alive

    def ask_for_rest(self, rest_s: float) -> None:
        self.rests.append(rest_s)

    def rest_s(self) -> float:
        return 0.0

    def say_limit(self, what: str) -> None:
        self.limits.append(what)

    def cuts(self, prompt_tokens: int) -> bool:
        return prompt_tokens >= self.context_length


class Charger:
    """Charges in memory (`needs.Charger`), or cannot."""

    def __init__(self, *, away: bool = False, ours: bool = True) -> None:
        self._away = away
        self._ours = ours
        self.charged: list[tuple[str, int | None]] = []

    async def charge(self, claim: Claim, reason: str, *, before: int | None) -> int:
        if self._away:
            raise RedisUnusableError("away")
        assert claim.run == "r"
        if not self._ours:
            return 0
        self.charged.append((reason, before))
        return (claim.attempts if before is None else before) + 1


class Turns:
    """Keeps turns in memory (`needs.TurnStore`), or says what it was told to say."""

    def __init__(self, word: str = "ok") -> None:
        self.kept: list[bytes] = []
        self._word = word

    async def keep(self, kept: KeptTurns) -> str:
        assert kept.run == "r"
        self.kept.append(kept.turns)
        return self._word


class Slots:
    """Allows so many more requests in slots (`needs.SlotHolder`), lost for a moment or never."""

    def __init__(self, go_on: int = 100, *, lost: bool = False) -> None:
        self._go_on = go_on
        self._lost = lost

    def may_go_on(self) -> bool:
        self._go_on -= 1
        return self._go_on >= 0

    def held_since(self, instant_s: float) -> bool:
        assert instant_s > 0
        return not self._lost


def job(*, alone: bool = False, **claim: Any) -> Open:
    rids = Rids("e")
    members: dict[str, Any] = {
        "run": "r",
        "uid": "u",
        "key": bytes(16),
        "fingerprint": bytes(8),
        "try_": 1,
    }
    members |= {"attempts": 0, "deaths": 0, "lost": 0, "prompt": PROMPT, **claim}
    ready = Ready(Claim(**members), suspect=alone, alone=alone)
    return Open(ready, slot=rids.take_slot(), since_s=0.0)


async def serve(
    server: Server,
    opened: Open,
    charger: Charger | None = None,
    turns: Turns | None = None,
    params: Params = PARAMS,
    slots: Slots | None = None,
) -> Result | Returned:
    rids = Rids("epoch-of-it")
    rids.take_slot()
    prompter = Prompter(
        server, charger or Charger(), rids, turns=turns or Turns(), slots=slots or Slots()
    )
    return await prompter.serve(opened, params, 5.0)


def failure(result: Result | Returned) -> tuple[str, int]:
    """Reason and attempts of a failure."""
    assert isinstance(result, Result)
    assert result.outcome == "failed"
    row = msgspec.json.decode(result.row)
    return row["reason"], row["attempts"]


async def test_a_good_answer_ends_it() -> None:
    result = await serve(Server(GOOD), job())

    assert isinstance(result, Result)
    assert result.outcome == "completed"


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [(EMPTY, "bad_response"), (ABORTED, "aborted"), (LATE, "timeout"), (BROKEN, "server_error")],
)
async def test_an_answer_at_fault_is_charged_until_it_fails(outcome: Outcome, reason: str) -> None:
    server, charger = Server(outcome), Charger()

    assert failure(await serve(server, job(), charger)) == (reason, 3)

    assert charger.charged == [(reason, 0), (reason, 1), (reason, 2)]
    assert len({request.rid for request in server.requests}) == 3


async def test_attempts_of_an_earlier_process_count() -> None:
    server = Server(EMPTY)

    assert failure(await serve(server, job(attempts=2))) == ("bad_response", 3)

    assert len(server.requests) == 1


async def test_attempts_are_counted_while_redis_is_away() -> None:
    server = Server(EMPTY)

    assert failure(await serve(server, job(), Charger(away=True))) == ("bad_response", 3)


@pytest.mark.parametrize("outcome", [LATE, BROKEN])
async def test_what_a_dead_server_answers_is_its_own_fault(outcome: Outcome) -> None:
    charger = Charger()

    returned = await serve(Server(outcome, alive=False), job(), charger)

    assert isinstance(returned, Returned)
    assert returned.died
    assert not charger.charged


async def test_a_refused_connection_is_no_death() -> None:
    returned = await serve(Server(REFUSED), job())

    assert returned == Returned(died=False, fault="refused")


async def test_one_odd_prompt_does_not_stop_a_server_that_serves_others() -> None:
    assert failure(await serve(Server(NOT_FOUND), job())) == ("not_found", 3)


async def test_a_server_that_refuses_everybody_is_reported() -> None:
    returned = await serve(Server(NOT_FOUND, alive=False), job())

    assert isinstance(returned, Returned)
    assert returned.config
    assert not returned.died


@pytest.mark.parametrize(("outcome", "died"), [(RESET, True), (REFUSED, False)])
@pytest.mark.parametrize("alone", [True, False])
async def test_a_death_is_told_where_the_server_had_the_request(
    *, alone: bool, outcome: Outcome, died: bool
) -> None:
    server = Server(outcome)

    returned = await serve(server, job(alone=alone, deaths=6))

    assert isinstance(returned, Returned)
    assert returned.died is died
    assert returned.fault
    # Alone, a reset of a connection that others used before would prove nothing.
    assert server.fresh == [alone]


@pytest.mark.parametrize(
    ("alone", "deaths", "died_alone", "convicted"),
    [
        (True, 4, 1, True),
        (True, 9, 4, True),
        (True, 9, 0, False),
        (True, 3, 1, False),
        (False, 9, 3, False),
    ],
)
def test_only_deaths_that_come_again_alone_convict(
    *, alone: bool, deaths: int, died_alone: int, convicted: bool
) -> None:
    assert convicts(job(alone=alone, deaths=deaths, died_alone=died_alone)) is convicted


@pytest.mark.parametrize("outcome", [ABORTED, EMPTY, BROKEN, RESET])
async def test_a_job_that_is_leaving_is_neither_charged_nor_failed(outcome: Outcome) -> None:
    server, charger, opened = Server(outcome), Charger(), job(attempts=2)
    server.before = lambda: setattr(opened, "leaving", True)

    assert await serve(server, opened, charger) == Returned()

    assert not charger.charged


async def test_an_answer_that_comes_while_a_job_is_leaving_is_kept() -> None:
    server, opened = Server(GOOD), job()
    server.before = lambda: setattr(opened, "leaving", True)

    result = await serve(server, opened)

    assert isinstance(result, Result)
    assert result.outcome == "completed"


async def test_a_refusal_for_load_waits_and_is_not_charged() -> None:
    busy = ServerAnswer(status=503, body=b"{}", latency_s=0.1, headers={"retry-after": "0.5"})
    server, charger, opened = Server(busy, GOOD), Charger(), job()
    seen: list[bool] = []
    server.before = lambda: seen.append(opened.resting)

    result = await serve(server, opened, charger)

    assert isinstance(result, Result)
    assert server.rests == [0.5]
    assert not charger.charged
    assert seen == [False, False]


async def test_a_prompt_that_cannot_be_read_fails_by_itself() -> None:
    server = Server(GOOD)

    assert failure(await serve(server, job(prompt=b"\xff{"))) == ("unreadable", 0)

    assert server.requests == []


# --- without a slot, without the job -------------------------------------------------------------


@pytest.mark.parametrize("outcome", [EMPTY, ABORTED, LATE, BROKEN])
async def test_no_second_attempt_is_opened_without_a_slot(outcome: Outcome) -> None:
    server, charger = Server(outcome, GOOD), Charger()

    assert await serve(server, job(), charger, slots=Slots(0)) == Returned()

    assert len(server.requests) == 1
    assert len(charger.charged) == 1, "whoever has it next knows of the attempt"


async def test_no_request_follows_a_refusal_without_a_slot() -> None:
    busy = ServerAnswer(status=503, body=b"{}", latency_s=0.1, headers={"retry-after": "0"})
    server = Server(busy, GOOD)

    assert await serve(server, job(), slots=Slots(0)) == Returned()

    assert len(server.requests) == 1


async def test_an_abort_by_whoever_took_our_slots_is_not_charged() -> None:
    charger = Charger()

    assert await serve(Server(ABORTED), job(attempts=2), charger, slots=Slots(lost=True)) == (
        Returned()
    )

    assert not charger.charged


async def test_an_answer_counts_whoever_has_our_slots() -> None:
    result = await serve(Server(GOOD), job(), slots=Slots(0, lost=True))

    assert isinstance(result, Result)
    assert result.outcome == "completed"


async def test_a_job_that_another_process_holds_by_now_is_not_failed_by_us() -> None:
    server = Server(EMPTY)

    assert await serve(server, job(attempts=2), Charger(ours=False)) == Returned()

    assert len(server.requests) == 1


async def test_a_request_that_was_not_sent_costs_nothing() -> None:
    charger = Charger()

    assert await serve(Server(NotSentError("late")), job(attempts=2), charger) == Returned()

    assert not charger.charged


# --- this machine, and ourselves -----------------------------------------------------------------


async def test_without_a_descriptor_a_slot_waits_and_says_so() -> None:
    server, charger = Server(LocalLimitError("no descriptor"), GOOD), Charger()

    result = await serve(server, job(), charger)

    assert isinstance(result, Result)
    assert result.outcome == "completed"
    assert server.limits == ["no descriptor"]
    assert not charger.charged


async def test_an_answer_that_is_not_encoded_as_it_says_is_the_answers_fault_or_the_servers() -> (
    None
):
    garbled = BadEncodingError("garbled")

    assert failure(await serve(Server(garbled), job())) == ("bad_response", 3)
    returned = await serve(Server(garbled, alive=False), job())

    assert isinstance(returned, Returned)
    assert returned.died


@pytest.mark.parametrize("error", [KeyError(SECRET), MemoryError(), RecursionError(SECRET)])
async def test_an_error_of_ours_is_charged_to_its_prompt_and_told_without_its_words(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks() -> None:
        raise error

    server, charger = Server(GOOD), Charger()
    server.before = breaks

    assert await serve(server, job(attempts=1), charger) == Returned()
    assert charger.charged == [("internal_error", None)]
    assert failure(await serve(server, job(attempts=2), charger)) == ("internal_error", 3)

    assert type(error).__name__ in caplog.text
    assert "in breaks" in caplog.text
    assert SECRET not in caplog.text
