"""Sinks, feeding, reconcile, audits: what moves on and mends, killed or frozen anywhere."""

from typing import Any, ClassVar

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from typing_extensions import override

from common import names
from common.feeder import Feeder
from common.queue.sinklease import PartitionLostError
from common.reconcile import reconcile
from common.reconcile_steps import Report
from common.restore import audit_and_restore
from tests.machine.process import GOOD, Deed, Fate, Process
from tests.machine.rules_base import ENDS, FATES, RULE_RUNS, SINKS, WORKERS, hit, often
from tests.machine.rules_workers import WorkerRules
from workers.sink.run_sink import RunSink, Standing


class SinkRules(WorkerRules):
    """Rules of all that needs a store."""

    may_freeze_sinks = True

    def _step(self, name: str, run: str, fate: Fate, steps: int) -> None:
        if fate.kind == "freezes" and not self.may_freeze_sinks:
            fate = GOOD
        self.sink_step(name, run, fate)
        for _ in range(steps):
            self.sink_step(name, run)

    stepping: ClassVar = {
        "name": SINKS,
        "run": RULE_RUNS,
        "fate": FATES,
        "steps": st.integers(0, 1),
    }
    step = often(**stepping)(_step)
    step_again = often(**stepping)(_step)
    step_on = often(**stepping)(_step)

    def _hard_step(self, name: str, run: str, worker: str, fate: Fate) -> None:
        """Something is there to be stored, and its sink dies or freezes on the way."""
        if fate.kind == "freezes" and not self.may_freeze_sinks:
            fate = msgspec.structs.replace(fate, kind="dies")
        self.make_results(worker)
        self.sink_step(name, run, fate)

    hard_stepping: ClassVar = {"name": SINKS, "run": RULE_RUNS, "worker": WORKERS, "fate": ENDS}
    hard_step = often(**hard_stepping)(_hard_step)
    hard_step_again = often(**hard_stepping)(_hard_step)
    hard_step_on = often(**hard_stepping)(_hard_step)

    @override
    def sink_step(self, name: str, run: str, fate: Fate = GOOD) -> Standing | None:
        sink = self.world.sink(name)
        run_sink = self.world.run_sink(sink, run)
        if run_sink is None:
            return None
        stored = run_sink.stored_rows
        deed = self.world.act(sink.process, run_sink.step, fate=fate)
        hit("sink " + deed.word)
        if run_sink.stored_rows > stored:
            hit("sink stored")
        if deed.word in {"killed", "frozen", "interrupted"}:
            # Another process takes its place under the name.
            del self.world.sinks[name]
        elif deed.word == "done":
            hit(f"sink stands {deed.value.name}")
            if deed.value is Standing.GONE:
                del sink.runs[run]
            return deed.value  # type: ignore[no-any-return]
        return None

    def renew_sink(self, name: str) -> None:
        sink = self.world.sink(name)

        def renew(run_sink: RunSink) -> None:
            for lease in list(run_sink.leases.values()):
                try:
                    lease.take()
                except PartitionLostError:
                    return

        for run_sink in sink.runs.values():
            self.world.act(sink.process, lambda one=run_sink: renew(one))  # type: ignore[misc]
        hit("sink renews")

    @rule(name=SINKS)
    def stop(self, name: str) -> None:
        """SIGTERM: store what there is, leave."""
        sink = self.world.sinks.pop(name, None)
        for run_sink in sink.runs.values() if sink else ():
            for _ in range(3):
                self.world.act(sink.process, lambda one=run_sink: one.step(flush=True))  # type: ignore[misc, union-attr]
            self.world.act(sink.process, run_sink.release)  # type: ignore[union-attr]
            hit("sink stops")

    @rule(run=RULE_RUNS, deep=st.booleans(), fate=FATES)
    def reconcile(self, run: str, *, deep: bool, fate: Fate) -> None:
        record = self.world.record(run)
        if record is None:
            return

        def call(process: Process) -> Any:
            return reconcile(process.client, process.store(record.output), record, deep=deep)

        def look(deed: Deed) -> None:
            if isinstance(deed.value, Report):
                assert deed.value.forgotten == 0, "an end was forgotten whose record is there"
                if deed.value.dropped:
                    hit("reconcile dropped")
                if deed.value.taught:
                    hit("reconcile taught")

        hit("reconcile " + self.world.command(call, fate=fate, then=look).word)

    @rule(run=RULE_RUNS, fate=FATES)
    def feed(self, run: str, fate: Fate) -> None:
        record = self.world.record(run)
        if record is None:
            return

        def call(process: Process) -> Any:
            return Feeder(process.client, process.store(record.output), record).step()

        def look(deed: Deed) -> None:
            hit("feed some" if deed.value else "feed none")

        self.world.command(call, fate=fate, then=look)

    @rule(run=RULE_RUNS, fate=FATES)
    def audit(self, run: str, fate: Fate) -> None:
        record = self.world.record(run)
        if record is None:
            return

        def call(process: Process) -> Any:
            return audit_and_restore(process.client, process.store(record.output), record)

        def look(deed: Deed) -> None:
            if deed.word == "done" and (
                deed.value.relisted or deed.value.restored or deed.value.cancelled
            ):
                hit("audit put back")

        hit("audit " + self.world.command(call, fate=fate, then=look).word)

    @rule(run=RULE_RUNS, partition=st.integers(0, 1), seldom=st.integers(0, 3))
    def somebody_adds_to_a_stream(self, run: str, partition: int, seldom: int) -> None:
        if self.world.record(run) is not None and not seldom:
            self.world.client.xadd(names.results(run, partition), {"what": "is this"})
            hit("garbage")

    def _thaw(self, which: int) -> None:
        self.world.thaw(which)
        hit("thaw")

    is_frozen = precondition(lambda self: self.world.frozen)
    thaw = is_frozen(often(which=st.integers(0, 5))(_thaw))
    thaw_another = is_frozen(often(which=st.integers(0, 5))(_thaw))
