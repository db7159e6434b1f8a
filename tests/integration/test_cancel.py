"""`producer cancel` on a real Redis and a real store: marked for good, everything ends once."""

import json
import os
import pty
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from common import catalog, names
from common.cancelling import Canceller
from common.queue import Jobs
from common.queue.cancels import Cancels
from common.reconcile import adopt_run, reconcile
from common.store.directory import DirectoryStore
from tests.support import programs
from tests.support.producer_cli import Ended, environment, producer
from tests.support.queue_world import take
from tests.support.redis_server import RedisServer
from tests.support.run_world import RUN, World
from tests.support.sinks import drain, run_sink
from workers.sink.run_sink import Standing

Ask = Callable[..., Ended]
POINTS = ["cancel.marked", "cancel.told", "cancel.ended", "cancel.ended:2", "cancel.closed"]
MANY = 2_500
"""More prompts than one step ends."""


@pytest.fixture
def world(redis_client: "redis.Redis", tmp_path: Path) -> World:
    return World(redis_client, DirectoryStore(tmp_path / "out"), prompts=10)


@pytest.fixture
def ask(valkey: RedisServer, tmp_path: Path) -> Ask:
    """Call a command with the address of the test's Redis."""

    def call(*arguments: str, **env: str) -> Ended:
        return producer(*arguments, cwd=tmp_path, env={"HEADRACE_REDIS": valkey.tcp_url, **env})

    return call


def claim(world: World, count: int) -> Jobs:
    """A worker process that leases some of the prompts, the first ones."""
    take(world.jobs, 100, bound=100, quiet=True)
    reply = world.jobs.claim(count, stream_mark_bytes=1 << 40)
    assert len(reply.claims) == count
    return world.jobs


def store_all(world: World) -> None:
    """Let a sink do all that is left, and see that each prompt has one record."""
    sink = run_sink(world, rows=1000)
    assert drain(sink) is Standing.FAILED
    sink.release()
    world.check_store()
    world.check_counts()
    assert len(world.current()) == len(world.records()) == world.accepted


def outcomes(world: World) -> dict[str, int]:
    ends = [record.outcome for record in world.current().values()]
    return {outcome: ends.count(outcome) for outcome in set(ends)}


def depth(world: World) -> int:
    return int(world.client.llen(names.rq_queue(RUN)))


def test_what_waits_ends_as_cancelled_and_what_is_done_stays(world: World, ask: Ask) -> None:
    world.finish(range(3))
    world.finish([3], "failed")

    ended = ask("cancel", RUN, "--yes", "--json")

    assert ended.code == 0, ended.err
    told = ended.told
    assert (told["completed"], told["failed"], told["cancelled"]) == (3, 1, 6)
    assert (told["ended"], told["queued"], told["left"], told["waiting"]) == (6, 0, "", 10)
    assert "`workers sink`" in ended.err
    assert depth(world) == 0
    assert world.client.exists(*(names.rq_job(world.key(n).hex()) for n in range(4, 10))) == 0
    store_all(world)
    assert outcomes(world) == {"completed": 3, "failed": 1, "cancelled": 6}
    assert world.store.get(names.SUCCESS) is None


def test_each_cancelled_prompt_keeps_its_whole_request(world: World, ask: Ask) -> None:
    ask("cancel", RUN, "--yes")
    store_all(world)

    [manifest] = catalog.manifests_of(world.store, world.record.uid)
    rows = [json.loads(row) for row in catalog.rows(world.store, manifest.failures)]

    assert sorted(row["id"] for row in rows) == list(range(10))
    assert all(row["request"] == json.loads(world.prompt(row["id"])) for row in rows)
    assert {(row["outcome"], row["reason"]) for row in rows} == {("cancelled", "cancelled")}


def test_every_command_says_that_it_is_cancelled(world: World, ask: Ask) -> None:
    (Path(world.record.output).parent / f"{RUN}.jsonl").write_text('{"id":"new","prompt":"x"}\n')
    ask("cancel", RUN, "--yes")
    store_all(world)

    status, verified = ask("status", RUN, "--json"), ask("verify", RUN, "--json")
    again, resumed = ask("enqueue", f"{RUN}.jsonl"), ask("resume", RUN)

    assert (status.code, status.told["status"], status.told["cancelled"]) == (1, "cancelled", 10)
    assert verified.code == 1
    assert verified.told["proven"]
    assert verified.told["run_cancelled"]
    assert f"CANCELLED: run {RUN}: 10 prompts" in ask("verify", RUN).out
    assert (again.code, resumed.code) == (5, 5)
    assert "was cancelled" in again.err
    assert "was cancelled" in resumed.err


def test_a_run_that_was_open_is_closed_by_it(redis_client: "redis.Redis", tmp_path: Path) -> None:
    world = World(redis_client, DirectoryStore(tmp_path / "out"), prompts=4, sealed=False)

    ended = producer("cancel", RUN, "--yes", "--redis", address(redis_client), cwd=tmp_path)

    assert ended.code == 0, ended.err
    store_all(world)


def address(client: "redis.Redis") -> str:
    return f"unix://{client.connection_pool.connection_kwargs['path']}"


def test_the_same_call_again_changes_nothing(world: World, ask: Ask) -> None:
    ask("cancel", RUN, "--yes")
    store_all(world)
    mark = world.store.get(names.CANCELLED)

    again = ask("cancel", RUN, "--json")

    assert again.code == 0, again.err
    assert again.told["already"]
    assert again.told["ended"] == 0
    assert world.store.get(names.CANCELLED) == mark
    assert world.waiting() == 0


def test_a_run_that_has_ended_says_so_and_stays(world: World, ask: Ask) -> None:
    world.finish(range(10))
    assert drain(run_sink(world)) is Standing.COMPLETED

    ended = ask("cancel", RUN, "--yes", "--json")

    assert ended.code == 0
    assert ended.told["finished"]
    assert "nothing to cancel" in ended.err
    assert world.store.get(names.CANCELLED) is None
    assert world.store.get(names.SUCCESS) is not None
    assert ask("status", RUN, "--json").told["status"] == "completed"


def test_nobody_is_asked_where_there_is_no_terminal(world: World, ask: Ask) -> None:
    ended = ask("cancel", RUN)

    assert ended.code == 2
    assert "--yes" in ended.err
    assert world.store.get(names.CANCELLED) is None
    assert depth(world) == 10


def test_what_is_in_flight_ends_at_the_next_renewal(world: World, ask: Ask) -> None:
    jobs = claim(world, 4)
    held = [(RUN, world.key(n)) for n in range(4)]

    first = ask("cancel", RUN, "--yes", "--wait", "0", "--json")

    assert (first.told["in_flight"], first.told["cancelled"]) == (4, 6)
    assert first.told["left"] == "in_flight"
    assert "`workers sink`" in first.err
    assert world.finish([0]) == ["ok"]
    assert jobs.renew(held) == ["gone"] * 4
    assert jobs.give_back(held) == ["not_held"] * 4
    again = ask("cancel", RUN, "--yes", "--json")
    assert (again.told["completed"], again.told["cancelled"]) == (1, 9)
    assert world.finish([1]) == ["duplicate"]
    store_all(world)
    assert outcomes(world) == {"completed": 1, "cancelled": 9}


def test_the_lease_of_a_dead_worker_group_is_not_waited_for_for_ever(
    world: World, ask: Ask
) -> None:
    claim(world, 4)
    world.client.zadd(names.leases(RUN), {world.key(n).hex(): 1 for n in range(4)}, xx=True)

    ended = ask("cancel", RUN, "--yes", "--json")

    assert (ended.told["in_flight"], ended.told["cancelled"]) == (0, 10)
    assert world.client.zcard(names.rq_started(RUN)) == 0
    store_all(world)


def test_jobs_given_back_late_end_with_the_rest(world: World, ask: Ask) -> None:
    jobs = claim(world, 4)
    ask("cancel", RUN, "--yes", "--wait", "0")
    jobs.give_back([(RUN, world.key(n)) for n in range(3)])

    store_some = run_sink(world)
    store_some.step()
    store_some.release()
    jobs.give_back([(RUN, world.key(3))])

    store_all(world)
    assert depth(world) == 0


def test_parked_prompts_end_too(world: World, ask: Ask) -> None:
    for _ in range(2):
        jobs = claim(world, 2)
        jobs.give_back([(RUN, world.key(n)) for n in range(2)], died=True)
    assert world.client.zcard(names.parked(RUN)) == 2

    ended = ask("cancel", RUN, "--yes", "--json")

    assert ended.told["cancelled"] == 10
    assert world.client.zcard(names.parked(RUN)) == 0


def test_prompts_that_only_the_store_has_end_too(world: World, ask: Ask) -> None:
    world.accept(5, queue=False)
    world.client.delete(*(names.rq_job(world.key(n).hex()) for n in range(3)))

    ended = ask("cancel", RUN, "--yes", "--json")

    assert ended.told["left"] == ""
    assert (ended.told["total"], ended.told["cancelled"]) == (15, 15)
    assert depth(world) == 0
    store_all(world)


def test_a_producer_that_is_feeding_is_refused_and_what_it_accepted_ends(
    world: World, ask: Ask
) -> None:
    ask("cancel", RUN, "--yes")
    store_all(world)
    world.accept(3, queue=False)
    file = Path(world.record.output).parent / f"{RUN}.jsonl"
    file.write_text('{"id":"new","prompt":"x"}\n')

    assert ask("enqueue", str(file)).code == 5
    assert ask("cancel", RUN, "--json").told["cancelled"] == 13

    store_all(world)


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_anywhere_costs_nothing_but_the_same_call_again(
    redis_client: "redis.Redis", tmp_path: Path, ask: Ask, point: str
) -> None:
    world = World(redis_client, DirectoryStore(tmp_path / "out"), prompts=MANY)
    world.finish(range(50))

    killed = ask("cancel", RUN, "--yes", HEADRACE_CRASH_AT=point)
    again = ask("cancel", RUN, "--yes", "--json")

    assert killed.code == -signal.SIGKILL
    assert again.code == 0, again.err
    assert (again.told["completed"], again.told["cancelled"]) == (50, MANY - 50)
    assert again.told["queued"] == 0
    store_all(world)


@pytest.mark.parametrize("point", POINTS)
def test_a_sink_ends_what_a_killed_call_left(
    redis_client: "redis.Redis", tmp_path: Path, ask: Ask, point: str
) -> None:
    world = World(redis_client, DirectoryStore(tmp_path / "out"), prompts=MANY)

    killed = ask("cancel", RUN, "--yes", HEADRACE_CRASH_AT=point)

    assert killed.code == -signal.SIGKILL
    store_all(world)
    assert outcomes(world) == {"cancelled": MANY}


def test_a_wipe_of_redis_does_not_revive_the_run(world: World, ask: Ask) -> None:
    world.finish(range(3))
    sink = run_sink(world, rows=3)
    sink.step()
    sink.release()
    ask("cancel", RUN, "--yes", HEADRACE_CRASH_AT="cancel.marked")
    world.client.flushall()

    adopt_run(world.client, world.store)

    assert depth(world) == 0
    assert world.jobs.claim(10, stream_mark_bytes=1 << 40).claims == []
    store_all(world)
    assert outcomes(world) == {"completed": 3, "cancelled": 7}


def test_a_cancelled_run_counts_what_is_left_of_it_before_a_sink_ends_that(
    world: World, ask: Ask
) -> None:
    world.finish(range(3))
    sink = run_sink(world, rows=3)
    sink.step()
    sink.release()
    ask("cancel", RUN, "--yes", HEADRACE_CRASH_AT="cancel.marked")
    world.client.flushall()

    ask("resume", RUN, "--output", world.record.output)

    status = ask("status", RUN, "--json")
    counted = [status.told[name] for name in ("total", "completed", "queued", "in_flight")]
    assert counted == [10, 3, 7, 0]
    store_all(world)


def test_cancel_finds_a_run_that_redis_has_lost(world: World, ask: Ask) -> None:
    world.client.flushall()

    ended = ask("cancel", RUN, "--yes", "--json", "--output", world.record.output)

    assert ended.code == 0, ended.err
    assert ended.told["cancelled"] == 10
    store_all(world)


def test_a_wiped_redis_does_not_make_a_cancelled_run_look_lost(world: World, ask: Ask) -> None:
    ask("cancel", RUN, "--yes")
    store_all(world)
    world.client.flushall()

    status = ask("status", RUN, "--json", "--output", world.record.output)

    assert (status.code, status.told["status"]) == (1, "cancelled")


def test_without_redis_the_store_is_marked_and_a_sink_heeds_it(
    world: World, tmp_path: Path
) -> None:
    away = {"HEADRACE_REDIS": "redis://127.0.0.1:1"}

    asked = producer("cancel", RUN, "--output", world.record.output, cwd=tmp_path, env=away)
    ended = producer(
        "cancel", RUN, "--yes", "--output", world.record.output, cwd=tmp_path, env=away
    )

    assert asked.code == ended.code == 4
    assert "marked as cancelled" in ended.err
    assert "marked as cancelled" not in asked.err
    store_all(world)
    assert outcomes(world) == {"cancelled": 10}


def test_success_is_not_written_for_a_run_that_only_the_store_calls_cancelled(
    world: World, ask: Ask
) -> None:
    world.finish(range(9))
    sink = run_sink(world)
    sink.step()
    ask("cancel", RUN, "--yes", HEADRACE_CRASH_AT="cancel.marked")
    world.finish([9])

    assert drain(sink) is Standing.FAILED

    assert world.store.get(names.SUCCESS) is None


def test_records_wait_where_the_streams_are_half_full(world: World) -> None:
    Cancels(world.client, world.record).mark()
    canceller = Canceller(world.client, world.store, world.record)
    world.client.config_set("maxmemory", "400mb")
    world.client.hset(names.counts(RUN), "stream_bytes", 60_000_000)

    assert canceller.step(limit_s=5) == "full"
    assert canceller.ended == 0

    world.client.hset(names.counts(RUN), "stream_bytes", 0)
    assert canceller.step(limit_s=5) == "done"
    assert canceller.ended == 10


def test_a_rewind_of_redis_to_before_the_mark_does_not_revive_the_run(
    world: World, ask: Ask
) -> None:
    ask("cancel", RUN, "--yes", HEADRACE_CRASH_AT="cancel.told")
    # What a Redis that was taken back knows: the prompts, and nothing of the cancellation.
    world.client.hdel(names.run(RUN), "cancelled")
    world.client.hset(names.run(RUN), "reconciled", "an earlier life")

    assert world.jobs.claim(1, stream_mark_bytes=1 << 40).claims == []
    reconcile(world.client, world.store, world.record)

    state = world.runs.state(RUN)
    assert state is not None
    assert state.cancelled
    store_all(world)
    assert outcomes(world) == {"cancelled": 10}


def test_without_the_store_nothing_is_changed(world: World, ask: Ask) -> None:
    out = Path(world.record.output)
    out.rename(out.with_name("away"))

    ended = ask("cancel", RUN, "--yes")

    assert ended.code == 4, ended.err
    state = world.runs.state(RUN)
    assert state is not None
    assert not state.cancelled
    assert depth(world) == 10


@pytest.mark.parametrize(("answer", "code"), [(b"n\n", 1), (b"\n", 1), (b"y\n", 0)])
def test_a_person_is_asked_and_may_say_no(
    world: World, valkey: RedisServer, tmp_path: Path, answer: bytes, code: int
) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, answer)

    ended = programs.run(
        [sys.executable, "-m", "producer", "cancel", RUN],
        cwd=tmp_path,
        env=environment({"HEADRACE_REDIS": valkey.tcp_url}),
        stdin=theirs,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(ours)
    os.close(theirs)

    assert ended.returncode == code, ended.stderr
    assert f"cancel run {RUN} for good? 10 prompts waiting and 0 at the servers" in ended.stderr
    assert (world.store.get(names.CANCELLED) is None) == bool(code)
    assert ("nothing was changed" in ended.stderr) == bool(code)


def test_a_request_that_was_removed_while_in_flight_ends_from_inputs(world: World) -> None:
    claim(world, 2)
    Cancels(world.client, world.record).mark()
    canceller = Canceller(world.client, world.store, world.record)
    assert canceller.step(limit_s=5) == "held"

    world.client.delete(names.rq_job(world.key(0).hex()))
    world.client.zadd(names.leases(RUN), {world.key(n).hex(): 1 for n in range(2)}, xx=True)

    assert canceller.step(limit_s=5) == "done"
    assert canceller.ended == 10
