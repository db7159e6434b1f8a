"""`producer status`, `watch`, `runs` and `pause` on a real Redis, as a user runs them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from common import names, snapshot
from common.group_figures import GroupFigures
from common.models import Counts
from common.queue import Groups, Ledger
from common.store.directory import DirectoryStore
from tests.support.producer_cli import Ended, producer, running
from tests.support.redis_server import RedisServer
from tests.support.run_world import RUN, World
from tests.support.server_process import wait_until
from tests.support.sinks import drain, run_sink

Ask = Callable[..., Ended]


@pytest.fixture
def world(redis_client: "redis.Redis", tmp_path: Path) -> World:
    return World(redis_client, DirectoryStore(tmp_path / "out"), prompts=10)


@pytest.fixture
def ask(valkey: RedisServer, tmp_path: Path) -> Ask:
    """Call a command with the address of the test's Redis."""

    def call(*arguments: str) -> Ended:
        return producer(*arguments, cwd=tmp_path, env={"HEADRACE_REDIS": valkey.tcp_url})

    return call


def say_ready(world: World, **own: Any) -> None:
    values = {"group": "gpu0@h", "epoch": "e1", "host": "h", "pid": 1, "server": "http://s"}
    Groups(world.client).publish(GroupFigures(**{**values, "state": "ready", **own}))


def test_the_counts_add_up_and_the_word_fits(world: World, ask: Ask) -> None:
    say_ready(world, in_flight=2, oldest_s=1.0)
    world.finish(range(3))
    world.finish([3], "failed")

    ended = ask("status", RUN, "--json")

    told = ended.told
    assert ended.code == 0
    assert told["status"] == "running"
    assert told["total"] == 10
    assert (told["completed"], told["failed"], told["in_flight"], told["queued"]) == (3, 1, 0, 6)
    assert told["rate_per_sec"] > 0
    assert told["eta_hours"] > 0
    assert [group["group"] for group in told["worker_groups"]] == ["gpu0@h"]


def test_people_get_a_page_with_the_same_figures(world: World, ask: Ask) -> None:
    say_ready(world, in_flight=2, bound=34, cap=32, running=2, queued=0, mamba_usage=0.61)
    world.finish(range(3))

    ended = ask("status", RUN)

    assert ended.code == 0
    for part in ("demo", "running", "3 of 10 (30.0%)", "completed 3", "gpu0@h", "61%", "2/34/32"):
        assert part in ended.out


@pytest.mark.cases
def test_b98_without_workers_it_waits_for_workers_and_nobody_knows_how_long(
    world: World, ask: Ask
) -> None:
    world.finish(range(3))

    told = ask("status", RUN, "--json").told

    assert told["status"] == "waiting_for_workers"
    assert told["eta_hours"] is None
    assert told["workers"] == 0


@pytest.mark.cases
def test_b63_jobs_that_somebody_deleted_do_not_harm_the_figures(world: World, ask: Ask) -> None:
    for number in range(5):
        world.client.delete(names.rq_job(world.key(number).hex()))

    ended = ask("status", RUN, "--json")

    assert ended.code == 0
    assert (ended.told["total"], ended.told["queued"]) == (10, 10)


@pytest.mark.parametrize(
    ("completed", "failed", "status", "code"),
    [(10, 0, "completed", 0), (6, 4, "completed_with_failures", 1), (0, 10, "failed", 1)],
)
@pytest.mark.cases
def test_b90_what_has_failed_is_never_called_done(
    world: World, ask: Ask, *, completed: int, failed: int, status: str, code: int
) -> None:
    world.finish(range(completed))
    world.finish(range(completed, completed + failed), "failed")
    assert ask("status", RUN, "--json").told["status"] == "running"  # not yet in the store

    drain(run_sink(world))
    ended = ask("status", RUN, "--json")

    told = ended.told
    assert (told["status"], ended.code) == (status, code)
    assert (told["completed"], told["failed"], told["eta_hours"]) == (completed, failed, 0)
    assert told["s3_uploaded"] == 10
    assert told["s3_bytes"] > 0
    assert ask("watch", RUN).code == code


def test_a_run_that_is_open_is_not_done(
    redis_client: "redis.Redis", tmp_path: Path, ask: Ask
) -> None:
    world = World(redis_client, DirectoryStore(tmp_path / "out"), prompts=2, sealed=False)
    world.finish(range(2))

    assert ask("status", RUN, "--json").told["status"] == "open"


@pytest.mark.usefixtures("world")
def test_a_pause_is_shown_with_its_reason_until_it_is_lifted(ask: Ask) -> None:
    assert ask("pause", RUN, "--reason", "another model comes").code == 0

    told = ask("status", RUN, "--json").told

    assert told["status"] == "paused"
    assert "another model comes" in told["warnings"][0]
    assert ask("pause", "nobody").code == 4


def test_why_nothing_is_stored_is_shown_and_ends_with_4(world: World, ask: Ask) -> None:
    world.finish(range(3))
    world.client.hset(names.sink(RUN, 0), "error", "PutObject denied in bucket b")

    ended = ask("status", RUN, "--json")

    assert (ended.told["status"], ended.code) == ("s3_error", 4)
    assert "sink cannot write: PutObject denied in bucket b" in ended.told["warnings"][0]


def test_full_streams_are_shown(world: World, ask: Ask) -> None:
    say_ready(world)
    world.client.config_set("maxmemory", str(64 << 20))
    world.client.hset(names.counts(RUN), "stream_bytes", 17 << 20)

    ended = ask("status", RUN, "--json")

    assert (ended.told["status"], ended.code) == ("redis_full", 4)


# --- What Redis has lost -------------------------------------------------------------------------


@pytest.mark.usefixtures("world")
def test_a_run_that_nobody_knows_says_what_to_do(ask: Ask) -> None:
    ended = ask("status", "nobody", "--json")

    assert ended.code == 4
    assert ended.out == ""
    assert "producer runs" in ended.err
    assert "producer resume nobody --output" in ended.err


@pytest.mark.cases
def test_b68_a_redis_that_came_back_empty_has_lost_the_run(
    world: World, ask: Ask, redis_client: "redis.Redis"
) -> None:
    world.finish(range(3))
    run_sink(world, rows=3).step()
    world.store.put(names.PROGRESS, b'{"truncated": 2, "retries": 5, "elapsed_hours": 0.5}')
    redis_client.flushall()

    ended = ask("status", RUN, "--json", "--output", world.store.url)

    told = ended.told
    assert (told["status"], ended.code) == ("state_lost", 4)
    assert (told["total"], told["completed"], told["queued"]) == (10, 3, 7)
    assert told["eta_hours"] is None
    assert (told["truncated_share"], told["retries"], told["elapsed_hours"]) == (0.6667, 5, 0.5)
    assert "producer resume demo" in told["warnings"][0]


def test_what_a_sink_noted_here_leads_to_the_store(
    world: World, ask: Ask, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    note = tmp_path / ".headrace" / RUN / names.PROGRESS
    note.parent.mkdir(parents=True)
    note.write_text(json.dumps({"output": world.store.url}))
    redis_client.flushall()

    assert ask("status", RUN, "--json").told["status"] == "state_lost"
    assert ask("verify", RUN, "--json").told["total"] == 10


def test_a_store_that_knows_more_than_a_rewound_redis_is_told(world: World, ask: Ask) -> None:
    world.finish(range(4))
    before = world.client.dump(names.sink(RUN, 0))
    sink = run_sink(world, rows=2)
    sink.step()
    sink.step()
    world.client.delete(names.sink(RUN, 0))
    if before:
        world.client.restore(names.sink(RUN, 0), 0, before)
    world.client.hset(names.run(RUN), "reconciled", "another")

    ended = ask("status", RUN, "--json")

    assert (ended.told["status"], ended.code) == ("state_lost", 4)
    assert "batches of results" in ended.told["warnings"][0]


def test_an_output_that_is_another_runs_is_refused(
    world: World, ask: Ask, redis_client: "redis.Redis"
) -> None:
    redis_client.flushall()

    assert ask("status", "other", "--output", world.store.url).code == 5


def test_a_redis_that_is_away_ends_with_4(tmp_path: Path) -> None:
    away = {"HEADRACE_REDIS": "redis://127.0.0.1:1/0"}

    ended = producer("status", RUN, "--json", cwd=tmp_path, env=away)

    assert ended.code == 4
    assert "cannot be reached" in ended.err


@pytest.mark.parametrize("removed", ["all", "run.json", "_SUCCESS"])
def test_an_output_that_was_deleted_after_the_end_is_told_loudly(
    world: World, ask: Ask, tmp_path: Path, removed: str
) -> None:
    world.finish(range(10))
    drain(run_sink(world))
    assert ask("status", RUN).code == 0
    if removed == "all":
        shutil.rmtree(tmp_path / "out")
    else:
        (tmp_path / "out" / removed).unlink()

    ended = ask("status", RUN, "--json")

    assert (ended.told["status"], ended.code) == ("state_lost", 4)
    assert "run.json" in ended.told["warnings"][0] or "_SUCCESS" in ended.told["warnings"][0]
    assert "producer resume demo" in ended.told["warnings"][0]
    assert ask("status", "--json").code == 4
    assert f"! {ended.told['warnings'][0]}"[:60] in ask("status", RUN).out


# --- Servers, and other runs ---------------------------------------------------------------------


def test_servers_that_are_away_for_a_minute_end_with_4(world: World, ask: Ask) -> None:
    say_ready(world, state="down", detail="refused", unready_s=20.0, gen_tokens_per_s=900.0)
    soon = ask("status", RUN, "--json")
    assert (soon.told["status"], soon.code) == ("waiting_for_server", 0)

    say_ready(world, state="down", detail="refused", unready_s=300.0, gen_tokens_per_s=900.0)
    ended = ask("status", RUN, "--json")

    assert (ended.told["status"], ended.code) == ("waiting_for_server", 4)
    assert ended.told["worker_groups"][0]["gen_tokens_per_s"] is None
    page = " ".join(ask("status", RUN).out.split())
    for warning in ended.told["warnings"]:
        assert f"! {warning}" in page
    assert any("5 min" in warning for warning in ended.told["warnings"])


def test_a_run_behind_another_says_so(world: World, ask: Ask) -> None:
    say_ready(world)
    record = msgspec.structs.replace(world.record, run="big2", uid="2" * 32)
    world.runs.create(record, priority=5)
    assert ask("status", RUN, "--json").told["waits_behind"] is None  # it has no prompts
    Ledger(world.client, record).add([(world.key(1), world.fingerprint(1), world.prompt(1))])

    ended = ask("status", RUN, "--json")

    assert ended.told["waits_behind"] == "big2 (priority 5)"
    assert "waits behind big2 (priority 5)" in ask("status", RUN).out
    assert ask("status", "big2", "--json").told["waits_behind"] is None
    world.runs.pause("big2", "x")
    assert ask("status", RUN, "--json").told["waits_behind"] is None


def test_why_prompts_failed_is_told(world: World, ask: Ask) -> None:
    world.finish(range(8))
    bad = world.result(8, "failed")
    world.jobs.finish([msgspec.structs.replace(bad, reason="bad_request")])
    late = world.result(9, "failed")
    world.jobs.finish([msgspec.structs.replace(late, reason="timeout")])
    drain(run_sink(world))

    (warning,) = ask("status", RUN, "--json").told["warnings"]

    assert warning.startswith("2 failed: 1 bad_request, 1 timeout; see them: ")


def test_a_redis_that_nobody_started_is_not_made_by_looking(tmp_path: Path) -> None:
    for command in (("status",), ("runs",), ("verify", RUN), ("watch", RUN), ("resume", RUN)):
        ended = producer(*command, "--redis", "embedded:nothere", cwd=tmp_path)

        assert ended.code == 2, ended
        assert "embedded:nothere" in ended.err
    assert not (tmp_path / "nothere").exists()


def test_a_run_that_goes_on_is_not_verified_as_if_it_lacked_answers(
    world: World, ask: Ask
) -> None:
    world.finish(range(3))

    ended = ask("verify", RUN)

    assert ended.code == 1
    assert "the run goes on: 3 answers in Redis, not stored yet" in ended.out
    assert "id 5" not in ended.out
    assert "id 5" in ask("verify", RUN, "--output", world.store.url).out
    assert len(ask("verify", RUN, "--json").told["findings"]) == 10


def test_messages_name_one_thing_as_one(
    redis_client: "redis.Redis", tmp_path: Path, ask: Ask
) -> None:
    world = World(redis_client, DirectoryStore(tmp_path / "one"), prompts=1)
    world.finish([0])

    told = ask("verify", RUN).out
    assert "1 prompt;" in told
    assert "1 answer in Redis, not stored yet" in told


def test_a_mistyped_run_is_told_the_nearest_name(
    redis_client: "redis.Redis", tmp_path: Path, ask: Ask
) -> None:
    World(redis_client, DirectoryStore(tmp_path / "one"), prompts=1)
    for command in ("status", "pause", "resume", "priority", "forget", "cancel"):
        more = {"priority": ["1"], "forget": ["--yes"], "cancel": ["--yes"]}.get(command, [])
        ended = ask(command, f"{RUN}s", *more)

        assert ended.code == 4
        assert f"did you mean {RUN}?" in ended.err


def test_an_unknown_run_is_verified_by_its_output(ask: Ask) -> None:
    for command in (("verify", "nobody"), ("export", "nobody", "--to", "-")):
        ended = ask(*command)

        assert ended.code == 4
        assert "--output URL" in ended.err
        assert "producer resume" not in ended.err


# --- Several runs, and watching ------------------------------------------------------------------


def test_without_a_name_all_runs_are_told(world: World, ask: Ask) -> None:
    assert ask("status", "--json").told["run"] == RUN
    assert ask("runs", "--json").told["runs"][0]["total"] == 10
    listed = ask("runs")
    assert listed.code == 0
    assert "demo" in listed.out
    assert world.store.url in listed.out

    world.client.flushall()

    assert ask("runs", "--json").told == {"runs": []}
    assert "there is no run here" in ask("status").err


def test_watch_goes_on_until_the_run_has_ended(
    world: World, valkey: RedisServer, tmp_path: Path
) -> None:
    env = {"HEADRACE_REDIS": valkey.tcp_url}
    arguments = ("watch", RUN, "--json", "--every", "0.1")

    with running(*arguments, cwd=tmp_path, env=env) as watching:
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        world.finish(range(10))
        drain(run_sink(world))
        last = json.loads(watching.stdout.read().splitlines()[-1])
        code = watching.wait(30)

    assert first["completed"] == 0
    assert (last["status"], code) == ("completed", 0)


def test_watch_survives_a_redis_that_restarts(
    world: World, valkey: RedisServer, tmp_path: Path
) -> None:
    env = {"HEADRACE_REDIS": valkey.tcp_url}

    with running("watch", RUN, "--every", "0.1", cwd=tmp_path, env=env) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        assert b"waiting_for_workers" in watching.stdout.readline()
        valkey.kill()
        assert b"asking again" in watching.stderr.readline()
        valkey.start()
        world.client.connection_pool.disconnect()
        wait_until(lambda: _answers(world), "Redis again")
        world.runs.pause(RUN, "x")

        # What it was asked in between says nothing new.
        assert any(b"paused" in line for line in watching.stdout)


def _answers(world: World) -> bool:
    try:
        return world.runs.get(RUN) is not None
    except Exception:  # noqa: BLE001
        return False


def test_the_snapshot_counts_are_of_one_instant(world: World) -> None:
    world.finish(range(4))

    read = snapshot.read(world.client, RUN)

    assert read is not None
    assert isinstance(read.counts, Counts)
    ended = read.counts.completed + read.counts.failed + read.counts.cancelled
    assert ended + read.counts.in_flight + read.counts.queued == read.counts.total


def test_a_renewal_says_that_somebody_is_at_work_though_nothing_ends(world: World) -> None:
    world.jobs.renew([(RUN, world.key(0))])

    now_ms, per_bucket = world.runs.completions_per_bucket(RUN)

    assert set(per_bucket.values()) == {0}
    assert abs(next(iter(per_bucket)) - now_ms // 5_000) <= 1


def test_signs_of_life_do_not_pile_up(world: World) -> None:
    now = world.runs.completions_per_bucket(RUN)[0] // 5_000
    world.client.hset(names.rate(RUN), mapping={str(now - back): 0 for back in range(1, 300)})

    world.jobs.renew([(RUN, world.key(0))])

    per_bucket = world.runs.completions_per_bucket(RUN)[1]
    assert len(per_bucket) < 125
    assert min(per_bucket) >= now - 121
