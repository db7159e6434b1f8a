"""What the rules share."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.machine.checks import Checks
from tests.machine.process import GOOD, Fate
from tests.machine.world import HITS, RUNS, World

RULE_RUNS = st.sampled_from(RUNS)
WORKERS = st.sampled_from(["w0a", "w0b", "w1"])
SINKS = st.sampled_from(["one", "other", "slow"])

_faults = st.lists(st.sampled_from(["", "", "away", "lost"]), max_size=8).map(tuple)
_long = st.tuples(st.integers(0, 10), st.sampled_from(["away", "lost"])).map(
    lambda drawn: ("",) * drawn[0] + (drawn[1],) * 4
)
_points = st.one_of(st.integers(1, 4), st.integers(1, 9))
ENDS = st.builds(Fate, kind=st.sampled_from(["dies", "freezes"]), nth=_points)
"""A process that dies or freezes at one of the first crash points that it reaches."""

FATES = st.one_of(
    st.just(GOOD),
    ENDS,
    ENDS,
    # One call that is repeated silently; or a call of which every repetition fails, too.
    st.builds(Fate, redis=st.one_of(_faults, _long)),
    st.builds(Fate, store=_faults),
)
"""What may happen to an action of a process."""


often: Any = rule
"""A rule that a function becomes several times: what is drawn is drawn by rules."""


def hit(what: str) -> None:
    HITS[what] += 1


class Base(RuleBasedStateMachine):
    """The machine's parts see the world and its checks."""

    world: World
    checks: Checks
