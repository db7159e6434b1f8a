"""Slots: their sum never exceeds the bound, whoever dies, freezes, or is forgotten by Redis."""

from collections.abc import Iterator

import pytest
import redis

from common import names
from common.queue import Jobs
from common.queue.jobs import SLOT_TTL_MS
from tests.support.queue_world import SERVER, expire_slots, new_run_id_seen_ago, take
from tests.support.redis_server import RedisServer


@pytest.fixture
def client(any_redis: RedisServer) -> Iterator["redis.Redis"]:
    with any_redis.client() as client:
        yield client


def process(client: "redis.Redis", epoch: str, group: str = "gpu0@test") -> Jobs:
    return Jobs(client, epoch=epoch, group=group, server=SERVER)


def known_redis(client: "redis.Redis") -> None:
    """Let this Redis be one that the slots' keeper has long known."""
    take(process(client, "first"), 0, bound=1, quiet=True)


def changed_run_id(client: "redis.Redis") -> None:
    """Let what Redis holds come from before its restart."""
    client.hset(names.slots(SERVER), "run_id", "of-the-redis-before")


def test_processes_of_one_group_share_the_bound(client: "redis.Redis") -> None:
    known_redis(client)
    first, second, third = (process(client, epoch) for epoch in ("e1", "e2", "e3"))

    granted = [take(first, 40, bound=72).slots]
    granted += [take(second, 72, bound=72).slots, take(third, 72, bound=72).slots]

    assert granted == [40, 32, 0]
    assert {epoch: holder.slots for epoch, holder in first.holders().items()} == {
        "e1": 40,
        "e2": 32,
        "e3": 0,
    }


def test_a_renewal_follows_the_bound_and_what_others_leave(client: "redis.Redis") -> None:
    known_redis(client)
    first, second = process(client, "e1"), process(client, "e2")
    take(first, 72, bound=72)
    take(second, 72, bound=72)

    smaller = take(first, 50, bound=50).slots
    left_over = take(second, 72, bound=72).slots
    given_up = take(first, 0, bound=72)
    rest = take(second, 72, bound=72).slots

    assert (smaller, left_over, given_up.slots, rest) == (50, 22, 0, 72)
    assert list(first.holders()) == ["e2"]


def test_another_worker_group_is_refused(client: "redis.Redis") -> None:
    known_redis(client)
    take(process(client, "e1"), 10, bound=72)

    reply = take(process(client, "e2", "gpu7@elsewhere"), 10, bound=72)

    assert (reply.what, reply.other, reply.slots) == ("refused", "gpu0@test", 0)


def test_expired_slots_are_given_on_only_after_their_requests_were_aborted(
    client: "redis.Redis",
) -> None:
    known_redis(client)
    dead, heir = process(client, "e1"), process(client, "e2")
    take(dead, 72, bound=72)
    expire_slots(client, "e1")

    asked = take(heir, 72, bound=72)
    settled = take(heir, 72, bound=72, settled="e1")

    assert (asked.what, asked.other, asked.rid_prefix) == ("settle", "e1", "e1-")
    assert (settled.what, settled.slots) == ("granted", 72)
    assert take(dead, 72, bound=72).slots == 0


def test_an_expired_holder_of_another_group_is_settled_and_not_refused(
    client: "redis.Redis",
) -> None:
    known_redis(client)
    take(process(client, "e1"), 72, bound=72)
    expire_slots(client, "e1")
    heir = process(client, "e2", "gpu7@elsewhere")

    assert take(heir, 72, bound=72).what == "settle"
    assert take(heir, 72, bound=72, settled="e1").slots == 72


def test_a_holder_that_came_back_before_it_was_settled_keeps_its_slots(
    client: "redis.Redis",
) -> None:
    known_redis(client)
    frozen, heir = process(client, "e1"), process(client, "e2")
    take(frozen, 72, bound=72)
    expire_slots(client, "e1")
    assert take(heir, 72, bound=72).what == "settle"
    assert take(frozen, 72, bound=72).slots == 72

    late = take(heir, 72, bound=72, settled="e1")

    assert (late.what, late.slots) == ("granted", 0)


def test_the_successor_of_a_dead_process_ends_its_slots_before_they_expire(
    client: "redis.Redis",
) -> None:
    known_redis(client)
    take(process(client, "e1"), 72, bound=72)
    heir = process(client, "e2")

    take(heir, 0, bound=0, settled="e1")

    assert take(heir, 72, bound=72).slots == 72


# --- A Redis that is new, or was taken back ------------------------------------------------------


def test_on_a_new_redis_nothing_is_granted_before_holders_could_speak(
    client: "redis.Redis",
) -> None:
    newcomer = process(client, "e2")

    first = take(newcomer, 72, bound=72)
    new_run_id_seen_ago(client, SLOT_TTL_MS - 1000)
    still = take(newcomer, 72, bound=72)
    new_run_id_seen_ago(client, 1001)
    after = take(newcomer, 72, bound=72)

    assert first.what == still.what == "wait"
    assert 0 < still.wait_ms <= 1000 < first.wait_ms <= SLOT_TTL_MS
    assert (after.what, after.slots) == ("granted", 72)


def test_on_a_new_redis_a_server_where_nothing_is_open_is_free_at_once(
    client: "redis.Redis",
) -> None:
    newcomer = process(client, "e1")

    assert take(newcomer, 72, bound=72).what == "wait"
    assert take(newcomer, 72, bound=72, quiet=True).slots == 72
    assert take(process(client, "e2"), 72, bound=80).slots == 8


def test_on_a_new_redis_a_holder_declares_what_it_has_and_gets_no_more(
    client: "redis.Redis",
) -> None:
    first, second = process(client, "e1"), process(client, "e2")

    greedy = take(first, 72, bound=72, holds=40)
    rest = take(second, 72, bound=72, holds=32)

    assert (greedy.slots, rest.slots) == (40, 32)
    new_run_id_seen_ago(client, SLOT_TTL_MS + 1)
    take(second, 0, bound=72)
    assert take(first, 72, bound=72, holds=40).slots == 72


def test_after_a_restart_quiet_grants_nothing_new(client: "redis.Redis") -> None:
    known_redis(client)
    changed_run_id(client)

    reply = take(process(client, "e1"), 72, bound=72, quiet=True)

    assert (reply.what, reply.slots) == ("wait", 0)


def test_after_a_restart_what_redis_remembers_of_a_process_grants_it_nothing(
    client: "redis.Redis",
) -> None:
    known_redis(client)
    frozen = process(client, "e1")
    take(frozen, 72, bound=72)
    # Its slots ran out and another took them, but Redis came back from before that.
    changed_run_id(client)

    assert take(frozen, 72, bound=72).what == "wait"
    assert take(process(client, "e2"), 72, bound=80, holds=8).slots == 8


def test_after_a_restart_nobodys_requests_are_aborted_before_holders_could_speak(
    client: "redis.Redis",
) -> None:
    known_redis(client)
    alive, other = process(client, "e1"), process(client, "e2")
    take(alive, 40, bound=72)
    take(other, 32, bound=72)
    # Redis came back from long ago: what it remembers of both has run out.
    expire_slots(client, "e1")
    expire_slots(client, "e2")
    changed_run_id(client)

    newcomer = take(process(client, "e3"), 72, bound=72)
    declared = [take(alive, 40, bound=72, holds=40), take(other, 32, bound=72, holds=32)]

    assert newcomer.what == "wait"
    assert [(reply.what, reply.slots) for reply in declared] == [("granted", 40), ("granted", 32)]


def test_a_real_restart_changes_the_run_id(any_redis: RedisServer) -> None:
    with any_redis.client() as client:
        # With `everysec` a kill loses what waited for a slow fsync.
        client.config_set("appendfsync", "always")
        known_redis(client)
        take(process(client, "e1"), 40, bound=72)
        any_redis.restart()

        newcomer = take(process(client, "e2"), 72, bound=72, quiet=True)
        holder = take(process(client, "e1"), 72, bound=72, holds=40)

    assert newcomer.what == "wait"
    assert holder.slots == 40


def test_a_process_whose_words_are_no_json_of_ours_is_granted_as_one_that_declares_nothing(
    client: "redis.Redis",
) -> None:
    changed = Jobs(client, epoch="e1", group="gpu0@test", server=SERVER)

    reply = changed.take_slots(
        10, bound=10, rid_prefix="e1-", about={"note": '{"holds":99}'}, quiet=False
    )

    assert reply.what == "wait"
