"""Several runs in one Redis: the order of claims, and what one run's state does to the others."""

import json
from pathlib import Path

import pytest
import redis

from common import names
from common.errors import StateLostError
from common.queue import Runs
from common.reconcile import adopt_run
from common.store.directory import DirectoryStore
from tests.support.producer_cli import producer
from tests.support.queue_world import QueueWorld
from tests.support.redis_server import RedisServer
from tests.support.run_world import RUN, World

PAUSED = "paused"


def two_runs(client: "redis.Redis") -> tuple[QueueWorld, QueueWorld]:
    """An old run and a young one with the same ids."""
    old = QueueWorld(client, prompts=3, run="old")
    young = QueueWorld(client, prompts=3, run="young", uid="2" * 32)
    client.hincrby(names.run("young"), "created_ms", 1000)
    young.runs.set_priority("young", 0)
    return old, young


def claimed_runs(world: QueueWorld, count: int) -> list[str]:
    return [claim.run for claim in world.claim(world.jobs("e1"), count).claims]


def test_of_equals_the_older_run_is_claimed_from_first(redis_client: "redis.Redis") -> None:
    old, _ = two_runs(redis_client)

    assert claimed_runs(old, 4) == ["old", "old", "old", "young"]


def test_a_changed_priority_changes_the_next_claim(
    redis_client: "redis.Redis", valkey: RedisServer, tmp_path: Path
) -> None:
    old, young = two_runs(redis_client)
    assert claimed_runs(old, 1) == ["old"]

    ended = producer("priority", "young", "3", "--json", "--redis", valkey.url, cwd=tmp_path)

    assert ended.code == 0, ended.err
    assert ended.told == {"run": "young", "priority": 3, "before": 0, "order": ["young", "old"]}
    assert "first in line" in ended.err
    assert claimed_runs(old, 4) == ["young", "young", "young", "old"]
    lowered = producer("priority", "young", "-2", "--redis", valkey.url, cwd=tmp_path)
    assert lowered.code == 0, lowered.err
    assert young.runs.names() == ["old", "young"]


def test_a_priority_out_of_range_or_of_no_run_is_refused(
    redis_client: "redis.Redis", valkey: RedisServer, tmp_path: Path
) -> None:
    two_runs(redis_client)

    high = producer("priority", "old", "10", "--redis", valkey.url, cwd=tmp_path)
    none = producer("priority", "none", "1", "--redis", valkey.url, cwd=tmp_path)

    assert (high.code, none.code) == (2, 4)
    assert redis_client.exists(names.run("none")) == 0


def test_enqueue_keeps_a_priority_and_changes_it_where_it_says_so(
    redis_client: "redis.Redis", valkey: RedisServer, tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_text('{"id":1,"prompt":"x"}\n')
    arguments = ["enqueue", "p.jsonl", "--max-tokens", "8", "--redis", valkey.url]
    runs = Runs(redis_client)

    def priority_after(*more: str) -> int:
        assert producer(*arguments, "--output", "out", *more, cwd=tmp_path).code == 0
        state = runs.state("p")
        assert state is not None
        return state.priority

    assert priority_after("--priority", "4") == 4
    assert priority_after() == 4
    assert priority_after("--priority", "-1") == -1


def test_a_rebuild_keeps_the_priority_that_progress_told_of(
    redis_client: "redis.Redis", tmp_path: Path
) -> None:
    world = World(redis_client, DirectoryStore(tmp_path / "out"), prompts=2)
    world.store.put(names.PROGRESS, json.dumps({"priority": 6}).encode())
    redis_client.flushall()

    adopt_run(redis_client, world.store)

    state = world.runs.state(RUN)
    assert state is not None
    assert state.priority == 6
    other = QueueWorld(redis_client, prompts=1, run="other", uid="3" * 32, priority=5)
    assert other.runs.names() == [RUN, "other"]


@pytest.mark.parametrize("why", [PAUSED, "cancelled"])
def test_a_run_that_does_not_go_on_blocks_no_other(redis_client: "redis.Redis", why: str) -> None:
    old, _ = two_runs(redis_client)
    redis_client.hset(names.run("old"), why, "1")

    assert claimed_runs(old, 4) == ["young"] * 3


def test_what_is_done_in_one_run_is_not_done_in_another(redis_client: "redis.Redis") -> None:
    old, young = two_runs(redis_client)
    jobs = old.jobs("e1")
    old.claim(jobs, 6)

    assert old.finish(jobs, range(3)) == ["ok"] * 3
    assert young.finish(jobs, [0], "failed") == ["ok"]

    assert set(old.states().values()) == {"completed/1"}
    assert young.states()[0] == "failed/1"
    assert (old.counts().completed, young.counts().completed) == (3, 0)
    old.check()
    young.check()


def test_a_pause_is_shown_with_its_reason_and_what_still_runs(
    redis_client: "redis.Redis", valkey: RedisServer, tmp_path: Path
) -> None:
    old, young = two_runs(redis_client)
    old.claim(old.jobs("e1"), 1)

    ended = producer(
        *("pause", "old", "--reason", "a new model", "--json", "--redis", valkey.url),
        cwd=tmp_path,
    )

    assert ended.code == 0
    assert ended.told == {
        "run": "old",
        "paused": "a new model",
        "before": None,
        "in_flight": 1,
        "queued": 2,
    }
    assert "`producer resume old`" in ended.err
    assert claimed_runs(young, 9) == ["young"] * 3


def test_a_cancelled_run_cannot_be_paused(
    redis_client: "redis.Redis", valkey: RedisServer, tmp_path: Path
) -> None:
    two_runs(redis_client)
    redis_client.hset(names.run("old"), "cancelled", "1")

    ended = producer("pause", "old", "--redis", valkey.url, cwd=tmp_path)

    assert ended.code == 5
    assert redis_client.hexists(names.run("old"), PAUSED) == 0


def test_nothing_brings_a_run_back_that_is_not_there(redis_client: "redis.Redis") -> None:
    runs = Runs(redis_client)

    assert runs.pin("none", {"model": "m"}) == {"model": "m"}
    for change in (
        lambda: runs.pause("none", "x"),
        lambda: runs.set_window("none", 1),
        lambda: runs.set_priority("none", 1),
        lambda: runs.next_inputs_seq("none"),
        lambda: runs.open_producer("none", "a", "b"),
        lambda: runs.close_producer("none", "a", sealed=True),
    ):
        with pytest.raises(StateLostError):
            change()
    assert redis_client.keys("headrace:*") == []
