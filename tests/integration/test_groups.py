"""What worker groups say of themselves: a killed one is not shown beside its successor."""

import msgspec
import redis

from common import names
from common.queue import GroupFigures, Groups
from common.queue.groups import FRESH_MS, REPLACED_MS


def figures(epoch: str, group: str = "gpu0@host") -> GroupFigures:
    return GroupFigures(
        group=group, epoch=epoch, host="host", pid=1, server="http://127.0.0.1:1", state="ready"
    )


def age(client: "redis.Redis", epoch: str, by_ms: int) -> None:
    """Make what a process said older, instead of waiting."""
    raw = client.hget(names.WORKER_GROUPS, epoch)
    assert raw is not None
    said = msgspec.json.decode(raw, type=GroupFigures)
    old = msgspec.structs.replace(said, at_ms=said.at_ms - by_ms)
    client.hset(names.WORKER_GROUPS, epoch, msgspec.json.encode(old).decode())


def shown(groups: Groups) -> list[str]:
    return sorted(each.epoch for each in groups.fresh())


def test_a_killed_process_is_not_shown_beside_its_successor(redis_client: "redis.Redis") -> None:
    groups = Groups(redis_client)
    for each in (figures("dead"), figures("alive"), figures("other", "gpu1@host")):
        groups.publish(each)

    age(redis_client, "dead", REPLACED_MS + 5_000)
    age(redis_client, "other", REPLACED_MS + 5_000)

    assert shown(groups) == ["alive", "other"]


def test_who_has_been_silent_too_long_is_not_shown(redis_client: "redis.Redis") -> None:
    groups = Groups(redis_client)
    groups.publish(figures("silent"))

    age(redis_client, "silent", FRESH_MS + 5_000)

    assert shown(groups) == []
