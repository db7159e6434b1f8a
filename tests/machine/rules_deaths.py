"""Worker processes that die, freeze and are overtaken, and what others make of their leases."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.machine.process import Deed
from tests.machine.rules_base import WORKERS, hit
from tests.machine.rules_workers import LOSSES, OUTCOMES, WorkerRules, call_redis
from tests.machine.workers import Worker


class DeathRules(WorkerRules):
    """Rules of what happens to worker processes."""

    @rule(name=WORKERS, other=WORKERS, outcome=OUTCOMES, keeps=st.integers(0, 1), loses=LOSSES)
    def overtake(
        self, name: str, other: str, outcome: str, keeps: int, loses: tuple[str, ...]
    ) -> None:
        """A process freezes beyond its leases; another does its work; then it wakes up."""
        self.claim(name, 3, ())
        late = self._at_work(name)
        if late is None or not late.open or other == name:
            return
        self.world.pass_time(65_000)
        quick = self._at_work(other)
        if quick is not None:
            self._reaped(quick, call_redis(self.world, quick, quick.jobs.reap), "reap")
            self._work(other, 4, keeps, outcome, (), sends=True)
        if keeps:
            self.renew(name, ())
            self.checks.all()
        self.answer(name, outcome, poison=False, which=0, all_=True, send=True, loses=loses)

    @rule(name=WORKERS, silent=st.booleans())
    def leases_run_out(self, name: str, *, silent: bool) -> None:
        """All others are silent for longer than a lease; what they held is another's to do."""
        for other, silenced in self.world.workers.items():
            if other != name and silent:
                silenced.frozen = max(silenced.frozen, 3)
        self.world.pass_time(65_000)
        worker = self._at_work(name)
        if worker is not None:
            deed = call_redis(self.world, worker, worker.jobs.reap)
            self._reaped(worker, deed, "reap")

    @rule(name=WORKERS)
    def die(self, name: str) -> None:
        """SIGKILL: what it held runs out, or is taken over; its requests stay open."""
        if name in self.world.workers:
            worker = self.world.workers.pop(name)
            self.dead_epochs.append((worker.epoch, worker.server))
            hit("die holding" if worker.held else "die idle")

    @rule(name=WORKERS)
    def freeze_or_wake(self, name: str) -> None:
        worker = self.world.worker(name)
        worker.frozen = 0 if worker.frozen else 4
        hit("freeze" if worker.frozen else "wake")

    @rule(name=WORKERS, steady=st.booleans())
    def reap(self, name: str, *, steady: bool) -> None:
        worker = self._at_work(name)
        if worker is None:
            return
        deed = call_redis(self.world, worker, lambda: worker.jobs.reap(steady=steady))
        self._reaped(worker, deed, "reap")

    @rule(name=WORKERS, which=st.integers(0, 3))
    def take_over(self, name: str, which: int) -> None:
        """A process that starts ends what a dead one of its server left."""
        worker = self._at_work(name)
        dead = [epoch for epoch, server in self.dead_epochs if worker and server is worker.server]
        if worker is None or not dead or worker.held:
            return
        epoch = dead[which % len(dead)]
        worker.server.abort(epoch)
        deed = call_redis(self.world, worker, lambda: worker.jobs.reap(dead_epoch=epoch))
        self._reaped(worker, deed, "take over")
        call_redis(self.world, worker, lambda: worker._take(0, settled=epoch))
        worker.slots = 0

    def _reaped(self, worker: Worker, deed: Deed, what: str) -> None:
        if deed.word != "done":
            return
        back, parked, convicted = deed.value
        if back or parked:
            hit(what)
        for claim in convicted:
            hit("convicted")
            worker.convict(claim, self.world.models[claim.run])

    @property
    def dead_epochs(self) -> list[Any]:
        return self.world.dead_epochs
