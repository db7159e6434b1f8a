"""`workers up` over a real SGLang, and `workers restart` of its server while it works."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.group_figures import GroupFigures
from tests.real.conftest import found_place
from tests.real.launched import ASKED, FLAGS, NAME, STATES, Launched
from tests.real.pipeline import Pipeline, as_chat, as_completions, human_eval, say
from tests.real.server import START_LIMIT_S, Place
from tests.support.watching import exit_code
from workers.capacity.capacity import bound_of, states_per_request
from workers.lives import process_start
from workers.releases import Strategy

pytestmark = [pytest.mark.real, pytest.mark.timeout(3000)]

RUN = "humaneval"
TOKENS = 100
END_LIMIT_S = 900.0
BEFORE = 20
"""Answers until the restart: most of the work is left for the server as it is then."""


class Node(Launched):
    """`workers up` in the run's folder, with its Redis, until the run has ended."""

    def __init__(self, place: Place, run: Pipeline) -> None:
        super().__init__(place, run.folder)
        self.run = run
        timed = {"HEADRACE_FIRST_BATCH_SECONDS": "2", "HEADRACE_BATCH_SECONDS": "5"}
        told = (*self.flags, "--run", RUN, "--until-done", "--ramp", "100")
        self.process = run.start("up", *told, "--", *FLAGS, env={**self.variables, **timed})

    def restart(self, strategy: Strategy) -> tuple[str, float]:
        """`workers restart`, to its good end: what it said, and the seconds that it took."""
        process = self.run.start("restart", "--strategy", strategy, env=self.variables)
        took_s = self.run.watch_until(
            lambda _: not process.alive(), "the restart", 2 * START_LIMIT_S
        )
        said = process.log.read_text()
        assert exit_code(process) == 0, said
        return said, took_s

    def full(self, strategy: Strategy) -> GroupFigures:
        """Wait until as much is open as the bound allows; what the worker group says then."""
        full: list[GroupFigures] = []

        def holds(_: object) -> bool:
            assert self.process.alive(), self.process.tail()
            said = self.run.group()
            if said and said.strategy == strategy and 0 < said.bound == said.in_flight:
                full.append(said)
            return bool(full)

        self.run.watch_until(holds, f"a full server by {strategy}")
        return full[0]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Pipeline]:
    with Pipeline(tmp_path, "", RUN) as made:
        yield made


@pytest.fixture
def node(run: Pipeline) -> Iterator[Node]:
    place = found_place()
    run.enqueue([*as_chat(human_eval()), *as_completions(human_eval()[:36])], TOKENS)
    made = Node(place, run)
    yield made
    made.end()


def cap_by(strategy: Strategy, version: str) -> int:
    """What the capacity arithmetic says of these flags."""
    each = states_per_request(strategy, version=version, overlap=False)
    return min(ASKED, STATES // each)


def test_another_strategy_under_load_gives_the_slots_that_were_worked_out_and_loses_nothing(
    node: Node, run: Pipeline
) -> None:
    version = node.wait_ready(0).version
    few, many = cap_by("no_buffer", version), cap_by("no_radix", version)
    before = node.full("no_buffer")
    run.watch_until(lambda counts: counts.completed >= BEFORE, f"{BEFORE} answers")

    said, took_s = node.restart("no_radix")
    record = node.record()
    after = node.full("no_radix")
    left = [process.pid for process in node.members()]
    rest_s = run.watch_to_the_end(node.process, END_LIMIT_S)

    code, verdict = run.verify()
    completed, failed, counts = run.completions(), run.failures(), run.counts()
    marks = [mark.text for mark in run.marks()]
    say(
        "restart",
        version=version,
        caps=node.caps(),
        bounds=[before.bound, after.bound],
        most_running=node.most_running(),
        took=f"{took_s:.0f} s",
        end=f"{rest_s:.0f} s later",
        marks=marks,
        said=said.splitlines()[-1],
    )
    assert exit_code(node.process) == 0, node.process.tail()
    assert [pid for pid in left if process_start(pid)] == []

    # By the log of its starts, the supervisor's record, and the worker group's figures.
    assert (few, many) == (4, 12)
    assert node.caps() == node.most_running() == [few, many]
    assert (record.strategy, record.cap, record.restarts) == ("no_radix", many, 1)
    assert (before.cap, before.bound) == (few, bound_of("auto", few))
    assert (after.cap, after.bound) == (many, bound_of("auto", many))
    assert f"{NAME}: no_buffer {few} slots -> no_radix {many} slots" in said

    changed = f"strategy no_buffer -> no_radix, cap {few} -> {many}"
    assert f"servers are restarted: {NAME}, strategy no_radix" in marks
    assert f"server of {NAME} restarted: {changed}" in marks

    assert code == 0, verdict
    assert failed == []
    assert set(Counter(row["id"] for row in completed).values()) == {1}
    assert len(completed) == counts.total == 200
    assert {row["attempts"] for row in completed} == {1}
    assert (counts.duplicates_dropped, counts.retries) == (0, 0)
    # What was open at the drain ended by itself: nothing was asked twice.
    answered = node.statuses()
    assert answered["/v1/chat/completions", 200] + answered["/v1/completions", 200] == 200
