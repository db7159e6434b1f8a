"""An output that was removed or emptied: nothing is forgotten for it; enqueue makes it anew."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from common import catalog, names
from common.ending import stands, try_to_end
from common.errors import ConflictError, StoreEmptiedError
from common.queue.sinkview import sink_state
from common.reconcile import reconcile
from common.store import ObjectStore, open_store
from tests.support.producer_cli import Ended, producer
from tests.support.redis_server import RedisServer
from tests.support.run_world import RUN, World
from tests.support.s3 import S3Server
from tests.support.server_process import wait_until
from tests.support.sink_process import SinkProcess
from tests.support.sinks import drain, expire_lease, run_sink
from workers.sink.run_sink import Standing


@pytest.fixture(params=["directory", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "directory":
        return open_store(str(tmp_path / "out"))
    moto: S3Server = request.getfixturevalue("moto")
    made = moto.store(moto.new_bucket(), "runs/demo")
    made.probe()
    return made


@pytest.fixture
def done(redis_client: "redis.Redis", store: ObjectStore) -> World:
    """A run whose ten prompts have ended, proven."""
    world = World(redis_client, store)
    world.finish(range(10))
    assert drain(run_sink(world)) is Standing.COMPLETED
    expire_lease(world)
    return world


def empty(store: ObjectStore, *, but: tuple[str, ...] = ()) -> None:
    for found in list(store.list()):
        if not found.name.startswith(but) or not but:
            store.delete(found.name)


def test_an_emptied_output_is_not_believed(done: World) -> None:
    empty(done.store)
    sink = run_sink(done)

    with pytest.raises(StoreEmptiedError, match="enqueue FILE"):
        drain(sink)
    with pytest.raises(StoreEmptiedError):
        reconcile(done.client, done.store, done.record, deep=True)

    assert done.runs.counts(RUN).completed == 10
    assert list(done.store.list()) == []


def test_the_output_of_another_run_is_not_believed_either(done: World) -> None:
    empty(done.store)
    done.store.put(names.RUN_JSON, b'{"uid":"another"}')

    with pytest.raises(ConflictError, match="another"):
        try_to_end(done.client, done.store, done.record)

    assert done.runs.counts(RUN).completed == 10


def test_prompts_that_inputs_lacks_are_not_forgotten(done: World) -> None:
    empty(done.store, but=(names.RUN_JSON,))
    sink = run_sink(done)

    with pytest.raises(StoreEmptiedError, match="lacks 10 accepted prompts"):
        drain(sink)

    assert done.runs.counts(RUN).completed == 10
    assert not done.store.get(names.SUCCESS)
    # Not again at every look: each reads the whole store.
    assert sink.step() is Standing.GOES_ON


def test_no_batch_goes_into_an_emptied_output(
    redis_client: "redis.Redis", store: ObjectStore
) -> None:
    world = World(redis_client, store)
    world.finish(range(4))
    empty(store)

    with pytest.raises(StoreEmptiedError):
        run_sink(world).step()

    assert world.waiting() == 4
    assert list(store.list()) == []


# --- The remedy ----------------------------------------------------------------------------------

Enqueue = Callable[..., Ended]


@pytest.fixture
def enqueue(tmp_path: Path, valkey: RedisServer) -> Enqueue:
    def call(
        *numbers: int, output: str = "out", name: str = "p.jsonl", env: dict[str, str]
    ) -> Ended:
        (tmp_path / name).write_text(
            "".join(f'{{"id":{n},"prompt":"prompt {n}"}}\n' for n in numbers)
        )
        return producer(
            *("enqueue", name, "--run", RUN, "--output", output, "--max-tokens", "16", "--json"),
            cwd=tmp_path,
            env={"HEADRACE_REDIS": valkey.url, **env},
        )

    return call


@pytest.mark.parametrize("kept", [(), (names.RUN_JSON,), (names.RUN_JSON, names.INPUTS)])
def test_the_same_enqueue_makes_an_emptied_output_anew(
    done: World, enqueue: Enqueue, kept: tuple[str, ...], moto: S3Server
) -> None:
    empty(done.store, but=kept)

    ended = enqueue(*range(10), output=done.store.url, env=moto.environment())

    assert ended.code == 0, ended.err
    assert ended.told["lost_results"] == 10
    assert (ended.told["already_done"], ended.told["total"]) == (0, 10)
    assert "had lost the results of 10 prompts" in ended.err
    assert done.runs.counts(RUN).queued == 10
    done.finish(range(10))
    assert drain(run_sink(done)) is Standing.COMPLETED
    assert stands(done.store)
    done.check_store()
    done.check_counts()


def test_killed_when_run_json_is_there_again_the_same_call_makes_the_rest_anew(
    done: World, enqueue: Enqueue, moto: S3Server
) -> None:
    empty(done.store)
    killed = enqueue(
        *range(10),
        output=done.store.url,
        env={**moto.environment(), "HEADRACE_CRASH_AT": "enqueue.remade"},
    )

    assert killed.code == -signal.SIGKILL
    assert [found.name for found in done.store.list()] == [names.RUN_JSON]
    state = done.runs.state(RUN)
    assert state is not None
    assert len(state.open_producers) == 1
    assert done.runs.counts(RUN).completed == 10, "nothing is forgotten before inputs/ is back"
    ended = enqueue(*range(10), output=done.store.url, env=moto.environment())
    assert ended.told["lost_results"] == 10
    done.finish(range(10))
    assert drain(run_sink(done)) is Standing.COMPLETED
    done.check_store()


def test_a_file_of_several_brings_its_own_back_and_says_what_lacks(
    done: World, enqueue: Enqueue, moto: S3Server
) -> None:
    empty(done.store)

    ended = enqueue(*range(6), output=done.store.url, env=moto.environment())

    assert ended.told["lost_results"] == 6
    assert "lacks 4 accepted prompts" in ended.err
    counts = done.runs.counts(RUN)
    assert (counts.queued, counts.completed) == (6, 4)
    again = enqueue(*range(6, 10), output=done.store.url, env=moto.environment())
    assert again.told["lost_results"] == 4
    done.finish(range(10))
    assert drain(run_sink(done)) is Standing.COMPLETED
    done.check_counts()


def test_what_waits_in_the_streams_is_not_made_again(
    redis_client: "redis.Redis", store: ObjectStore, enqueue: Enqueue, moto: S3Server
) -> None:
    world = World(redis_client, store)
    world.finish(range(3))
    empty(store)

    ended = enqueue(*range(10), output=store.url, env=moto.environment())

    assert (ended.told["lost_results"], ended.told["already_done"]) == (0, 3)
    world.finish(range(3, 10))
    assert drain(run_sink(world)) is Standing.COMPLETED
    world.check_store()


def test_a_whole_output_is_left_alone(done: World, enqueue: Enqueue, moto: S3Server) -> None:
    before = {found.name for found in done.store.list()}
    # A producer that died between its number and its object has lost nothing.
    done.runs.next_inputs_seq(RUN)

    ended = enqueue(*range(10), output=done.store.url, env=moto.environment())

    assert (ended.code, ended.told["lost_results"], ended.told["already_done"]) == (0, 0, 10)
    assert {found.name for found in done.store.list()} == before


def test_a_sink_says_so_for_status_and_goes_on_after_the_remedy(
    redis_client: "redis.Redis", valkey: RedisServer, tmp_path: Path, enqueue: Enqueue
) -> None:
    world = World(redis_client, open_store(str(tmp_path / "out")))
    world.finish(range(10))
    before = run_sink(world)
    assert drain(before) is Standing.COMPLETED
    before.release()
    shutil.rmtree(tmp_path / "out")

    with SinkProcess(valkey.url, tmp_path, "--batch-rows", "4") as sink:
        wait_until(
            lambda: sink_state(redis_client, world.record).error is not None, "its complaint", 30
        )
        state = sink_state(redis_client, world.record)
        assert state.error is not None
        assert names.RUN_JSON in state.error
        assert state.sinks == 1
        assert sink.text().count(names.RUN_JSON) == 1
        ended = enqueue(*range(10), output=f"file://{tmp_path}/out/", env={})
        assert ended.code == 0, ended.err
        world.finish(range(10))
        wait_until((tmp_path / "out" / names.SUCCESS).exists, "the end", 60)
        wait_until(
            lambda: sink_state(redis_client, world.record).error is None, "no complaint", 30
        )
    world.check_store()
    assert len(catalog.list_inputs(world.store).rows) == 1
