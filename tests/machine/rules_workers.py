"""Worker processes: slots, claims, answers, late and double finishes, deaths, freezes."""

from collections.abc import Callable
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import rule

from common import names
from common.models import Claim
from common.queue import Runs
from tests.machine.process import Deed, Fate
from tests.machine.rules_base import WORKERS, Base, hit, often
from tests.machine.workers import Worker
from tests.machine.world import RUNS, World

OUTCOMES = st.sampled_from([*["completed"] * 7, *["failed"] * 3, "poison"])
LOSSES = st.sampled_from([(), (), (), ("lost",), ("away",) * 4, ("lost",) * 4])
"""Of answers of Redis: none, one that is repeated silently, or one of which that fails, too."""


def call_redis(
    world: World, worker: Worker, call: Callable[[], Any], *, loses: tuple[str, ...] = ()
) -> Deed:
    """Let a worker call Redis, which may fail."""
    return world.act(worker.process, call, fate=Fate(redis=loses))


class WorkerRules(Base):
    """Rules of worker groups."""

    serial = 0

    def _at_work(self, name: str) -> Worker | None:
        """The process of this name, unless it is frozen; it wakes up by and by."""
        worker = self.world.worker(name)
        if worker.frozen > 0:
            worker.frozen -= 1
            return None
        return worker

    @rule(name=WORKERS, wanted=st.integers(0, 3), loses=LOSSES)
    def take_slots(self, name: str, wanted: int, loses: tuple[str, ...]) -> None:
        worker = self._at_work(name)
        if worker is None:
            return
        what = worker.give_up_slots if wanted == 0 else lambda: worker.take_slots(wanted)
        if not wanted:
            self._let_ready_go(worker)
        deed = call_redis(self.world, worker, what, loses=loses)
        hit(f"slots {deed.value if wanted and deed.word == 'done' else deed.word}")

    def _let_ready_go(self, worker: Worker) -> None:
        for claim in worker.ready:
            worker.returning[claim.run, claim.key] = False
        worker.ready.clear()

    @rule(name=WORKERS, count=st.integers(1, 5), loses=LOSSES)
    def claim(self, name: str, count: int, loses: tuple[str, ...]) -> None:
        worker = self._at_work(name)
        if worker is None:
            return
        if not worker.believes():
            deed = call_redis(self.world, worker, lambda: worker.take_slots(2))
            hit(f"slots {deed.value}")
        deed = call_redis(self.world, worker, lambda: worker.claim(count), loses=loses)
        if deed.word == "done":
            hit("claim " + (worker.why if worker.why != "ok" or deed.value else "none"))
            for claim in deed.value:
                self._claimed(claim)

    def _work(
        self,
        name: str,
        count: int,
        keeps: int,
        outcome: str,
        loses: tuple[str, ...],
        *,
        sends: bool,
    ) -> None:
        """Claim, answer all but some, and say so."""
        self.claim(name, count, ())
        worker = self.world.worker(name)
        if worker.why in {"paused", "suspended"} and keeps == 0:
            self._somebody_lifts_it()
        if worker.frozen:
            return
        for _ in range(max(len(worker.open) - keeps, 0)):
            self.answer(
                name,
                outcome,
                poison=outcome == "poison",
                which=0,
                all_=False,
                send=False,
                loses=(),
            )
        if sends:
            self.send_results(worker, loses)

    def _somebody_lifts_it(self) -> None:
        self.world.client.delete(names.RQ_SUSPENDED)
        for run in RUNS:
            if self.world.record(run) is not None:
                Runs(self.world.client).resume(run)

    working: ClassVar = {
        "name": WORKERS,
        "count": st.integers(1, 3),
        "keeps": st.integers(0, 3),
        "outcome": OUTCOMES,
        "sends": st.sampled_from([True, True, True, False]),
        "loses": LOSSES,
    }
    work = often(**working)(_work)
    work_more = often(**working)(_work)
    work_on = often(**working)(_work)

    def _claimed(self, claim: Claim) -> None:
        """What is finished and stored is never worked on again."""
        model = self.world.models[claim.run]
        ended = model.known.ended
        assert (claim.key, claim.try_) not in ended, f"{model.name(claim.key)}: ended, and claimed"
        stored = self.checks.stored(claim.run).current.get(claim.key)
        if stored is not None:
            assert stored.outcome != "completed", f"{model.name(claim.key)}: stored, and claimed"
            assert claim.try_ > stored.try_, f"{model.name(claim.key)}: a stored try again"
        if claim.turns:
            hit("claim with turns")
        if claim.try_ > 1:
            hit("claim of a new try")

    @rule(
        name=WORKERS,
        outcome=st.sampled_from(["completed", "completed", "completed", "failed"]),
        poison=st.sampled_from([False] * 7 + [True]),
        which=st.integers(0, 2),
        all_=st.booleans(),
        send=st.booleans(),
        loses=LOSSES,
    )
    def answer(
        self,
        name: str,
        outcome: str,
        *,
        poison: bool,
        which: int,
        all_: bool,
        send: bool,
        loses: tuple[str, ...],
    ) -> None:
        worker = self._at_work(name)
        if worker is None or not worker.open:
            return
        keys = sorted(worker.open)
        for key in keys if all_ else [keys[which % len(keys)]]:
            self.serial += 1
            poisons = poison and outcome != "failed" and self.world.may_poison
            ended = worker.end(
                key,
                self.world.models[key[0]],
                outcome="failed" if outcome == "failed" else "completed",
                serial=self.serial,
                poison=poisons,
            )
            hit("answer " + (outcome if ended else "of an aborted request"))
        worker.open_some()
        if send:
            self.send_results(worker, loses)

    @rule(name=WORKERS, loses=LOSSES)
    def send(self, name: str, loses: tuple[str, ...]) -> None:
        worker = self._at_work(name)
        if worker is not None:
            self.send_results(worker, loses)

    def send_results(self, worker: Worker, loses: tuple[str, ...] = ()) -> None:
        """As the finisher does: what Redis has answered for is done with."""
        batch = list(worker.unsent.values())
        if not batch:
            return
        deed = call_redis(self.world, worker, lambda: worker.jobs.finish(batch), loses=loses)
        if deed.word != "done":
            hit("finish without an answer")
            if loses and loses[0] == "lost":
                self.checks.taken_unheard(batch)
            worker.blocked = True
            worker.mark_repeated()
            return
        worker.blocked = False
        for result, word in zip(batch, deed.value, strict=True):
            hit(f"finish {word}")
            if word in {"unknown", "untaught"}:
                worker.blocked = True
                continue
            worker.unsent.pop((result.run, result.key), None)
            self.checks.finished(result, word)

    @rule(name=WORKERS, loses=LOSSES)
    def renew(self, name: str, loses: tuple[str, ...]) -> None:
        worker = self._at_work(name)
        if worker is None:
            return
        held = worker.held
        deed = call_redis(self.world, worker, lambda: worker.jobs.renew(held), loses=loses)
        if deed.word != "done":
            return
        for key, word in zip(held, deed.value, strict=True):
            hit(f"renew {word}")
            if word in {"gone", "stolen"}:
                worker.lose(key)

    @rule(name=WORKERS, server_died=st.booleans(), loses=LOSSES)
    def give_back(self, name: str, *, server_died: bool, loses: tuple[str, ...]) -> None:
        worker = self._at_work(name)
        if worker is None:
            return
        if server_died:
            self._server_dies(worker)
        else:
            self._let_ready_go(worker)
        for died in (False, True):
            keys = [key for key, with_it in worker.returning.items() if with_it is died]
            if not keys:
                continue
            deed = call_redis(
                self.world,
                worker,
                lambda keys=keys, died=died: worker.jobs.give_back(keys, died=died),  # type: ignore[misc]
                loses=loses,
            )
            if deed.word != "done":
                return
            for key, word in zip(keys, deed.value, strict=True):
                hit(f"give back {word}")
                worker.returning.pop(key)

    def _server_dies(self, worker: Worker) -> None:
        """With everything that is open there, of whatever process."""
        worker.server.open.clear()
        for other in self.world.workers.values():
            if other.server is worker.server and not other.frozen:
                other.server_died()

    def charge(self, name: str) -> None:
        worker = self._at_work(name)
        if worker is None or not worker.open:
            return
        run, key = min(worker.open)
        call_redis(self.world, worker, lambda: worker.jobs.charge(run, key, "timeout", before=0))
        hit("charge")

    @rule(name=WORKERS, loses=LOSSES)
    def keep_a_turn(self, name: str, loses: tuple[str, ...]) -> None:
        worker = self._at_work(name)
        if worker is None or not worker.open:
            return
        key = max(worker.open)
        self.serial += 1
        kept = worker.kept_turns(key, self.checks.turn(worker, key, self.serial))
        deed = call_redis(self.world, worker, lambda: worker.jobs.keep_turns([kept]), loses=loses)
        if deed.word == "done":
            hit(f"turn {deed.value[0]}")
            if deed.value[0] in {"other", "stolen", "changed", "gone", "forgotten"}:
                worker.lose(key)

    def make_results(self, worker: str) -> None:
        """As few as will do: what is done is done."""
        self._work(worker, 2, 0, "completed", (), sends=True)
        why = self.world.worker(worker).why
        if why in {"ok", "busy"}:
            return
        self._somebody_lifts_it()
        if why == "no_slot":
            self.world.pass_time(21_000)
        if why == "empty":
            self.add_some()
        for run in RUNS:
            self.sink_step("one", run)
        self._work(worker, 2, 0, "completed", (), sends=True)

    def add_some(self) -> None:
        """A few prompts more."""
        raise NotImplementedError

    def sink_step(self, name: str, run: str) -> Any:
        """Of one run."""
        raise NotImplementedError
