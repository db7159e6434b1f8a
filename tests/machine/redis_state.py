"""Keep, put back and age all that a Redis holds.

A restart is a new server process with the kept state: what matters of it is that the run_id is
another and that connections break. Time passes by moving every instant that Redis holds into the
past; nobody sleeps.
"""

from typing import Any, cast

import msgspec
import redis

State = dict[bytes, tuple[bytes, int]]
"""Key -> (DUMP of its value, ms to live or -1)."""


def keep(client: "redis.Redis") -> State:
    """Read everything."""
    names = cast("list[bytes]", client.keys("*"))
    with client.pipeline(transaction=True) as pipe:
        for name in names:
            pipe.dump(name)
            pipe.pttl(name)
        replies = pipe.execute()
    found = zip(names, replies[::2], replies[1::2], strict=True)
    return {name: (dump, ttl_ms) for name, dump, ttl_ms in found if dump is not None}


def put_back(client: "redis.Redis", state: State) -> None:
    """Fill an empty server."""
    with client.pipeline(transaction=True) as pipe:
        for name, (dump, ttl_ms) in state.items():
            pipe.restore(name, max(ttl_ms, 0), dump)
        pipe.execute()


def age(client: "redis.Redis", step_ms: int) -> None:
    """Let `step_ms` pass for everything but the ids of stream entries."""
    names = [
        name
        for name in cast("list[bytes]", client.keys("headrace:*"))
        if b":l:" not in name and b":results:" not in name
    ]
    with client.pipeline(transaction=True) as pipe:
        for name in names:
            pipe.pttl(name)
        ttls = pipe.execute()
    with client.pipeline(transaction=True) as pipe:
        for name, ttl_ms in zip(names, ttls, strict=True):
            _age_value(client, pipe, name, step_ms)
            if ttl_ms >= 0:
                pipe.pexpire(name, ttl_ms - step_ms)
        pipe.execute()


def _age_value(client: "redis.Redis", pipe: Any, name: bytes, step_ms: int) -> None:
    if name.endswith((b":leases", b":sinks")):
        for member, _ in cast("list[Any]", client.zrange(name, 0, -1, withscores=True)):
            pipe.zincrby(name, -step_ms, member)
    elif b":sink:" in name:
        _less(client, pipe, name, "deadline_ms", step_ms)
    elif name.startswith(b"headrace:slots:"):
        held = cast("dict[bytes, bytes]", client.hgetall(name))
        for field, value in held.items():
            pipe.hset(name, field, _earlier(field, value, step_ms))
    elif name.startswith(b"headrace:renewed:"):
        since, last = (int(part) for part in cast("bytes", client.get(name)).split())
        pipe.set(name, f"{since - step_ms} {last - step_ms}", keepttl=True)
    elif name.startswith(b"headrace:run:") and name.count(b":") == 2:
        _less(client, pipe, name, "audited_ms", step_ms)


def _less(client: "redis.Redis", pipe: Any, name: bytes, field: str, step_ms: int) -> None:
    known = client.hget(name, field)
    if known:
        pipe.hset(name, field, int(float(cast("bytes", known))) - step_ms)


def _earlier(field: bytes, value: bytes, step_ms: int) -> bytes:
    if value.startswith(b"{"):
        holder = msgspec.json.decode(value)
        return msgspec.json.encode(holder | {"deadline_ms": holder["deadline_ms"] - step_ms})
    return b"%d" % (int(value) - step_ms) if field == b"since" else value
