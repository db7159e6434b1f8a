"""What a Redis holds, key by key, to compare: DUMP gives a hash in an order of its own."""

from typing import Any, cast

import redis


def contents(client: "redis.Redis", pattern: str = "*") -> dict[bytes, Any]:
    """Read every key that matches, with its value in a form that compares."""
    read: dict[bytes, Any] = {
        b"string": client.get,
        b"hash": client.hgetall,
        b"list": lambda key: client.lrange(key, 0, -1),
        b"set": client.smembers,
        b"zset": lambda key: client.zrange(key, 0, -1, withscores=True),
        b"stream": client.xrange,
    }
    found = list(client.scan_iter(pattern))
    return {key: read[cast("bytes", client.type(key))](key) for key in found}
