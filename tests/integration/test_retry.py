"""`producer retry` on a real Redis and a real store: by why they failed, each once, exactly."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from common import names
from common.models import Result
from common.store.directory import DirectoryStore
from tests.support.producer_cli import Ended, producer
from tests.support.redis_server import RedisServer
from tests.support.run_world import RUN, World
from tests.support.sinks import drain, run_sink
from workers.sink.run_sink import Standing

Ask = Callable[..., Ended]
POINTS = ["retry.revoked", "retry.queued", "retry.queued:2"]
WHY = {0: ("timeout", None), 1: ("bad_request", 400), 2: ("too_large", 413), 3: ("oom", 500)}


@pytest.fixture
def world(redis_client: "redis.Redis", tmp_path: Path) -> World:
    return World(redis_client, DirectoryStore(tmp_path / "out"), prompts=10, partitions=2)


@pytest.fixture
def ask(valkey: RedisServer, tmp_path: Path) -> Ask:
    """Call a command with the address of the test's Redis."""

    def call(*arguments: str, **env: str) -> Ended:
        return producer(*arguments, cwd=tmp_path, env={"HEADRACE_REDIS": valkey.tcp_url, **env})

    return call


def failed(world: World, number: int, **members: Any) -> Result:
    """A failure that says why."""
    reason, status = WHY.get(number, ("timeout", None))
    result = world.result(number, "failed")
    row = msgspec.json.decode(result.row) | {"reason": reason, "status": status} | members
    return msgspec.structs.replace(result, row=msgspec.json.encode(row), reason=reason)


def fail(world: World, *numbers: int) -> None:
    assert world.jobs.finish([failed(world, n) for n in numbers]) == ["ok"] * len(numbers)


def end(world: World) -> Standing:
    """Let a sink store everything and end the run."""
    sink = run_sink(world, rows=1000)
    standing = drain(sink)
    sink.release()
    world.check_store()
    world.check_counts()
    return standing


def stored_with_failures(world: World) -> None:
    """Four failed for their own reasons, six completed, all proven."""
    fail(world, 0, 1, 2, 3)
    world.finish(range(4, 10))
    assert end(world) is Standing.FAILED
    assert world.store.get(names.SUCCESS) is not None


def tries(world: World) -> dict[int, str]:
    entries = world.ledger.lookup([world.key(n) for n in range(world.accepted)])
    return {n: f"{e.state}/{e.try_}" for n, e in enumerate(entries) if e and e.try_ > 1}


def test_a_dry_run_counts_by_reason_and_changes_nothing(world: World, ask: Ask) -> None:
    stored_with_failures(world)

    ended = ask("retry", RUN, "--dry-run", "--reason", "4xx", "--json")

    assert ended.code == 0, ended.err
    told = ended.told
    assert told["by_reason"] == {"timeout": 1, "bad_request": 1, "too_large": 1, "oom": 1}
    assert told["by_status"] == {"400": 1, "413": 1, "500": 1}
    assert told["matched"] == {"bad_request": 1, "too_large": 1}
    assert (told["failed"], told["retried"]) == (4, 0)
    assert "2 prompts would get a new try" in ended.err
    assert tries(world) == {}
    assert world.store.get(names.SUCCESS) is not None


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        ([], [0, 1, 2, 3]),
        (["--reason", "timeout"], [0]),
        (["--reason", "413"], [2]),
        (["--reason", "5xx", "--reason", "bad_request"], [1, 3]),
        (["--id", "2", "--id", "3"], [2, 3]),
        (["--id", "2", "--reason", "timeout"], []),
    ],
)
def test_what_is_asked_for_gets_a_new_try(
    world: World, ask: Ask, flags: list[str], numbers: list[int]
) -> None:
    stored_with_failures(world)

    ended = ask("retry", RUN, *flags, "--json")

    assert ended.code == 0, ended.err
    assert ended.told["retried"] == len(numbers)
    assert tries(world) == dict.fromkeys(numbers, "queued/2")
    counts = world.runs.counts(RUN)
    assert (counts.failed, counts.queued, counts.completed) == (4 - len(numbers), len(numbers), 6)
    assert (world.store.get(names.SUCCESS) is None) == bool(numbers)


def test_a_run_that_had_ended_goes_on_and_ends_anew(world: World, ask: Ask) -> None:
    stored_with_failures(world)
    ask("retry", RUN)
    assert ask("status", RUN, "--json").told["status"] not in {"completed", "failed"}

    world.finish(range(4), try_=2)

    assert end(world) is Standing.COMPLETED
    assert ask("status", RUN, "--json").told["status"] == "completed"
    assert world.store.get(names.SUCCESS) is not None
    assert ask("retry", RUN).code == 0


def test_failures_that_no_sink_has_stored_yet_are_tried_too(world: World, ask: Ask) -> None:
    fail(world, 0, 1)
    sink = run_sink(world, rows=2)
    sink.step()
    sink.release()
    fail(world, 2, 3)

    ended = ask("retry", RUN, "--json")

    assert ended.told["retried"] == 4
    assert ended.told["by_reason"] == {"timeout": 1, "bad_request": 1, "too_large": 1, "oom": 1}
    world.check_counts()
    assert tries(world) == dict.fromkeys(range(4), "queued/2")


def test_the_same_call_again_tries_nothing_twice(world: World, ask: Ask) -> None:
    stored_with_failures(world)
    ask("retry", RUN)

    again = ask("retry", RUN, "--json")

    assert again.code == 0
    assert again.told["retried"] == 0
    assert "nothing to try again" in again.err
    assert tries(world) == dict.fromkeys(range(4), "queued/2")
    world.jobs.finish([msgspec.structs.replace(failed(world, 0, **{"try": 2}), try_=2)])
    third = ask("retry", RUN, "--json")
    assert third.told["by_reason"] == {"timeout": 1}
    assert tries(world)[0] == "queued/3"


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_anywhere_costs_nothing_but_the_same_call_again(
    redis_client: "redis.Redis", tmp_path: Path, ask: Ask, point: str
) -> None:
    world = World(redis_client, DirectoryStore(tmp_path / "out"), prompts=2_500)
    for first in range(0, 2_500, 500):
        fail(world, *range(first, first + 500))
    end(world)
    redis_client.delete(names.rq_queue(RUN))

    killed = ask("retry", RUN, HEADRACE_CRASH_AT=point)
    again = ask("retry", RUN, "--json")

    assert killed.code == -signal.SIGKILL
    assert again.code == 0, again.err
    assert tries(world) == dict.fromkeys(range(2_500), "queued/2")
    counts = world.runs.counts(RUN)
    assert (counts.total, counts.queued, counts.failed) == (2_500, 2_500, 0)
    assert redis_client.llen(names.rq_queue(RUN)) == 2_500
    assert world.store.get(names.SUCCESS) is None
    for first in range(0, 2_500, 500):
        world.finish(range(first, first + 500), try_=2)
    assert end(world) is Standing.COMPLETED


def test_a_wiped_redis_is_rebuilt_first(world: World, ask: Ask) -> None:
    stored_with_failures(world)
    world.client.flushall()

    dry = ask("retry", RUN, "--dry-run", "--output", world.record.output)
    ended = ask("retry", RUN, "--reason", "5xx", "--json", "--output", world.record.output)

    assert dry.code == 4
    assert "producer resume" in dry.err
    assert ended.code == 0, ended.err
    assert ended.told["retried"] == 1
    assert tries(world) == {3: "queued/2"}
    world.finish([3], try_=2)
    assert end(world) is Standing.FAILED


def test_cancelled_prompts_are_tried_only_where_one_says_so(world: World, ask: Ask) -> None:
    fail(world, 0)
    world.finish([1, 2], "cancelled")
    world.finish(range(3, 10))
    end(world)

    without = ask("retry", RUN, "--json")
    given = ask("retry", RUN, "--cancelled", "--json")

    assert (without.told["retried"], without.told["cancelled"]) == (1, 2)
    assert "--cancelled" in without.err
    assert given.told["retried"] == 2
    assert tries(world) == dict.fromkeys(range(3), "queued/2")


def test_a_row_without_its_request_is_helped_by_inputs(world: World, ask: Ask) -> None:
    assert world.jobs.finish([failed(world, 0, request="unreadable bytes")]) == ["ok"]

    ended = ask("retry", RUN, "--json")

    assert (ended.told["retried"], ended.told["bare"]) == (1, 0)
    job = world.client.hget(names.rq_job(world.key(0).hex()), "request")
    assert job == world.prompt(0)


def test_a_cancelled_run_and_a_wrong_reason_are_refused(world: World, ask: Ask) -> None:
    fail(world, 0)
    assert ask("retry", RUN, "--reason", "What?").code == 2
    ask("cancel", RUN, "--yes")

    refused = ask("retry", RUN)

    assert refused.code == 5
    assert "was cancelled" in refused.err


def test_a_reason_that_nothing_failed_for_shows_those_there_are(world: World, ask: Ask) -> None:
    stored_with_failures(world)

    ended = ask("retry", RUN, "--reason", "poison")

    assert ended.code == 0
    assert "none of them was asked for" in ended.err
    assert "too_large 1" in ended.err


def test_only_the_last_try_says_why_a_prompt_failed(world: World, ask: Ask) -> None:
    stored_with_failures(world)
    ask("retry", RUN, "--id", "1")
    again = failed(world, 1, reason="timeout", status=None, **{"try": 2})
    world.jobs.finish([msgspec.structs.replace(again, try_=2)])
    end(world)

    earlier = ask("retry", RUN, "--reason", "bad_request", "--json")
    now = ask("retry", RUN, "--reason", "timeout", "--json")

    assert earlier.told["by_reason"] == {"timeout": 2, "too_large": 1, "oom": 1}
    assert (earlier.told["retried"], now.told["retried"]) == (0, 2)
    assert tries(world) == {0: "queued/2", 1: "queued/3"}
