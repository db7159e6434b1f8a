"""Random walks over keeping turns: what is kept is one conversation, and no kept turn is lost.

Every turn says on which text it was generated, so a turn behind another process's turn would show.
"""

import hashlib
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

from common import names
from common.models import KeptTurns
from tests.support.queue_world import QueueWorld
from tests.support.redis_server import RedisServer

PROMPTS = 1
NUMBERS = st.integers(0, PROMPTS - 1)
PROCESSES = st.sampled_from(["e1", "e2"])


@pytest.fixture
def client(any_redis: RedisServer) -> Iterator["redis.Redis"]:
    with any_redis.client() as client:
        yield client


def on(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=4).hexdigest()


class Walk(RuleBasedStateMachine):
    """Two processes that serve, freeze and lose answers.

    The model: (process, prompt) -> (try, its conversation so far), and prompt -> what Redis has
    said to have kept in this try.
    """

    def __init__(self, client: "redis.Redis") -> None:
        super().__init__()
        self.client = client
        self.talks: dict[tuple[str, int], tuple[int, bytes]] = {}
        self.kept: dict[int, bytes] = {}
        self.serial = 0

    @initialize()
    def begin(self) -> None:
        self.client.flushall()
        self.world = QueueWorld(self.client, prompts=PROMPTS)
        self.processes = {epoch: self.world.jobs(epoch) for epoch in ("e1", "e2")}

    @rule(epoch=PROCESSES)
    def claim(self, epoch: str) -> None:
        for claim in self.world.claim(self.processes[epoch], 1).claims:
            number = self.world.number(claim.key)
            assert claim.turns == self.kept.get(number, b""), "a kept turn is lost"
            self.talks[epoch, number] = claim.try_, claim.turns

    @rule(epoch=PROCESSES, number=NUMBERS, calls=st.integers(0, 2))
    def turn(self, epoch: str, number: int, calls: int) -> None:
        """Generate a turn; keep it, perhaps not yet, perhaps twice since an answer was lost."""
        if (epoch, number) not in self.talks:
            self.claim(epoch)
        if (epoch, number) not in self.talks:
            return
        self.serial += 1
        try_, text = self.talks[epoch, number]
        text += f"{self.serial} by {epoch} on {on(text)}\n".encode()
        self.talks[epoch, number] = try_, text
        for word in [self._keep(epoch, number) for _ in range(calls)]:
            if word == "ok":
                assert text.startswith(self.kept.get(number, b""))
                self.kept[number] = text
            elif word == "repeated":
                assert self.kept[number].startswith(text)
            else:
                assert word in {"other", "stolen", "gone"}
                # What the process does then: it lets the prompt go.
                self.talks.pop((epoch, number), None)

    def _keep(self, epoch: str, number: int) -> str:
        try_, text = self.talks[epoch, number]
        key, fingerprint, _ = self.world.item(number)
        turns = KeptTurns(
            run=self.world.run,
            uid=self.world.record.uid,
            key=key,
            fingerprint=fingerprint,
            try_=try_,
            turns=text,
        )
        [word] = self.processes[epoch].keep_turns([turns])
        return word

    @rule(epoch=PROCESSES, number=NUMBERS, died=st.booleans(), forgets=st.booleans())
    def give_back(self, epoch: str, number: int, *, died: bool, forgets: bool) -> None:
        self.processes[epoch].give_back(self.world.held([number]), died=died)
        if forgets:
            self.talks.pop((epoch, number), None)

    @rule(epoch=PROCESSES, numbers=st.lists(NUMBERS, min_size=1))
    def reap(self, epoch: str, numbers: list[int]) -> None:
        self.world.expire_leases(numbers)
        self.processes[epoch].reap()

    @rule(epoch=PROCESSES)
    def renew(self, epoch: str) -> None:
        mine = sorted(number for who, number in self.talks if who == epoch)
        self.processes[epoch].renew(self.world.held(mine))

    @rule(epoch=PROCESSES, number=NUMBERS)
    def fail_and_try_again(self, epoch: str, number: int) -> None:
        try_, _ = self.talks.pop((epoch, number), (0, b""))
        if self.world.finish(self.processes[epoch], [number], "failed", try_=try_) == ["ok"]:
            self.world.add([number], retry=True)
            self.kept.pop(number, None)

    @invariant()
    def what_is_kept_is_one_conversation(self) -> None:
        if not hasattr(self, "world"):
            return
        for number in range(PROMPTS):
            kept = self.client.hget(names.rq_job(self.world.hex(number)), "turns") or b""
            assert kept == self.kept.get(number, b"")
            before = b""
            for line in kept.splitlines(keepends=True):
                assert line.endswith(f"on {on(before)}\n".encode())
                before += line


def test_whoever_serves_a_prompt_it_keeps_one_conversation_and_loses_no_turn(
    client: "redis.Redis",
) -> None:
    run_state_machine_as_test(
        cast("type[RuleBasedStateMachine]", partial(Walk, client)),
        settings=settings(
            max_examples=50,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
