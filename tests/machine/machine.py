"""The machine: all rules, the checks after each step, and the healing at the end."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from typing_extensions import override

from producer import forget
from producer.meter import Meter
from tests.machine import heal
from tests.machine.checks import Checks
from tests.machine.process import GOOD, Fate, Process
from tests.machine.rules_base import RULE_RUNS, SINKS, WORKERS, hit
from tests.machine.rules_deaths import DeathRules
from tests.machine.rules_producer import ProducerRules
from tests.machine.rules_redis import RedisRules, ToolRules
from tests.machine.rules_sinks import SinkRules
from tests.machine.rules_workers import call_redis
from tests.machine.world import HITS, World, playing

MINOR = ["pause", "priority", "charge", "clean", "suspend", "renew a sink"]


class Machine(ProducerRules, SinkRules, DeathRules, RedisRules, ToolRules):
    """Everything, on outputs that honour conditions."""

    conditional = True
    directory = False
    may_poison = True

    def __init__(self) -> None:
        super().__init__()
        self.world = World(conditional=self.conditional, directory=self.directory)
        self.world.may_poison = self.may_poison and not self.directory
        self.checks = Checks(self.world)
        self._playing = playing(self.world)
        self._playing.__enter__()

    @initialize()
    def begin(self) -> None:
        """Every example begins with some prompts in each run."""
        for run, numbers, window in (("alpha", [0, 1, 2, 3], None), ("beta", [0, 1, 2, 3, 4], 3)):
            self._enqueue(
                run,
                "one",
                numbers,
                changed=False,
                samples=1,
                accept_changes=False,
                retry_failed=False,
                keep_open=False,
                window=window,
                fate=GOOD,
            )

    @rule(what=st.sampled_from(MINOR), run=RULE_RUNS, name=WORKERS, sink=SINKS, on=st.booleans())
    def do_something_minor(self, what: str, run: str, name: str, sink: str, *, on: bool) -> None:
        """One rule for what seldom makes a difference."""
        if what == "pause":
            self.pause(run, on=on)
        elif what == "priority":
            self.set_priority_and_window(run, int(on), 3 if on else 1000)
        elif what == "charge":
            self.charge(name)
        elif what == "clean":
            self.clean_registries(run)
        elif what == "suspend":
            self.suspend_or_resume(on=on)
        else:
            self.renew_sink(sink)

    @precondition(lambda self: self.may_rewind)
    @rule(name=SINKS, run=RULE_RUNS, worker=WORKERS, nth=st.integers(3, 8), goes_on=st.booleans())
    def let_the_past_write(
        self, name: str, run: str, worker: str, nth: int, *, goes_on: bool
    ) -> None:
        """A sink freezes, Redis goes back behind its batch and on, then the sink wakes up."""
        frozen = len(self.world.frozen)
        self._hard_step(name, run, worker, Fate(kind="freezes", nth=nth))
        if len(self.world.frozen) == frozen or not self.world.points:
            return
        self.rewind(len(self.world.points) - 1)
        self.sink_step("one", run)
        for _ in range(2 * goes_on):
            self.make_results(worker)
            self.sink_step("one", run)
        self.checks.all()
        self.world.thaw(frozen)
        hit("the past writes")
        self.checks.all()
        self.sink_step("one", run)

    @invariant()
    def all_holds(self) -> None:
        HITS["steps"] += 1
        self.checks.all()
        if self.may_rewind:
            self.world.remember(every=4, most=5)

    @override
    def teardown(self) -> None:
        try:
            heal.heal(self)
            heal.come_to_the_end(self)
            for run in heal._made(self.world):
                heal.prove(self, run)
            HITS["examples"] += 1
        finally:
            self._playing.__exit__(None, None, None)
            self.world.close()

    def forget_run(self, run: str) -> None:
        """End a forget that was begun."""

        def call(process: Process) -> Any:
            plan = forget.plan(process.client, run, lose_results=True)
            return forget.forget(process.client, plan, lose_results=True, meter=Meter)

        deed = self.world.command(call, fate=GOOD, then=lambda _: None)
        assert deed.word == "done", deed.error

    def work_off(self, name: str) -> None:
        """Do all that can be claimed now."""
        worker = self.world.worker(name)
        self._reaped(worker, call_redis(self.world, worker, worker.jobs.reap), "reap at the end")
        for _ in range(30):
            call_redis(self.world, worker, lambda: worker.take_slots(3))
            call_redis(self.world, worker, lambda: worker.jobs.renew(worker.held))
            deed = call_redis(self.world, worker, lambda: worker.claim(5))
            for claim in deed.value or ():
                self._claimed(claim)
            self.send_results(worker)
            if not worker.open:
                return
            while worker.open:
                self.answer(
                    name, "completed", poison=False, which=0, all_=True, send=True, loses=()
                )


class WithoutConditionsAndWithoutFreezes(Machine):
    """A store that ignores conditions is sound under rewinds while no sink's PUT is in flight."""

    conditional = False
    may_freeze_sinks = False


class WithoutConditionsAndWithoutRewinds(Machine):
    """A store that ignores conditions is sound under freezes without rewinds and poison."""

    conditional = False
    may_rewind = False
    may_poison = False


class OnDirectories(Machine):
    """Outputs that are real directories."""

    directory = True
