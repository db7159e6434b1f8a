"""What a Redis user must be allowed to do, and a check before anything depends on it.

A script that lacks a right finds out in its midst, and what it had written by then stays: half a
finish would be a result that the ledger does not know. So every right is tried first.
"""

from typing import cast

import redis

from common import connect, names
from common.errors import RedisUnusableError
from common.queue.scripts import call

IN_SCRIPTS = """
    del exists expire get hdel hexists hget hgetall hincrby hkeys hlen hmget hset hsetnx info
    llen lpop lpush lrange persist pexpire rpush sadd set srem time unlink xadd xdel xlen xrange
    xrevrange zadd zcard zcount zrange zrangebyscore zrem zremrangebylex zremrangebyscore
    zrevrange zrevrangebyscore zscore
""".split()  # noqa: SIM905 - forty words read better than forty strings
"""Commands on keys, and what scripts ask of the server."""

BESIDE = """
    evalsha script|load multi exec ping select subscribe unsubscribe client|setname client|info
""".split()  # noqa: SIM905
"""What a connection, a transaction and RQ's own part of a worker need."""

PATTERNS = ("~headrace:*", "~rq:*", "resetchannels", "&rq:pubsub:*")


def acl_rights() -> str:
    """Give the rights as ACL SETUSER takes them."""
    return " ".join([*PATTERNS, *(f"+{command}" for command in (*IN_SCRIPTS, *BESIDE))])


def refuse_missing_rights(client: "redis.Redis", where: str, *, listens: bool = False) -> None:
    """See that the user may do all that is needed.

    Args:
        client: From `common.connect`.
        where: Its address, for people.
        listens: RQ's commands are listened for too.

    Raises:
        RedisUnusableError: A right is missing; the message names it. Or Redis is away.
    """
    if client.connection_pool.connection_kwargs.get("username") in {None, "", "default"}:
        # May do everything, as a rule; the trial costs a small Redis memory.
        return
    with connect.mapping_errors(client, where):
        missing = _missing_in_scripts(client)
        if not missing and not _may_transact(client):
            missing.append("multi, +exec")
        if listens:
            _try_listening(client)
    if missing:
        lacking = ", ".join(
            right if right.startswith("~") else f"+{right}" for right in sorted(missing)
        )
        raise RedisUnusableError(
            f"Redis at {where}: its user lacks the rights {lacking}: deploy/README.md has the "
            "line of ACL SETUSER that gives what Headrace needs"
        )


def _missing_in_scripts(client: "redis.Redis") -> list[str]:
    reply = call(client, "rights", names.RIGHTS_TRIED, names.RQ_RIGHTS_TRIED)
    return [raw.decode() for raw in cast("list[bytes]", reply)]


def _may_transact(client: "redis.Redis") -> bool:
    try:
        with client.pipeline(transaction=True) as pipe:
            pipe.exists(names.RIGHTS_TRIED)
            pipe.execute()
    except redis.ResponseError:
        # redis-py tells of a refused MULTI or EXEC only that the transaction came to nothing.
        return False
    return True


def _try_listening(client: "redis.Redis") -> None:
    """Raise redis-py's own error, which names the command, where it may not be done."""
    with client.pubsub() as listener:  # type: ignore[no-untyped-call]
        listener.subscribe(names.RQ_CHANNEL_TRIED)
        listener.get_message(timeout=connect.CHECK_TIMEOUT_S)
        listener.unsubscribe(names.RQ_CHANNEL_TRIED)
        listener.get_message(timeout=connect.CHECK_TIMEOUT_S)
