"""The end of an example: everything is healed, and must come to its end and be proven."""

from typing import TYPE_CHECKING, cast

from common import catalog, names
from common.cancelling import is_cancelled
from producer.findings import Findings
from producer.meter import Meter
from producer.verify import verify
from tests.machine.process import GOOD
from tests.machine.world import RUNS, World
from workers.sink.run_sink import Standing

if TYPE_CHECKING:
    from tests.machine.machine import Machine

ROUNDS = 80
ENDED = {Standing.COMPLETED, Standing.FAILED}


def heal(machine: "Machine") -> None:
    """Nothing breaks from here on; whoever was frozen goes on, and then all processes are new."""
    world = machine.world
    while world.frozen:
        world.thaw(0)
        machine.checks.all()
    world.client.delete(names.RQ_SUSPENDED)
    for name in list(world.workers):
        world.worker(name).frozen = 0
        machine.send_results(world.worker(name))
        machine.die(name)
    for name in list(world.sinks):
        machine.stop(name)
    machine.checks.all()
    world.pass_time(180_000)
    for run in _made(world):
        _bring_back(machine, run)


def _made(world: World) -> list[str]:
    return [run for run in RUNS if world.stored_record(run) is not None]


def _bring_back(machine: "Machine", run: str) -> None:
    """As a person would, after everything: end what was begun, resume, seal."""
    world = machine.world
    if world.client.exists(names.forgetting(run)):
        machine.forget_run(run)
    for _ in range(3):
        deed = machine.resume_run(run, seal=True, fate=GOOD)
        machine.checks.all()
        if deed.word == "done":
            return
        store = world.stores[world.urls[run]]
        assert is_cancelled(store), f"{run} does not go on: {deed.error!r}"
        if world.record(run) is not None:
            return
    raise AssertionError(f"{run} does not go on")


def come_to_the_end(machine: "Machine") -> None:
    """Let one worker and one sink do all that is left."""
    world = machine.world
    left = set(_made(world))
    for _ in range(ROUNDS):
        for run in sorted(left):
            if machine.sink_step("one", run) in ENDED:
                left.discard(run)
        machine.checks.all()
        if not left:
            return
        machine.work_off("w0a")
        world.pass_time(31_000)
    raise AssertionError(f"does not end: {_state(machine, left)}")


def _state(machine: "Machine", left: set[str]) -> dict[str, object]:
    world = machine.world
    worker = world.worker("w0a")
    reply = worker.jobs.claim(1, stream_mark_bytes=1 << 40)
    return {
        "slots": (worker.take_slots(3), worker.slots, worker.blocked, worker.suspects),
        "claim": reply.why,
        "inputs": {
            run: [o.name for o in world.stores[world.urls[run]].list("inputs/")] for run in left
        },
        "feeder": {run: vars(world.sink("one").runs[run]._feeder) for run in left},
        **{
            run: (
                [(e.state, e.try_) for e in machine.checks.ledger(run).values()],
                world.client.hgetall(names.run(run)),
                world.client.lrange(names.rq_queue(run), 0, -1),
                world.client.keys("rq:*"),
                world.client.zrange(names.leases(run), 0, -1, withscores=True),
            )
            for run in left
        },
    }


def prove(machine: "Machine", run: str) -> None:
    """`producer verify` proves it; nothing is left in Redis but what says how it stands."""
    world, stored = machine.world, machine.checks.stored(run)
    store, record = world.stores[world.urls[run]], world.stored_record(run)
    assert record is not None
    assert stored.accepted.keys() == stored.current.keys()
    with Findings(keep_all=False) as findings:
        verdict = verify(record, store, findings, check=None, meter=Meter)
    assert not findings.counts, [f.text for kind in findings.first.values() for f in kind]
    assert verdict.proven
    assert stored.stands() != is_cancelled(store), (
        "_SUCCESS stands where it may not, or is missing"
    )
    ledger = machine.checks.ledger(run)
    assert ledger.keys() == stored.accepted.keys()
    assert {key: (e.state, e.try_) for key, e in ledger.items()} == {
        key: (r.outcome, r.try_) for key, r in stored.current.items()
    }
    _leftovers(world, run, failed={k for k, e in ledger.items() if e.state == "failed"})


def _leftovers(world: World, run: str, *, failed: set[bytes]) -> None:
    client, stem = world.client, names.run(run)
    there = {name.decode() for name in cast("list[bytes]", client.keys("*"))}
    mine = {name for name in there if f":{run}" in name and not name.startswith(f"{stem}:l:")}
    lanes = range(2)
    may = {
        *(stem, names.counts(run), names.sinks(run), names.rate(run), names.set_aside(run)),
        *(names.history(run), names.marks(run)),
        *(names.sink(run, lane) for lane in lanes),
        *(names.results(run, lane) for lane in lanes),
        *(names.rq_failed(run), names.tombstone(run)),
        f"rq:clean_registries:{run}",
    }
    if is_cancelled(world.stores[world.urls[run]]):
        # A producer that died open: nobody can close it, and nobody waits for it.
        may.add(names.open_producers(run))
    assert mine <= may, f"left in Redis: {sorted(mine - may)}"
    assert not sum(client.xlen(names.results(run, lane)) for lane in lanes)
    jobs = {key for key in world.models[run].keys if client.exists(names.rq_job(key.hex()))}
    # Whoever deletes a failed job by hand has no use for it; the row in the store stays.
    name, touched = world.models[run].name, world.models[run].known.touched
    left, lost = sorted(map(name, jobs - failed)), sorted(map(name, failed - jobs - touched))
    assert not left, f"jobs of prompts that have ended are left: {left}"
    assert not lost, f"failed prompts without a job: {lost}"
    listed = cast("list[bytes]", client.zrange(names.rq_failed(run), 0, -1))
    assert {bytes.fromhex(job_id.decode()) for job_id in listed} | touched >= failed
    for key in failed - touched:
        assert client.hexists(names.rq_job(key.hex()), "request"), "a failed job lost its request"
    assert catalog.list_inputs(world.stores[world.urls[run]]).rows or not failed
