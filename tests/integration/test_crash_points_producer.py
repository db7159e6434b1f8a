"""Cancel, retry, forget, resume, pause and the audit killed between any two durable steps.

Each test says what is durable at the point, in the store and in Redis, and that the same call
again, or whoever comes by, brings the run where the whole call would have brought it.
"""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from common import names
from common.models import KeptTurns
from common.queue.audit import audit_run
from common.restore import audit_and_restore
from common.store import open_store
from producer.cancel import cancel, plan
from producer.forget import forget
from producer.forget import plan as plan_forget
from producer.locate import Where
from producer.meter import Meter
from producer.resume import Resumed, resume
from producer.retry import Wanted, retry
from tests.support.producer_cli import producer
from tests.support.queue_world import QueueWorld, take
from tests.support.redis_server import RedisServer
from tests.support.run_world import RUN, World
from tests.support.sinks import drain, expire_lease, killed_at, run_sink
from workers.engine.desk import RedisDesk
from workers.engine.holdings import Holdings
from workers.engine.returns import Returns
from workers.sink.run_sink import Standing

WHERE = Where(run=RUN)
MANY = 300


def meter(what: str, total: int | None) -> Meter:
    return Meter(what, total, shown=False)


def say(_text: str) -> None:
    """Nobody listens."""


@pytest.fixture
def make(redis_client: "redis.Redis", tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def world(prompts: int = 10, *, sealed: bool = True) -> World:
        store = open_store(str(tmp_path / "out"))
        made.append(World(redis_client, store, prompts=prompts, sealed=sealed))
        return made[-1]

    yield world
    for each in made:
        each.close()


def go_on(world: World) -> Standing:
    expire_lease(world)
    world.client.delete(names.maintenance(RUN))
    standing = drain(run_sink(world, rows=500))
    world.check_store()
    world.check_counts()
    assert len(world.current()) == world.accepted
    return standing


def depth(world: World) -> int:
    return int(world.client.llen(names.rq_queue(RUN)))


def has(world: World, name: str) -> bool:
    return world.store.get(name) is not None


# --- Cancel --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "success", "told", "ended"),
    [
        ("cancel.marked", True, False, 0),
        ("cancel.revoked", False, False, 0),
        ("cancel.told", False, True, 0),
        # The ledger's slices are of a thousand keys, about.
        ("cancel.ended", False, True, None),
        ("cancel.closed", False, True, MANY),
    ],
)
def test_cancel_killed_at_a_point_is_ended_by_the_same_call(
    make: Callable[..., World], point: str, *, success: bool, told: bool, ended: int | None
) -> None:
    world = make(MANY)
    world.finish(range(50))
    world.store.put(names.SUCCESS, b"of before")

    with killed_at(point):
        cancel(world.client, plan(world.client, WHERE), wait_s=30, meter=meter, say=say)

    counts, state = world.runs.counts(RUN), world.runs.state(RUN)
    assert state is not None
    assert has(world, names.CANCELLED)
    assert (has(world, names.SUCCESS), state.cancelled) == (success, told)
    assert depth(world) == (0 if told else MANY)
    assert counts.completed == 50
    assert counts.cancelled == ended - 50 if ended else 0 <= counts.cancelled < MANY - 50
    assert (counts.cancelled > 0) == (ended != 0)
    again = cancel(world.client, plan(world.client, WHERE), wait_s=30, meter=meter, say=say)
    assert (again.completed, again.cancelled, again.left) == (50, MANY - 50, "")
    assert go_on(world) is Standing.FAILED
    assert not has(world, names.SUCCESS)


# --- Retry ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("point", "retried"), [("retry.revoked", 0), ("retry.queued", 10)])
def test_retry_killed_at_a_point_tries_each_prompt_once_more(
    make: Callable[..., World], point: str, retried: int
) -> None:
    world = make()
    world.finish(range(10), "failed")
    assert go_on(world) is Standing.FAILED
    wanted = Wanted(reasons=(), ids=(), cancelled=False)

    with killed_at(point):
        retry(world.client, WHERE, wanted, dry_run=False, say=say, meter=meter)

    counts = world.runs.counts(RUN)
    assert not has(world, names.SUCCESS)
    assert (counts.failed, counts.queued) == (10 - retried, retried)
    assert world.client.zcard(names.rq_failed(RUN)) == 10 - retried
    again = retry(world.client, WHERE, wanted, dry_run=False, say=say, meter=meter)
    assert again.retried == 10 - retried
    assert world.finish(range(10), try_=2) == ["ok"] * 10
    assert go_on(world) is Standing.COMPLETED


# --- Forget --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "ledger", "begun"),
    [
        ("forget.begun", True, True),
        ("forget.swept", True, True),
        ("forget.emptied", False, True),
        ("forget.ended", False, False),
    ],
)
def test_forget_killed_at_a_point_leaves_no_run_and_no_key_in_the_end(
    make: Callable[..., World], point: str, *, ledger: bool, begun: bool
) -> None:
    world = make(2_500)
    client = world.client

    def go() -> None:
        asked = plan_forget(client, RUN, lose_results=True)
        forget(client, asked, lose_results=True, meter=meter)

    with killed_at(point):
        go()

    assert world.runs.get(RUN) is None
    assert client.exists(names.tombstone(RUN)) == 1
    assert bool(list(client.scan_iter(f"{names.ledger_stem(RUN)}*"))) is ledger
    assert bool(client.exists(names.forgetting(RUN))) is begun
    # Whoever still works on it is told to stop, and what it has is dropped.
    assert world.jobs.renew([(RUN, world.key(0))]) == ["gone"]
    assert world.finish([0]) == ["forgotten"]
    go()
    assert {bytes(key) for key in client.scan_iter("*")} <= {
        names.tombstone(RUN).encode(),
        names.renewed("e1").encode(),
    }


# --- Resume, pause, priority ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "queued", "bodies"),
    [
        ("resume.lifted", 9, 8),
        ("resume.compared", 12, 11),
        ("resume.audited", 12, 12),
    ],
)
def test_resume_killed_at_a_point_is_ended_by_the_same_call(
    make: Callable[..., World], point: str, queued: int, bodies: int
) -> None:
    world = make()
    world.finish([0])
    world.runs.pause(RUN, "lunch")
    world.accept(3, queue=False)  # accepted, and lost by Redis
    # As a claim did with the one, and `rq empty` with the other.
    world.client.delete(names.rq_job(world.key(1).hex()))
    for number in range(2):
        world.client.lrem(names.rq_queue(RUN), 1, world.key(number).hex())

    def go() -> Resumed:
        return resume(world.client, WHERE, seal=False, say=say)

    with killed_at(point):
        go()

    state, counts = world.runs.state(RUN), world.runs.counts(RUN)
    assert state is not None
    assert state.paused is None
    held = [world.client.hexists(names.rq_job(world.key(n).hex()), "request") for n in range(13)]
    assert (counts.queued, sum(held)) == (queued, bodies)
    world.client.delete(names.maintenance(RUN))
    go()
    assert world.runs.counts(RUN).queued == 12
    assert world.finish(range(1, 13)) == ["ok"] * 12
    assert go_on(world) is Standing.COMPLETED


def test_resume_killed_before_a_dead_producer_is_closed_seals_once_more(
    make: Callable[..., World],
) -> None:
    world = make(sealed=False)
    world.runs.open_producer(RUN, "gone.jsonl", '{"host":"elsewhere","pid":1}')

    with killed_at("resume.sealed"):
        resume(world.client, WHERE, seal=True, say=say)

    state = world.runs.state(RUN)
    assert state is not None
    assert list(state.open_producers) == ["gone.jsonl"]
    assert not state.sealed
    seals = [found.name for found in world.store.list(names.INPUTS) if "-seal-" in found.name]
    assert len(seals) == 2
    world.finish(range(10))
    told = resume(world.client, WHERE, seal=True, say=say)
    assert (told.sealed, told.closed) == (True, 1)
    assert go_on(world) is Standing.COMPLETED


@pytest.mark.parametrize(
    ("point", "arguments"),
    [("pause.set", ("pause", RUN)), ("priority.set", ("priority", RUN, "5"))],
)
def test_what_one_call_sets_stands_though_it_was_killed(
    make: Callable[..., World],
    valkey: RedisServer,
    tmp_path: Path,
    point: str,
    arguments: tuple[str, ...],
) -> None:
    world = make()
    env = {"HEADRACE_REDIS": valkey.url}

    killed = producer(*arguments, cwd=tmp_path, env={**env, "HEADRACE_CRASH_AT": point})

    assert killed.code == -signal.SIGKILL
    state = world.runs.state(RUN)
    assert state is not None
    assert (state.paused is not None, state.priority) == (
        (True, 0) if point == "pause.set" else (False, 5)
    )
    assert producer(*arguments, cwd=tmp_path, env=env).code == 0
    world.runs.resume(RUN)
    world.finish(range(10))
    assert go_on(world) is Standing.COMPLETED


# --- The audit -----------------------------------------------------------------------------------


def test_an_audit_killed_when_cancelled_jobs_have_ended_ends_each_once(
    make: Callable[..., World],
) -> None:
    world = make()
    hexes = [world.key(n).hex() for n in range(2)]
    for hex_ in hexes:
        world.client.hset(names.rq_job(hex_), "status", "canceled")
        world.client.zadd(names.rq_canceled(RUN), {hex_: 1})

    with killed_at("audit.cancelled"):
        audit_run(world.client, world.record)

    counts = world.runs.counts(RUN)
    assert (counts.cancelled, counts.queued, world.waiting()) == (2, 8, 2)
    assert world.client.zcard(names.rq_canceled(RUN)) == 0
    assert audit_run(world.client, world.record).cancelled == 0
    world.finish(range(2, 10))
    assert go_on(world) is Standing.FAILED


@pytest.mark.parametrize(("point", "bodies"), [("audit.listed", 9), ("audit.restored", 10)])
def test_an_audit_killed_at_a_point_lists_nothing_twice(
    make: Callable[..., World], point: str, bodies: int
) -> None:
    world = make()
    world.client.delete(names.rq_queue(RUN), names.rq_job(world.key(0).hex()))

    with killed_at(point):
        audit_and_restore(world.client, world.store, world.record)

    held = [world.client.hexists(names.rq_job(world.key(n).hex()), "request") for n in range(10)]
    assert (sum(held), depth(world)) == (bodies, bodies)
    report = audit_and_restore(world.client, world.store, world.record)
    assert (report.relisted, report.restored) == (0, 10 - bodies)
    assert depth(world) == 10
    assert world.finish(range(10)) == ["ok"] * 10
    assert go_on(world) is Standing.COMPLETED


# --- A worker group's return ---------------------------------------------------------------------


def test_killed_between_turns_and_return_the_job_keeps_both(redis_client: "redis.Redis") -> None:
    world = QueueWorld(redis_client, prompts=1)
    jobs = world.jobs("e1")
    [claim] = world.claim(jobs).claims
    desk = RedisDesk("test")
    returns = Returns(jobs, Holdings(), desk)
    kept = KeptTurns(
        run=claim.run,
        uid=claim.uid,
        key=claim.key,
        fingerprint=claim.fingerprint,
        try_=1,
        turns=b"one\n",
    )

    with killed_at("return.turns"):
        returns._give_back([(claim.run, claim.key)], died=False, turns=[kept])

    assert world.leased() == {0}
    assert world.job(0)["turns"] == b"one\n"
    world.expire_leases([0])
    other = world.jobs("e2")
    other.reap()
    [again] = world.claim(other).claims
    assert (again.turns, again.lost, again.attempts) == (b"one\n", 1, 0)
    assert take(other, 0, bound=0).what == "granted"
    world.check()
