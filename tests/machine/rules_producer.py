"""What people type: enqueue, retry, resume, cancel, forget, pause; killed or frozen anywhere."""

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from typing_extensions import override

from common import catalog
from common.errors import ConflictError, StateLostError
from common.ids import key_of
from common.queue import Runs
from producer import cancel, forget, resume, retry
from producer.enqueue import enqueue
from producer.locate import Where
from producer.meter import Meter
from producer.prompts.rows import RowRules
from producer.request import Asked, Request
from tests.machine.model import PROMPTS
from tests.machine.process import GOOD, Deed, Fate, Process
from tests.machine.rules_base import FATES, RULE_RUNS, hit, often
from tests.machine.rules_workers import WorkerRules
from tests.machine.world import RUNS, World

SOURCES = st.sampled_from(["one", "other"])
NUMBERS = st.lists(st.integers(0, PROMPTS - 1), min_size=1, max_size=6, unique=True)
SELDOM = st.sampled_from([True, False, False, False])


def say(_: str) -> None:
    """Nobody listens."""


class Typed:
    """One call of `producer enqueue`."""

    def __init__(self, world: World, run: str, source: str, numbers: Sequence[int]) -> None:
        self.world = world
        self.run = run
        self.numbers = numbers
        self.texts: dict[int, int] = {}
        self.samples = 1
        self.file = world.folder / f"{run}-{source}.jsonl"
        self.flags: dict[str, Any] = {}

    def request(self) -> Request:
        lines = [
            json.dumps({"id": n, "prompt": f"count to {n}, way {self.texts.get(n, 0)}"})
            for n in self.numbers
        ]
        self.file.write_text("".join(line + "\n" for line in lines))
        return Request(
            files=(str(self.file),),
            run=self.run,
            rules=RowRules(),
            asked=Asked(output=self.world.urls[self.run], max_tokens=16, partitions=2),
            redis="unix:///nowhere",
            samples=self.samples,
            **self.flags,
        )

    def keys(self) -> set[bytes]:
        return {
            key_of(self.run, b"%d" % n, sample)
            for n in self.numbers
            for sample in range(self.samples)
        }

    def look(self, deed: Deed) -> None:
        """A call that has ended well has everything in `inputs/`."""
        if deed.word != "done":
            return
        hit("enqueue done")
        assert deed.value.queued, deed.value.reading
        store = self.world.stores[self.world.urls[self.run]]
        accepted = {
            bytes.fromhex(row[0].decode())
            for _, rows in catalog.all_inputs(store, catalog.list_inputs(store).rows)
            for row in rows
        }
        assert self.keys() <= accepted, "a call ended well and has not accepted all"


class ProducerRules(WorkerRules):
    """Rules of the producer's commands."""

    added = 0

    def _enqueue(
        self,
        run: str,
        source: str,
        numbers: list[int],
        *,
        changed: bool,
        samples: int,
        accept_changes: bool,
        retry_failed: bool,
        keep_open: bool,
        window: int | None,
        fate: Fate,
    ) -> None:
        typed = Typed(self.world, run, source, numbers)
        typed.samples = samples
        # A changed text is a conflict, which leaves nothing else to see: one prompt alone then.
        typed.texts = {numbers[0]: 1} if changed and accept_changes else {}
        if changed and not accept_changes and len(numbers) == 1:
            typed.texts = {numbers[0]: 1}
        typed.flags = {
            "accept_changes": accept_changes,
            "retry_failed": retry_failed,
            "keep_open": keep_open,
            "window": window,
        }
        before = (
            self._ledger(run) if typed.texts and not accept_changes and not fate.kind else None
        )
        request = typed.request()
        deed = self.world.command(
            lambda _: enqueue(request, say=say, meter=Meter), fate=fate, then=typed.look
        )
        hit(f"enqueue {deed.word}")
        if deed.word == "error" and isinstance(deed.error, ConflictError):
            hit("enqueue conflict")
            if before is not None and self.world.record(run) is not None and not fate.redis:
                after = self._ledger(run)
                assert {key: after.get(key) for key in before} == before, "a conflict changed keys"

    typing: ClassVar = {
        "run": RULE_RUNS,
        "source": SOURCES,
        "numbers": NUMBERS,
        "changed": st.booleans(),
        "samples": st.sampled_from([1, 1, 2]),
        "accept_changes": SELDOM,
        "retry_failed": SELDOM,
        "keep_open": SELDOM,
        "window": st.sampled_from([None, None, 4, 6]),
        "fate": FATES,
    }
    enqueue = often(**typing)(_enqueue)
    enqueue_more = often(**typing)(_enqueue)

    @override
    def add_some(self) -> None:
        for run in RUNS:
            self.added += 3
            typed = Typed(
                self.world, run, "one", [n % PROMPTS for n in range(self.added, self.added + 3)]
            )
            typed.flags = {}
            request = typed.request()
            self.world.command(
                lambda _, request=request: enqueue(request, say=say, meter=Meter),  # type: ignore[misc]
                fate=GOOD,
                then=typed.look,
            )

    def _ledger(self, run: str) -> dict[bytes, Any]:
        return self.checks.ledger(run)

    @rule(run=RULE_RUNS, cancelled=st.booleans(), fate=FATES)
    def retry_failures(self, run: str, *, cancelled: bool, fate: Fate) -> None:
        if self.world.stored_record(run) is None:
            return

        def call(process: Process) -> Any:
            wanted = retry.wanted((), (), cancelled=cancelled)
            return retry.retry(process.client, self._where(run), wanted, dry_run=False, say=say)

        def look(deed: Deed) -> None:
            if deed.word == "done" and deed.value.retried:
                hit("retry retried")

        hit("retry " + self.world.command(call, fate=fate, then=look).word)

    @rule(run=RULE_RUNS, seal=st.booleans(), fate=FATES)
    def resume(self, run: str, *, seal: bool, fate: Fate) -> None:
        if self.world.stored_record(run) is None:
            return
        hit("resume " + self.resume_run(run, seal=seal, fate=fate).word)

    def resume_run(self, run: str, *, seal: bool, fate: Fate) -> Deed:
        def look(deed: Deed) -> None:
            if deed.word == "done":
                assert deed.value.forgotten == 0, "an end was forgotten whose record is there"
                assert deed.value.unaccepted == 0

        return self.world.command(
            lambda process: resume.resume(process.client, self._where(run), seal=seal, say=say),
            fate=fate,
            then=look,
        )

    def _where(self, run: str) -> Where:
        return Where(run=run, output=self.world.urls[run])

    @precondition(lambda self: self.world.stored_record("beta") is not None)
    @rule(indeed=st.integers(0, 5), fate=FATES)
    def cancel(self, indeed: int, fate: Fate) -> None:
        """The one run: that nothing of the other goes with it is seen by the checks of that."""
        if indeed:
            return

        def call(process: Process) -> Any:
            plan = cancel.plan(process.client, self._where("beta"))
            return cancel.cancel(process.client, plan, wait_s=0.0, meter=Meter, say=say)

        self.world.models["beta"].cancelled = True
        hit("cancel " + self.world.command(call, fate=fate, then=lambda _: None).word)

    @rule(run=RULE_RUNS, lose=st.booleans(), fate=FATES)
    def forget(self, run: str, *, lose: bool, fate: Fate) -> None:
        if self.world.record(run) is None and not self.world.client.exists(
            f"headrace:forgetting:{run}"
        ):
            return

        def call(process: Process) -> Any:
            plan = forget.plan(process.client, run, lose_results=lose)
            return forget.forget(process.client, plan, lose_results=lose, meter=Meter)

        def look(deed: Deed) -> None:
            if deed.word == "done":
                hit("forget forgotten")
                self.checks.is_gone(run)

        hit("forget " + self.world.command(call, fate=fate, then=look).word)

    def pause(self, run: str, *, on: bool) -> None:
        runs = Runs(self.world.client)
        try:
            if on:
                runs.pause(run, "a person")
            else:
                runs.resume(run)
        except StateLostError:
            return
        hit(f"pause {on}")

    def set_priority_and_window(self, run: str, priority: int, window: int) -> None:
        runs = Runs(self.world.client)
        try:
            runs.set_priority(run, priority)
            runs.set_window(run, window)
        except StateLostError:
            return
        hit("priority")
