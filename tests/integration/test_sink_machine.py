"""Random schedules of kills, freezes, lost answers and rewinds: each key is stored once.

A frozen sink is a thread that stands at a crash point until it is thawed; a killed one ends there.
Redis is rewound by starting it on an older copy of its append-only file.
"""

import contextlib
import threading
from pathlib import Path

import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from typing_extensions import override

from common import crashpoints, names
from common.connect import client_for
from common.errors import HeadraceError
from common.queue.sinklease import new_token
from common.reconcile import adopt_run
from tests.support.memory_store import MemoryStore
from tests.support.redis_server import RedisServer
from tests.support.rewind import rewind, save_point
from tests.support.run_world import RUN, World
from tests.support.sinks import KilledError, drain
from workers.sink.batch import Limits
from workers.sink.run_sink import RunSink

MOST_PROMPTS = 40
PARTITIONS = 2
LIMIT_S = 150.0

numbers = st.integers(0, MOST_PROMPTS - 1)
sink_names = st.sampled_from(["one", "other"])


class Interruption:
    """What happens to one sink's step: it dies or stands still at the n-th point it reaches."""

    def __init__(self, nth: int, *, freezes: bool) -> None:
        self.left = nth
        self.freezes = freezes
        self.frozen = threading.Event()
        self.thaw = threading.Event()

    def reached(self, point: str) -> None:
        self.left -= 1
        if self.left != 0:
            return
        if not self.freezes:
            raise KilledError(point)
        self.frozen.set()
        if not self.thaw.wait(LIMIT_S):
            raise KilledError(point)


class SinkMachine(RuleBasedStateMachine):
    """Two sinks, one run, one Redis that may go back."""

    conditional = True
    may_freeze = True
    may_rewind = True

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.stepping: set[int] = set()
        self.clients: list[redis.Redis] = []
        self.server = RedisServer("valkey", appendonly=True, appendfsync="always").start()
        self.store = MemoryStore(conditional=self.conditional, fault=self._fault)
        self.world = World(
            self.server.client(),
            self.store,
            prompts=6,
            partitions=PARTITIONS,
            sealed=True,
            window=4,
        )
        self.points: list[Path] = []
        self.sinks: dict[str, RunSink] = {}
        self.frozen: list[tuple[threading.Thread, Interruption]] = []
        self.interruptions: dict[int, Interruption] = {}
        crashpoints.watcher = self._watch

    # --- The world -------------------------------------------------------------------------------

    @rule(count=st.integers(1, 6), queue=st.booleans())
    def accept(self, count: int, *, queue: bool) -> None:
        if self.world.accepted + count <= MOST_PROMPTS:
            self.world.accept(count, queue=queue)

    @rule(
        chosen=st.lists(numbers, min_size=1, max_size=8, unique=True),
        outcome=st.sampled_from(["completed", "completed", "failed", "cancelled"]),
    )
    def finish(self, chosen: list[int], outcome: str) -> None:
        for number in chosen:
            if number < self.world.accepted:
                entry = self.world.ledger.lookup([self.world.key(number)])[0]
                self.world.finish(
                    [number],
                    outcome,  # type: ignore[arg-type]
                    try_=entry.try_ if entry else 1,
                    text=f"{outcome}{number}" * (number % 3 + 1),
                )

    @rule(chosen=st.lists(numbers, min_size=1, max_size=8, unique=True))
    def retry(self, chosen: list[int]) -> None:
        self.world.retry([number for number in chosen if number < self.world.accepted])

    @rule()
    def time_passes(self) -> None:
        """Leases of sinks and of the maintenance end."""
        for partition in range(PARTITIONS):
            if self.world.client.exists(names.sink(RUN, partition)):
                self.world.client.hset(names.sink(RUN, partition), "deadline_ms", 1)
        self.world.client.delete(names.maintenance(RUN))

    # --- Sinks -----------------------------------------------------------------------------------

    @rule(name=sink_names)
    def step(self, name: str) -> None:
        self._step(self._sink(name))

    @rule(name=sink_names, nth=st.integers(1, 12))
    def die_in_a_step(self, name: str, nth: int) -> None:
        self._step(self._sink(name), Interruption(nth, freezes=False))
        self.sinks.pop(name)

    @precondition(lambda self: self.may_freeze and len(self.frozen) < 2)
    @rule(name=sink_names, nth=st.integers(1, 12))
    def freeze_in_a_step(self, name: str, nth: int) -> None:
        sink, interruption = self._sink(name), Interruption(nth, freezes=True)
        thread = threading.Thread(target=self._step, args=[sink, interruption], daemon=True)
        thread.start()
        while thread.is_alive() and not interruption.frozen.wait(0.005):
            pass
        if interruption.frozen.is_set():
            # Its process is frozen: another takes its place under the name.
            self.frozen.append((thread, interruption))
            self.sinks.pop(name)

    @precondition(lambda self: self.frozen)
    @rule(which=st.integers(0, 1))
    def thaw(self, which: int) -> None:
        thread, interruption = self.frozen.pop(which % len(self.frozen))
        interruption.thaw.set()
        thread.join(LIMIT_S)
        assert not thread.is_alive()

    @rule(kind=st.sampled_from(["away", "lost"]), after=st.integers(0, 6))
    def spoil_a_call_of_the_store(self, kind: str, after: int) -> None:
        self.faults = [""] * after + [kind]

    # --- Redis -----------------------------------------------------------------------------------

    @precondition(lambda self: self.may_rewind)
    @rule()
    def remember(self) -> None:
        self.points.append(save_point(self.server, f"point{len(self.points)}"))

    @precondition(lambda self: self.may_rewind and self.points)
    @rule(which=st.integers(0, 5))
    def go_back(self, which: int) -> None:
        rewind(self.server, self.points[which % len(self.points)])
        self.world.use(self.server.client())

    @rule()
    def restart(self) -> None:
        self.server.restart()
        self.world.use(self.server.client())

    @precondition(lambda self: self.may_rewind)
    @rule()
    def lose_everything(self) -> None:
        self.server.wipe()
        self.points.clear()
        self.world.use(self.server.client())
        adopt_run(self.world.client, self.store)

    # --- What must hold --------------------------------------------------------------------------

    @invariant()
    def nothing_is_stored_twice(self) -> None:
        self.world.check_store()

    @override
    def teardown(self) -> None:
        """Let everything come to its end: each accepted prompt has one current record."""
        try:
            while self.frozen:
                self.thaw(0)
            self.faults.clear()
            self.time_passes()
            self.world.client.delete(names.sinks(RUN))
            self._complete()
        finally:
            crashpoints.watcher = None
            self.world.close()
            for client in self.clients:
                client.close()
            self.server.remove()

    def _complete(self) -> None:
        sink = self._sink("last")
        for _ in range(10):
            sink.step()
        for number in range(self.world.accepted):
            entry = self.world.ledger.lookup([self.world.key(number)])[0]
            if entry is None:
                self.world.queue([number])
                entry = self.world.ledger.lookup([self.world.key(number)])[0]
            assert entry is not None
            if entry.state == "queued":
                assert self.world.finish([number], try_=entry.try_) == ["ok"]
        drain(sink)
        assert len(self.world.current()) == self.world.accepted
        self.world.check_store()
        self.world.check_counts()

    def _sink(self, name: str) -> RunSink:
        if name not in self.sinks:
            self.clients.append(client_for(self.server.url))
            self.sinks[name] = RunSink(
                self.clients[-1],
                self.store,
                self.world.record,
                token=new_token(),
                limits=Limits(rows=3),
            )
        return self.sinks[name]

    def _step(self, sink: RunSink, interruption: Interruption | None = None) -> None:
        thread = threading.get_ident()
        self.stepping.add(thread)
        if interruption:
            self.interruptions[thread] = interruption
        try:
            with contextlib.suppress(HeadraceError, KilledError):
                sink.step(flush=False)
        finally:
            self.interruptions.pop(thread, None)
            self.stepping.discard(thread)

    def _watch(self, point: str) -> None:
        interruption = self.interruptions.get(threading.get_ident())
        if interruption:
            interruption.reached(point)

    def _fault(self, _operation: str, _name: str) -> str | None:
        if threading.get_ident() not in self.stepping or not self.faults:
            return None
        return self.faults.pop(0) or None


class WithoutConditionsAndWithoutFreezes(SinkMachine):
    """A store that ignores conditions is sound under rewinds while no sink's PUT is in flight."""

    conditional = False
    may_freeze = False


class WithoutConditionsAndWithoutRewinds(SinkMachine):
    """A store that ignores conditions is sound under freezes while Redis is not rewound."""

    conditional = False
    may_rewind = False


CHECKS = settings(
    max_examples=6,
    stateful_step_count=30,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)

TestSinks = SinkMachine.TestCase
TestSinks.settings = CHECKS
TestWithoutConditionsAndWithoutFreezes = WithoutConditionsAndWithoutFreezes.TestCase
TestWithoutConditionsAndWithoutFreezes.settings = CHECKS
TestWithoutConditionsAndWithoutRewinds = WithoutConditionsAndWithoutRewinds.TestCase
TestWithoutConditionsAndWithoutRewinds.settings = CHECKS
