"""Random walks over slots: processes freeze, die and lag, Redis is rewound, and the bound holds.

Time is moved by shifting what Redis holds into the past, and the processes' own clocks with it.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import msgspec
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
from common.queue import Jobs
from common.queue.jobs import SLOT_TTL_MS
from tests.support.queue_world import SERVER, take
from tests.support.redis_server import RedisServer

BOUND = 8
MARGIN_MS = 2_000
EPOCHS = st.sampled_from(["e1", "e2", "e3"])


@pytest.fixture
def client(any_redis: RedisServer) -> Iterator["redis.Redis"]:
    with any_redis.client() as client:
        yield client


class Process:
    """What one process believes: its slots, and until when, by its own clock."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.slots = 0
        self.until_ms = 0

    def believes(self, now_ms: int) -> int:
        return self.slots if now_ms < self.until_ms else 0


class SlotWalk(RuleBasedStateMachine):
    def __init__(self, client: "redis.Redis") -> None:
        super().__init__()
        self.client = client
        self.now_ms = 0
        self.point: dict[bytes, bytes] | None = None
        self.rewinds = 0

    @initialize()
    def begin(self) -> None:
        self.client.flushall()
        self.processes = {
            epoch: Process(Jobs(self.client, epoch=epoch, group="gpu0@test", server=SERVER))
            for epoch in ("e1", "e2", "e3")
        }

    @rule(epoch=EPOCHS, wanted=st.integers(1, BOUND), quiet=st.booleans())
    def ask(self, epoch: str, wanted: int, *, quiet: bool) -> None:
        """Take or renew, as the keeper does, with whatever the server says of itself."""
        process = self.processes[epoch]
        # On a Redis that never knew the server, quiet means that nobody is about to open anything.
        quiet = quiet and (self.rewinds > 0 or not self._believed())
        holds = process.believes(self.now_ms) or None
        reply = take(process.jobs, wanted, bound=BOUND, quiet=quiet, holds=holds)
        if reply.what == "settle":
            # Whoever is settled is past its own clock: it opens nothing, its requests are ended.
            assert self.processes[reply.other].believes(self.now_ms) == 0 or self.rewinds
            reply = take(
                process.jobs, wanted, bound=BOUND, settled=reply.other, quiet=quiet, holds=holds
            )
        if reply.what == "granted":
            process.slots = reply.slots
            process.until_ms = self.now_ms + SLOT_TTL_MS - MARGIN_MS

    @rule(epoch=EPOCHS)
    def give_up(self, epoch: str) -> None:
        process = self.processes[epoch]
        take(process.jobs, 0, bound=BOUND)
        process.slots = 0

    @rule(step_ms=st.sampled_from([1_000, 5_000, 17_000, 21_000]))
    def time_passes(self, step_ms: int) -> None:
        self.now_ms += step_ms
        self._shift(step_ms)
        if self.point is not None:
            self.point = shifted(self.point, step_ms)

    @rule()
    def remember(self) -> None:
        """A snapshot, an old replica: what Redis will come back with."""
        self.point = cast("dict[bytes, bytes]", self.client.hgetall(names.slots(SERVER)))

    @rule()
    def rewind(self) -> None:
        """Redis restarts on what it remembers, with another run_id."""
        if not self.point:
            return
        self.rewinds += 1
        self.client.delete(names.slots(SERVER))
        kept = self.point | {b"run_id": b"before-%d" % self.rewinds}
        self.client.hset(names.slots(SERVER), mapping=cast("Any", kept))

    @invariant()
    def the_processes_together_never_hold_more_than_the_bound(self) -> None:
        if hasattr(self, "processes"):
            assert self._believed() <= BOUND

    def _believed(self) -> int:
        return sum(process.believes(self.now_ms) for process in self.processes.values())

    def _shift(self, step_ms: int) -> None:
        held = cast("dict[bytes, bytes]", self.client.hgetall(names.slots(SERVER)))
        if held:
            later = shifted(held, step_ms)
            self.client.hset(names.slots(SERVER), mapping=cast("Any", later))


def shifted(held: dict[bytes, bytes], step_ms: int) -> dict[bytes, bytes]:
    """Let every instant in a slots hash lie further back."""

    def one(name: bytes, value: bytes) -> bytes:
        if value.startswith(b"{"):
            holder = msgspec.json.decode(value)
            return msgspec.json.encode(holder | {"deadline_ms": holder["deadline_ms"] - step_ms})
        if name == b"since":
            return b"%d" % (int(value) - step_ms)
        return value

    return {name: one(name, value) for name, value in held.items()}


def test_whatever_happens_to_processes_and_redis_the_slots_stay_within_the_bound(
    client: "redis.Redis",
) -> None:
    run_state_machine_as_test(
        cast("type[RuleBasedStateMachine]", partial(SlotWalk, client)),
        settings=settings(
            max_examples=40,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
