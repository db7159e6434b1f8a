"""A drained server: nobody opens anything there, whoever started when, and what it had is kept."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from common import crashpoints, names
from common.queue import Jobs
from common.queue.drains import Drain, Held, look
from common.queue.jobs import SLOT_TTL_MS
from common.queue.records import SlotReply
from tests.conftest import REPOSITORY
from tests.support.queue_world import (
    SERVER,
    QueueWorld,
    expire_slots,
    new_run_id_seen_ago,
    take,
)
from tests.support.redis_server import RedisServer
from tests.support.server_process import wait_until

BOUND = 72
NO_KEY = -2


@pytest.fixture
def client(any_redis: RedisServer) -> Iterator["redis.Redis"]:
    with any_redis.client() as client:
        # A Redis that the slots' keeper has long known.
        take(process(client, "first"), 0, bound=1, quiet=True)
        yield client


def process(client: "redis.Redis", epoch: str, group: str = "gpu0@test") -> Jobs:
    return Jobs(client, epoch=epoch, group=group, server=SERVER)


def drain(client: "redis.Redis", owner: str = "workers restart at a", **options: Any) -> Drain:
    options = {"reason": "no_buffer", "limit_s": 300.0, **options}
    return Drain(client, SERVER, owner=owner, **options)


def hears(jobs: Jobs, *, open_: int = 0, token: str = "", holds: int = 0) -> SlotReply:
    """A process that asks for slots; with the token it says that it knows."""
    return take(
        jobs,
        BOUND,
        bound=BOUND,
        holds=(open_ if token else holds) or None,
        heard=token,
        open_requests=open_,
    )


def token_of(reply: SlotReply) -> str:
    assert reply.drain is not None
    return reply.drain.token


# --- What a drain does ---------------------------------------------------------------------------


def test_no_process_gets_slots_of_a_drained_server_not_even_one_that_starts(
    client: "redis.Redis",
) -> None:
    here, starting = process(client, "e1"), process(client, "e2")
    assert hears(here).slots == BOUND
    drain(client).hold()

    held, newcomer = hears(here, open_=BOUND), hears(starting)

    assert (held.what, newcomer.what, newcomer.slots) == ("drained", "drained", 0)
    assert held.drain is not None
    assert (held.drain.owner, held.drain.reason) == ("workers restart at a", "no_buffer")
    assert 299_000 < held.drain.left_ms <= 300_000


def test_nothing_is_claimed_for_a_drained_server_though_slots_are_still_held(
    client: "redis.Redis",
) -> None:
    world = QueueWorld(client, prompts=3)
    jobs = world.jobs("e1")
    held = drain(client)
    held.hold()

    during = world.claim(jobs)
    held.lift()

    assert (during.why, during.claims) == ("drained", [])
    assert len(world.claim(jobs).claims) == 3


def test_another_servers_drain_is_not_ours(client: "redis.Redis") -> None:
    Drain(client, "http://elsewhere:1", owner="a", reason="b", limit_s=1).hold()

    assert hears(process(client, "e1")).what == "granted"


def test_it_is_empty_when_every_living_process_knows_and_has_nothing_open(
    client: "redis.Redis",
) -> None:
    one, two = process(client, "e1"), process(client, "e2")
    take(one, 40, bound=BOUND)
    hears(two)
    ours = drain(client)

    told = [ours.hold()]
    token = token_of(hears(one, open_=10, holds=40))
    told.append(ours.hold())
    hears(one, open_=7, token=token)
    told.append(ours.hold())
    hears(two, token=token)
    hears(one, token=token)
    told.append(ours.hold())

    assert told == [
        Held(open=72, unheard=2),
        Held(open=72, unheard=2),
        Held(open=39, unheard=1),
        Held(),
    ]
    assert [each.empty for each in told] == [False, False, False, True]


def test_a_process_that_is_gone_is_not_waited_for(client: "redis.Redis") -> None:
    hears(process(client, "e1"))
    ours = drain(client)
    assert not ours.hold().empty

    expire_slots(client, "e1")

    assert ours.hold().empty


def test_what_is_open_keeps_its_slots_when_the_drain_is_over_first(client: "redis.Redis") -> None:
    one, two = process(client, "e1"), process(client, "e2")
    hears(one)
    ours = drain(client)
    ours.hold()
    token = token_of(hears(one, open_=50))
    hears(one, open_=50, token=token)

    ours.lift()

    rest = hears(two).slots, hears(one, open_=50, token=token).slots
    assert rest == (BOUND - 50, 50)


def test_nobody_settles_the_dead_at_a_drained_server(client: "redis.Redis") -> None:
    hears(process(client, "e1"))
    expire_slots(client, "e1")
    ours = drain(client)
    ours.hold()

    during = hears(process(client, "e2"))
    ours.lift()

    assert (during.what, hears(process(client, "e2")).what) == ("drained", "settle")


def test_another_worker_group_is_refused_at_a_drained_server_too(client: "redis.Redis") -> None:
    hears(process(client, "e1"))
    drain(client).hold()

    assert hears(process(client, "e2", "gpu7@elsewhere")).what == "refused"


# --- Whose it is, and how long it stands ---------------------------------------------------------


def test_a_second_owner_is_refused_by_the_name_of_the_first(client: "redis.Redis") -> None:
    first, second = drain(client), drain(client, "workers serve at b")
    first.hold()

    refused = second.hold()

    assert refused.refused == "workers restart at a (no_buffer)"
    assert not refused.empty
    assert (first.stands, second.stands) == (True, False)
    assert second.lift() is False
    assert first.hold().refused == ""
    assert first.lift() is True
    assert second.hold().refused == ""


def test_it_runs_out_when_its_owner_is_silent(client: "redis.Redis") -> None:
    silent = drain(client, ttl_ms=150)
    silent.hold()
    assert look(client, SERVER) is not None

    wait_until(
        lambda: look(client, SERVER) is None, "the end of a drain whose owner is silent", 60
    )

    assert hears(process(client, "e1")).what == "granted"
    assert not silent.stands
    assert silent.lift() is False


_OWNER = """
import sys
from common import connect
from common.queue.drains import Drain
ours = Drain(
    connect.client_for(sys.argv[1]), sys.argv[2], owner="a", reason="b", limit_s=9, ttl_ms=2_000
)
ours.hold()
ours.lift()
"""


@pytest.mark.parametrize(("point", "stands"), [("drain.taken", True), ("drain.lifted", False)])
def test_an_owner_that_is_killed_leaves_a_drain_that_ends_by_itself_or_none(
    valkey: RedisServer, point: str, *, stands: bool
) -> None:
    with valkey.client() as client:
        ended = subprocess.run(
            [sys.executable, "-c", _OWNER, valkey.url, SERVER],
            env={**os.environ, crashpoints.VARIABLE: point},
            cwd=REPOSITORY,
            check=False,
        )
        left_ms = client.pttl(names.drain(SERVER))

        assert ended.returncode == -signal.SIGKILL
        # One that stood may have ended by itself already, on a slow machine.
        assert left_ms <= 2_000 if stands else left_ms == NO_KEY
        wait_until(lambda: look(client, SERVER) is None, "the end of a dead owner's drain")


def test_a_renewal_makes_it_last_and_leaves_the_deadline_where_it_was(
    client: "redis.Redis",
) -> None:
    ours = drain(client, limit_s=100.0)
    ours.hold()
    before = look(client, SERVER)
    client.pexpire(names.drain(SERVER), 5_000)

    ours.hold()

    after = look(client, SERVER)
    assert client.pttl(names.drain(SERVER)) > 5_000
    assert before is not None
    assert after is not None
    assert after.token == before.token
    assert after.left_ms <= before.left_ms


def test_what_was_said_before_a_gap_does_not_count_after_it(client: "redis.Redis") -> None:
    here = process(client, "e1")
    hears(here)
    ours = drain(client, limit_s=100.0)
    ours.hold()
    hears(here, token=token_of(hears(here)))
    assert ours.hold().empty
    # It runs out, or Redis forgets it. Its process may have heard that it is over, or not yet.
    client.delete(names.drain(SERVER))

    again = ours.hold()

    assert (again.empty, again.unheard) == (False, 1)
    assert token_of(hears(here)) != ""
    left = look(client, SERVER)
    assert left is not None
    assert left.left_ms <= 100_000


def test_an_older_state_of_redis_does_not_pass_for_the_drain_of_today(
    client: "redis.Redis",
) -> None:
    ours = drain(client)
    drain(client, "an earlier one").hold()
    old = client.get(names.drain(SERVER))
    client.delete(names.drain(SERVER))
    ours.hold()
    client.set(names.drain(SERVER), old or b"")

    assert ours.hold().refused == "an earlier one (no_buffer)"
    assert not ours.stands
    client.delete(names.drain(SERVER))
    assert ours.hold().refused == ""
    assert ours.stands


def test_what_stands_in_the_place_of_ours_is_not_lifted(client: "redis.Redis") -> None:
    drain(client, "another").hold()
    anothers = client.get(names.drain(SERVER))
    client.delete(names.drain(SERVER))
    ours = drain(client)
    ours.hold()
    client.set(names.drain(SERVER), anothers or b"")

    assert ours.lift() is False
    assert client.get(names.drain(SERVER)) == anothers


def test_a_full_redis_takes_it(client: "redis.Redis") -> None:
    here = process(client, "e1")
    hears(here)
    ours = drain(client)
    client.config_set("maxmemory", 1)

    held = ours.hold()
    heard = hears(here, token=token_of(hears(here)))
    empty = ours.hold().empty
    lifted = ours.lift()

    client.config_set("maxmemory", 0)
    assert (held.unheard, heard.what, empty, lifted) == (1, "drained", True, True)


# --- A Redis that is new, or was taken back ------------------------------------------------------


def test_after_a_restart_of_redis_processes_that_it_has_forgotten_are_waited_for(
    client: "redis.Redis",
) -> None:
    client.hset(names.slots(SERVER), "run_id", "of-the-redis-before")
    ours = drain(client)

    first = ours.hold(quiet=True)
    new_run_id_seen_ago(client, SLOT_TTL_MS - 1_000)
    later = ours.hold()
    new_run_id_seen_ago(client, 1_001)

    assert 0 < later.unsure_ms <= 1_000 < first.unsure_ms
    assert (first.empty, later.empty, ours.hold().empty) == (False, False, True)


def test_of_a_redis_that_never_knew_the_server_its_own_word_is_enough(
    client: "redis.Redis",
) -> None:
    client.delete(names.slots(SERVER))
    ours = drain(client)

    assert ours.hold().unsure_ms > 0
    assert ours.hold(quiet=True).empty


def test_what_is_open_is_declared_to_a_redis_that_forgot_it(client: "redis.Redis") -> None:
    here = process(client, "e1")
    ours = drain(client)
    client.delete(names.slots(SERVER))
    ours.hold()

    token = token_of(hears(here, open_=30))
    hears(here, open_=30, token=token)

    assert (ours.hold().open, ours.hold().unheard) == (30, 0)


# --- What it does to jobs ------------------------------------------------------------------------


def test_a_server_that_dies_while_it_is_drained_is_no_death(client: "redis.Redis") -> None:
    world = QueueWorld(client, prompts=4)
    jobs = world.jobs("e1")
    held = world.held(world.claimed(jobs, 4))
    ours = drain(client)
    ours.hold()

    words = jobs.give_back(held[:2], died=True)
    ours.lift()
    words += jobs.give_back(held[2:], died=True)

    assert words == ["queued"] * 4
    assert [int(world.job(n).get("deaths", b"0")) for n in range(4)] == [0, 0, 1, 1]
    assert client.hget(names.run(world.run), "faults") == b"1"


def test_a_suspect_that_goes_back_from_a_drained_server_is_as_suspect_as_before(
    client: "redis.Redis",
) -> None:
    world = QueueWorld(client, prompts=1)
    jobs = world.jobs("e1")
    for _ in range(2):
        client.hset(names.run(world.run), "death_ms", 0)
        jobs.give_back(world.held(world.claimed(jobs, 1, alone=True)), died=True)
    before = world.parked(), client.hget(names.rq_job(world.hex(0)), "deaths")
    assert before == ({0}, b"2")
    held = world.held(world.claimed(jobs, 1, alone=True))
    ours = drain(client)
    ours.hold()

    assert jobs.give_back(held, died=True) == ["parked"]

    assert (world.parked(), client.hget(names.rq_job(world.hex(0)), "deaths")) == before
    assert world.job(0).get("died_alone") is None
    ours.lift()
    assert world.claimed(jobs, 1, alone=True) == [0]
