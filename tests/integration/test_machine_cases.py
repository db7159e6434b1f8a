"""Schedules of the machine (`tests.machine`) that are worth playing each time, step by step."""

import pytest

from tests.machine.machine import Machine
from tests.machine.world import HITS


@pytest.mark.parametrize("nth", range(3, 8))
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_sink_of_a_past_that_writes_after_the_reconcile_changes_nothing(
    nth: int, *, goes_on: bool
) -> None:
    """It stands at one of its crash points while Redis goes back behind its batch and on."""
    machine = Machine()
    try:
        machine.begin()
        machine.all_holds()
        before = HITS["the past writes"]
        machine.let_the_past_write("other", "alpha", "w0a", nth, goes_on=goes_on)
        assert HITS["the past writes"] == before + 1, "it was not frozen, or Redis did not go back"
        machine.all_holds()
    finally:
        machine.teardown()
