"""What a worker group says of its own answers."""

import logging

import pytest

from common.quality import LEAST_ANSWERS
from workers.noticing import Noticing


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
