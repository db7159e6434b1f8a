"""Conversations generated turn by turn by a real server with a hybrid model: `make real`.

Worker group, scheduler and server are killed between turns and in the middle of them. The server's
journal tells which turns it was asked for: none twice but those that were open at a death.
"""

import json
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from common.models import Counts
from tests.real.conftest import ServerWith
from tests.real.pipeline import Pipeline, Row, human_eval, say
from tests.real.server import Death, RealServer, Seen, end_s, most_open

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

CONVERSATIONS, TURNS = 41, 4
BOUND = 35
NOT_YET_KEPT_S = 0.5
"""An answer that came so shortly before a death may not have been kept yet."""


def conversations() -> list[Row]:
    """HumanEval's prompts, four to a conversation, with old answers to be dropped."""
    tasks = human_eval()
    rows: list[Row] = []
    for first in range(0, CONVERSATIONS * TURNS, TURNS):
        spoken = [{"role": "system", "content": "You write Python."}]
        for _, text in tasks[first : first + TURNS]:
            spoken.append({"role": "user", "content": text[:300]})
            spoken.append({"role": "assistant", "content": "the old answer"})
        rows.append({"id": f"talk-{first}", "conversations": spoken})
    return rows


def test_no_turn_is_generated_again_but_those_open_at_a_death(
    server_with: ServerWith, tmp_path: Path
) -> None:
    server = server_with()
    since_s = time.time()
    with Pipeline(tmp_path, server.url, "talks") as run:
        run.enqueue(conversations(), 60, "--turns", "all")
        workers, sink = run.start_workers(), run.start_sink()
        deaths: list[Death] = []
        for answers in (20, 50):
            run.watch_until(partial(has_answered, server, since_s, answers), f"{answers} answers")
            workers.kill()
            deaths.append(Death(time.time(), open_group(server, since_s)))
            workers = run.start_workers()
        run.watch_until(partial(has_answered, server, since_s, 80), "80 answers")
        server.kill()
        server.start()
        run.watch_until(partial(has_answered, server, since_s, 110), "110 answers")
        server.kill_scheduler()
        server.wait_gone()
        server.start()
        run.watch_to_the_end(sink)
        code, verdict = run.verify("--turns", "all")
        completed, failed, counts = run.completions(), run.failures(), run.counts()

    seen = server.seen(since_s)
    deaths += [each for each in server.deaths if each.at_s > since_s]
    at_risk = sum(open_at(death, seen, deaths) for death in deaths)
    again = len(seen) - CONVERSATIONS * TURNS
    say(
        "turns",
        conversations=len(completed),
        turns=CONVERSATIONS * TURNS,
        requests=len(seen),
        again=again,
        open_at_deaths=at_risk,
    )
    assert code == 0, verdict
    assert failed == []
    assert len(completed) == CONVERSATIONS
    assert 0 < again <= at_risk
    assert counts.duplicates_dropped == counts.retries == 0
    assert max(most_open(seen, deaths).values()) <= BOUND
    assert_each_turn_on_those_before_it(completed, seen)


def has_answered(server: RealServer, since_s: float, answers: int, _: Counts) -> bool:
    return sum(each.answer is not None for each in server.seen(since_s)) >= answers


def open_group(server: RealServer, since_s: float) -> str:
    """The process that sent the latest request."""
    return server.seen(since_s)[-1].group


def open_at(death: Death, seen: Sequence[Seen], deaths: Sequence[Death]) -> int:
    """How many requests were open at a death, or had been answered just before it."""
    return sum(
        each.begun_s <= death.at_s <= end_s(each, deaths) + NOT_YET_KEPT_S
        and death.group in {None, each.group}
        for each in seen
    )


def assert_each_turn_on_those_before_it(completed: Sequence[Row], seen: Sequence[Seen]) -> None:
    """Each answer is one that the server gave to its turn's very conversation, to the letter."""
    given = {(each.text, each.answer, each.finish) for each in seen if each.answer is not None}
    for row in completed:
        assert [turn["at"] for turn in row["turns"]] == [2, 4, 6, 8]
        assert "the old answer" not in json.dumps(row)
        for turn in row["turns"]:
            answer = row["messages"][turn["at"]]["content"]
            text = rendered(row["messages"][: turn["at"]])
            assert (text, answer, turn["finish_reason"]) in given, (row["id"], turn["at"])
    assert Counter(row["id"] for row in completed) == Counter(row["id"] for row in conversations())


def rendered(messages: Sequence[Row]) -> str:
    """What the tiny model's chat template makes of them."""
    text = "".join(
        f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in messages
    )
    return f"{text}<|im_start|>assistant\n"
