"""Random walks over the queue's calls: the counters add up after every step."""

from collections.abc import Iterator
from functools import partial
from typing import cast

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from typing_extensions import override

from common import names
from common.models import Outcome
from common.queue import Jobs
from common.queue.audit import audit_run
from tests.support.queue_world import QueueWorld
from tests.support.redis_server import RedisServer

PROMPTS = 8
EXAMPLES = 25
NUMBERS = st.integers(0, PROMPTS - 1)
PROCESSES = st.sampled_from(["e1", "e2"])
OUTCOMES = st.sampled_from(["completed", "failed", "cancelled"])


@pytest.fixture
def client(any_redis: RedisServer) -> Iterator["redis.Redis"]:
    with any_redis.client() as client:
        yield client


class Walk(RuleBasedStateMachine):
    """Two worker processes, a producer, and somebody with RQ's tools.

    The model: prompt -> [state, try] as the ledger should have it, and prompt -> holder.
    """

    def __init__(self, client: "redis.Redis") -> None:
        super().__init__()
        self.client = client
        self.states: dict[int, list[str | int]] = {}
        self.holders: dict[int, str] = {}
        self.memory: dict[str, dict[int, int]] = {"e1": {}, "e2": {}}
        self.records: list[tuple[int, str, int]] = []

    @initialize()
    def begin(self) -> None:
        self.client.flushall()
        self.world = QueueWorld(self.client)
        self.processes = {epoch: self.world.jobs(epoch) for epoch in ("e1", "e2")}

    # --- The producer ----------------------------------------------------------------------------

    @rule(numbers=st.lists(NUMBERS, max_size=4), retry=st.booleans())
    def enqueue(self, numbers: list[int], *, retry: bool) -> None:
        self.world.add(numbers, retry=retry)
        for number in numbers:
            state = self.states.setdefault(number, ["queued", 1])
            if retry and state[0] in {"failed", "cancelled"}:
                self.states[number] = ["queued", int(state[1]) + 1]

    # --- Worker processes ------------------------------------------------------------------------

    @rule(epoch=PROCESSES, count=st.integers(1, 4), alone=st.booleans())
    def claim(self, epoch: str, count: int, *, alone: bool) -> None:
        reply = self.world.claim(self.processes[epoch], count, alone=alone)
        assert len(reply.claims) <= count
        for claim in reply.claims:
            number = self.world.number(claim.key)
            state = self.states[number]
            assert number not in self.holders, "leased twice"
            if state[0] == "failed":  # requeued by hand
                self.states[number] = state = ["queued", int(state[1]) + 1]
            assert state == ["queued", claim.try_]
            self.holders[number] = epoch
            self.memory[epoch][number] = claim.try_

    @rule(epoch=PROCESSES, number=NUMBERS, outcome=OUTCOMES, repeat=st.booleans())
    def finish(self, epoch: str, number: int, outcome: Outcome, *, repeat: bool) -> None:
        if number not in self.memory[epoch]:
            return
        try_ = self.memory[epoch].pop(number)
        before = self.world.counts().duplicates_dropped
        result = self.world.result(number, outcome, try_=try_, repeat=repeat)
        [word] = self.processes[epoch].finish([result])
        counted = self.world.counts().duplicates_dropped - before
        if self.states[number] == ["queued", try_]:
            assert word == "ok"
            self.states[number] = [outcome, try_]
            self.holders.pop(number, None)
            self.records.append((number, outcome, try_))
        else:
            assert word == ("repeated" if repeat else "duplicate")
        assert counted == (word == "duplicate")

    @rule(epoch=PROCESSES, died=st.booleans())
    def give_back(self, epoch: str, *, died: bool) -> None:
        mine = sorted(self.memory[epoch])
        words = self.processes[epoch].give_back(self.world.held(mine), died=died)
        for number, word in zip(mine, words, strict=True):
            assert (word != "not_held") == (self.holders.get(number) == epoch)
            if word != "not_held":
                self.holders.pop(number)
        self.memory[epoch].clear()

    @rule(epoch=PROCESSES)
    def renew(self, epoch: str) -> None:
        mine = sorted(self.memory[epoch])
        words = self.processes[epoch].renew(self.world.held(mine))
        for number, word in zip(mine, words, strict=True):
            if word in {"ok", "retaken"}:
                self.holders[number] = epoch
            elif word == "gone" and self.holders.get(number) == epoch:
                self.holders.pop(number)
            assert (word == "stolen") == (self.holders.get(number) not in {None, epoch})

    @rule(epoch=PROCESSES, number=NUMBERS)
    def charge(self, epoch: str, number: int) -> None:
        if number in self.memory[epoch]:
            charged = self.processes[epoch].charge(
                self.world.run, self.world.key(number), "timeout"
            )
            assert (charged > 0) == (self.holders.get(number) == epoch)

    @rule(epoch=PROCESSES)
    def forget_all(self, epoch: str) -> None:
        """The process dies; what it held runs out or is taken over."""
        self.memory[epoch].clear()

    @rule(numbers=st.lists(NUMBERS, max_size=4), epoch=PROCESSES)
    def reap(self, numbers: list[int], epoch: str) -> None:
        if numbers:
            self.world.expire_leases(numbers)
        due = [number for number in numbers if number in self.holders]
        _, _, convicted = self.processes[epoch].reap()
        self._reaped(due, epoch, [self.world.number(claim.key) for claim in convicted])

    @rule(dead=PROCESSES, epoch=PROCESSES)
    def take_over(self, dead: str, epoch: str) -> None:
        due = [number for number, holder in self.holders.items() if holder == dead]
        _, _, convicted = self.processes[epoch].reap(dead_epoch=dead)
        self._reaped(due, epoch, [self.world.number(claim.key) for claim in convicted])

    def _reaped(self, due: list[int], epoch: str, convicted: list[int]) -> None:
        for number in due:
            self.holders.pop(number, None)
        for number in convicted:
            self.holders[number] = epoch
            self.memory[epoch][number] = int(self.states[number][1])

    # --- Somebody with RQ's tools ----------------------------------------------------------------

    @rule(number=NUMBERS)
    def requeue_by_hand(self, number: int) -> None:
        if self.client.zrem(names.rq_failed(self.world.run), self.world.hex(number)):
            self.client.hset(names.rq_job(self.world.hex(number)), "status", "queued")
            self.client.rpush(names.rq_queue(self.world.run), self.world.hex(number))

    @rule()
    def empty(self) -> None:
        for number in self.world.listed():
            self.client.delete(names.rq_job(self.world.hex(number)))
        self.client.delete(names.rq_queue(self.world.run))

    @rule(number=NUMBERS)
    def cancel_by_hand(self, number: int) -> None:
        job_id = self.world.hex(number)
        if self.client.exists(names.rq_job(job_id)):
            self.client.lrem(names.rq_queue(self.world.run), 1, job_id)
            self.client.zrem(names.rq_failed(self.world.run), job_id)
            self.client.hset(names.rq_job(job_id), "status", "canceled")
            self.client.zadd(names.rq_canceled(self.world.run), {job_id: 1})

    @rule()
    def delete_a_leased_job(self) -> None:
        for number in list(self.holders)[:1]:
            self.client.delete(names.rq_job(self.world.hex(number)))

    @rule()
    def audit_and_restore(self) -> None:
        audit_run(self.client, self.world.record)
        self.settle_cancelled()
        report = audit_run(self.client, self.world.record)
        self.world.add([self.world.number(key) for key in report.missing])

    def settle_cancelled(self) -> None:
        """Take over which prompts the audit has cancelled."""
        for number, state in self.world.states().items():
            word, try_ = state.split("/")
            if word == "cancelled" and self.states[number] == ["queued", int(try_)]:
                assert number not in self.holders
                self.states[number] = ["cancelled", int(try_)]
                self.records.append((number, "cancelled", int(try_)))

    # --- What always holds -----------------------------------------------------------------------

    @invariant()
    def the_counters_add_up_and_the_ledger_is_as_the_model(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.check()
        assert self.world.states() == {n: f"{s}/{t}" for n, (s, t) in self.states.items()}
        assert self.world.leased() == set(self.holders)

    @invariant()
    def every_end_has_one_record_and_no_try_has_two(self) -> None:
        if not hasattr(self, "world"):
            return
        letters = {"completed": "c", "failed": "f", "cancelled": "x"}
        assert sorted(self.world.entries()) == sorted(
            (n, letters[o], t) for n, o, t in self.records
        )
        assert len({(n, t) for n, _, t in self.records}) == len(self.records)

    @override
    def teardown(self) -> None:
        """Nothing is stranded: two audits and enough claims end every queued prompt."""
        if not hasattr(self, "world"):
            return
        self.world.runs.resume(self.world.run)
        for epoch in ("e1", "e2"):
            self.world.expire_leases(range(PROMPTS))
            self.processes[epoch].reap()
        finisher = self.world.jobs("e3")
        for _ in range(PROMPTS * 3):
            report = audit_run(self.client, self.world.record)
            self.world.add([self.world.number(key) for key in report.missing])
            self._finish_whatever_comes(finisher)
            if not self.world.counts().queued:
                break
        assert self.world.counts().queued == 0, self.world.states()
        assert self.world.counts().in_flight == 0
        self.world.check()

    def _finish_whatever_comes(self, finisher: Jobs) -> None:
        finisher.reap()
        for alone in (False, True):
            for claim in self.world.claim(finisher, 20, alone=alone).claims:
                number = self.world.number(claim.key)
                assert self.world.finish(finisher, [number], try_=claim.try_) == ["ok"]


def test_whatever_is_called_in_whatever_order_the_counters_add_up_and_nothing_is_stranded(
    client: "redis.Redis",
) -> None:
    run_state_machine_as_test(
        cast("type[RuleBasedStateMachine]", partial(Walk, client)),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
