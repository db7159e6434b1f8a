"""What a worker group says of its own answers."""

import logging

import pytest

from common.quality import LEAST_ANSWERS
from workers.prompt.noticing import Noticing, Tally


def test_what_is_odd_is_said_once_a_run_from_enough_answers_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    noticing = Noticing("gpu0@h")
    for _ in range(LEAST_ANSWERS - 1):
        noticing.note("one", ("repeating", "of_another_version"))
        noticing.note("two", ())
    assert not caplog.records

    with caplog.at_level(logging.WARNING):
        for _ in range(3 * LEAST_ANSWERS):
            noticing.note("one", ("repeating",))
            noticing.note("two", ())

    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("run one, gpu0@h: 100% of the answers end in a loop")


def test_failures_are_told_at_once_and_then_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 100.0
    tally = Tally("prompts failed", "gpu0@h", clock=lambda: now_s)

    for number in range(10_000):
        tally.note("one", "bad_request" if number % 10 else "timeout")
        now_s += 1 / 64
    tally.tell(now=True)

    first, *later, last = [record.getMessage() for record in caplog.records]
    assert first == "run one, gpu0@h: prompts failed: 1 timeout"
    assert later == [
        f"run one, gpu0@h: prompts failed in the last 60 s: {counts}"
        for counts in ("3,456 bad_request, 384 timeout", "3,456 bad_request, 384 timeout")
    ]
    assert last == (
        "run one, gpu0@h: prompts failed in the last 36 s: 2,088 bad_request, 231 timeout"
    )
    tally.tell(now=True)
    assert len(caplog.records) == 4
