"""Random walks over drains: owners die and come late, processes freeze, Redis is rewound.

Whoever restarts a server because its drain says that it is empty ends no request of a process that
is alive by its own clock, and the bound holds through it all. Time is moved as in the walk over
slots.
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
from common.queue.drains import DRAIN_TTL_MS, TRUSTED_SHARE, Drain
from common.queue.jobs import SLOT_TTL_MS
from tests.support.queue_world import SERVER, take
from tests.support.redis_server import RedisServer

BOUND = 4
MARGIN_MS = 2_000
EXAMPLES = 60
EPOCHS = st.sampled_from(["e1", "e2", "e3"])
OWNERS = st.sampled_from([0, 0, 0, 1])
WANTED = st.integers(1, BOUND)
STEPS_MS = st.sampled_from([*[1_000] * 4, 6_000, 6_000, 17_000, 21_000, 31_000])


@pytest.fixture
def client(any_redis: RedisServer) -> Iterator["redis.Redis"]:
    with any_redis.client() as client:
        yield client


class Process:
    """What one process believes, as `workers.engine.keeper` does."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.slots = self.open = self.until_ms = 0
        self.token = ""

    def may_open(self, now_ms: int) -> int:
        return 0 if self.token or not self.alive(now_ms) else self.slots

    def alive(self, now_ms: int) -> bool:
        return now_ms < self.until_ms

    def counts(self, now_ms: int) -> int:
        """Requests that it has open or may open, all in all."""
        return max(self.open, self.may_open(now_ms)) if self.alive(now_ms) else 0


class DrainWalk(RuleBasedStateMachine):
    def __init__(self, client: "redis.Redis") -> None:
        super().__init__()
        self.client = client
        self.now_ms = 0
        self.rewinds = 0
        # Until when an owner believes, by its own clock, that nobody opens anything.
        self.empty_until_ms = [0, 0]

    @initialize()
    def begin(self) -> None:
        self.client.flushall()
        self.processes = {
            epoch: Process(Jobs(self.client, epoch=epoch, group="gpu0@test", server=SERVER))
            for epoch in ("e1", "e2", "e3")
        }
        self.drains = [self._drain(), self._drain()]
        assert take(self.processes["e1"].jobs, 0, bound=BOUND, quiet=True).what == "granted"

    # --- Processes -------------------------------------------------------------------------------

    @rule(epoch=EPOCHS, wanted=WANTED, lost=st.sampled_from([*[False] * 4, True]))
    def ask(self, epoch: str, wanted: int, *, lost: bool) -> None:
        """Take or renew slots; the answer may be lost."""
        process = self.processes[epoch]
        # A bound below what is open is a smaller server's: it has ended all that was open there.
        wanted = max(wanted, process.open)
        process.slots = min(process.slots, wanted)
        reply = self._take(process, wanted)
        if reply.what == "settle":
            self._settled(reply.other)
            reply = self._take(process, wanted, settled=reply.other)
        if lost:
            return
        if reply.what == "granted":
            process.slots, process.token = reply.slots, ""
        if reply.drain is not None:
            process.slots, process.token = reply.slots, reply.drain.token
        if reply.what in {"granted", "drained"}:
            process.until_ms = self.now_ms + SLOT_TTL_MS - MARGIN_MS

    @rule(epoch=EPOCHS, wanted=WANTED)
    def work(self, epoch: str, wanted: int) -> None:
        """As most processes do most of the time."""
        self.ask(epoch, wanted, lost=False)
        self.open_some(epoch)

    def all_renew(self) -> None:
        for epoch, process in self.processes.items():
            self.work(epoch, max(1, process.slots))

    def _take(self, process: Process, wanted: int, *, settled: str = "") -> Any:
        holds = 0
        if process.alive(self.now_ms):
            holds = process.open if process.token else process.slots
        return take(
            process.jobs,
            wanted,
            bound=BOUND,
            settled=settled,
            holds=holds or None,
            heard=process.token,
            open_requests=process.open,
        )

    def _settled(self, epoch: str) -> None:
        """Its requests are aborted, which it learns now; by its own clock it is dead."""
        dead = self.processes[epoch]
        assert not dead.alive(self.now_ms) or self.rewinds
        dead.open = 0

    @rule(epoch=EPOCHS)
    def open_some(self, epoch: str) -> None:
        process = self.processes[epoch]
        if process.open < process.may_open(self.now_ms):
            assert self.now_ms >= max(self.empty_until_ms), "opened during a restart"
            process.open = process.may_open(self.now_ms)

    @rule(epoch=EPOCHS, left=st.integers(0, 1))
    def end_some(self, epoch: str, left: int) -> None:
        process = self.processes[epoch]
        process.open = min(process.open, left)

    # --- The owner -------------------------------------------------------------------------------

    @rule(owner=OWNERS)
    def drain_it(self, owner: int) -> None:
        """As it goes when nobody errs: all hear of it."""
        self.hold(owner)
        self.all_renew()
        self.all_renew()
        self.hold(owner)

    def _drain(self) -> Drain:
        return Drain(self.client, SERVER, owner="a", reason="b", limit_s=1e6)

    @rule(owner=OWNERS)
    def owner_dies(self, owner: int) -> None:
        """And is started again."""
        self.drains[owner] = self._drain()
        self.empty_until_ms[owner] = 0

    @rule(owner=OWNERS)
    def hold(self, owner: int) -> None:
        held = self.drains[owner].hold()
        self.empty_until_ms[owner] = 0
        if not held.empty:
            return
        self.empty_until_ms[owner] = self.now_ms + round(DRAIN_TTL_MS * TRUSTED_SHARE)
        for process in self.processes.values():
            if process.alive(self.now_ms):
                assert process.open == 0, "the server is restarted under an open request"
            process.open = 0

    @rule(owner=OWNERS)
    def lift(self, owner: int) -> None:
        self.drains[owner].lift()
        self.empty_until_ms[owner] = 0

    # --- Time and Redis --------------------------------------------------------------------------

    @rule(step_ms=STEPS_MS)
    def time_passes(self, step_ms: int) -> None:
        self.now_ms += step_ms
        held = cast("dict[bytes, bytes]", self.client.hgetall(names.slots(SERVER)))
        if held:
            self.client.hset(names.slots(SERVER), mapping=cast("Any", shifted(held, step_ms)))
        left_ms = self.client.pttl(names.drain(SERVER))
        if left_ms > 0:
            self.client.pexpire(names.drain(SERVER), left_ms - step_ms)

    @rule(epoch=EPOCHS, drain=st.booleans())
    def forget(self, epoch: str, *, drain: bool) -> None:
        """Redis restarts on what it knew before this process, perhaps an owner too, had spoken."""
        self.rewinds += 1
        self.client.hdel(names.slots(SERVER), epoch)
        self.client.hset(names.slots(SERVER), "run_id", f"before-{self.rewinds}")
        if drain:
            self.client.delete(names.drain(SERVER))
        self.empty_until_ms = [0, 0]

    @invariant()
    def the_processes_together_never_have_more_open_than_the_bound(self) -> None:
        if hasattr(self, "processes"):
            assert sum(each.counts(self.now_ms) for each in self.processes.values()) <= BOUND


def shifted(held: dict[bytes, bytes], step_ms: int) -> dict[bytes, bytes]:
    """Let every instant in a slots hash lie further back."""

    def one(name: bytes, value: bytes) -> bytes:
        if value.startswith(b"{"):
            holder = msgspec.json.decode(value)
            return msgspec.json.encode(holder | {"deadline_ms": holder["deadline_ms"] - step_ms})
        return b"%d" % (int(value) - step_ms) if name == b"since" else value

    return {name: one(name, value) for name, value in held.items()}


def test_an_empty_server_is_empty_and_the_bound_holds_whoever_dies_or_forgets(
    client: "redis.Redis",
) -> None:
    run_state_machine_as_test(
        cast("type[RuleBasedStateMachine]", partial(DrainWalk, client)),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=25,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
