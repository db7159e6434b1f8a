"""The servers that the other tests stand on do what their names say."""

import redis

from tests.support.redis_server import RedisServer


def test_what_was_answered_survives_a_kill(any_redis: RedisServer) -> None:
    client = any_redis.client()
    # With everysec an answer may leave before its write does.
    client.config_set("appendfsync", "always")
    client.set("key", "value")

    any_redis.restart()

    fresh = any_redis.client()
    over_tcp = redis.Redis.from_url(any_redis.tcp_url)
    assert fresh.get("key") == over_tcp.get("key") == b"value"
    for each in (client, fresh, over_tcp):
        each.close()


def test_a_wiped_server_comes_back_empty(any_redis: RedisServer) -> None:
    client = any_redis.client()
    client.set("key", "value")
    client.close()

    any_redis.wipe()

    fresh = any_redis.client()
    assert fresh.dbsize() == 0
    fresh.close()
