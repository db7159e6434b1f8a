"""Which runs a worker group may serve, and when its server is called the wrong one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from common import names
from common.pins import identity_of
from common.queue import Runs
from common.store.directory import DirectoryStore
from tests.support.run_world import RUN, World
from workers.engine.eligible import Eligible
from workers.readings.loads import ServerIdentity

FIRST, OTHER = (ServerIdentity(model="m", model_path=path) for path in ("models/a", "models/b"))


@pytest.fixture
def world(redis_client: "redis.Redis", tmp_path: Path) -> Iterator[World]:
    made = World(redis_client, DirectoryStore(tmp_path / "out"), prompts=3, sealed=False)
    Runs(redis_client).pin(RUN, identity_of(FIRST))
    yield made
    made.close()


def test_a_server_that_fits_no_run_is_wrong_only_while_one_wants_work(world: World) -> None:
    eligible = Eligible(world.client)

    def told(identity: ServerIdentity = OTHER) -> tuple[list[str], bool]:
        eligible.refresh()
        return eligible.names(identity), "models/a" in eligible.wrong_model

    assert told(FIRST) == ([RUN], False)
    assert told() == ([], True)
    world.finish(range(3), "failed")
    assert told() == ([], True), "more may come"
    world.seal()
    assert told() == ([], False)
    world.retry([1])
    assert told() == ([], True)


def test_a_cancelled_run_wants_nothing_though_nobody_sealed_it(world: World) -> None:
    eligible = Eligible(world.client)
    eligible.refresh()
    assert eligible.names(OTHER) == []
    assert eligible.wrong_model

    world.client.hset(names.run(RUN), "cancelled", "1")
    world.client.hset(names.counts(RUN), "cancelled", 3)
    eligible.refresh()

    assert eligible.names(OTHER) == []
    assert not eligible.wrong_model
