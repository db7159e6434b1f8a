"""Open Redis: the only place where a client is made, so time-outs and retries are said once.

redis-py's two constructors have different defaults (one retries ten times, one never), and a
blocking read longer than the socket time-out raises. Both are set here explicitly.
"""

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, cast
from urllib.parse import urlsplit

import redis
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.retry import Retry

from common.errors import RedisFullError, RedisUnusableError, UsageError
from common.refusals import reason, remedy
from common.secrecy import hide_address

log = logging.getLogger(__name__)

DEFAULT_URL = "redis://localhost:6379/0"
DEFAULT_PORT = 6379
SOCKET_TIMEOUT_S = 20.0
CONNECT_TIMEOUT_S = 5.0
CHECK_TIMEOUT_S = 2.5
"""What the first call of a command gets: people wait for it.

It is tried four times: redis-py repeats the greeting of a connection within each try of ours.
"""
SILENT_S = 3.0
"""Whoever waits longer for that is told what for."""
LOADING_LOOK_S = 1.0

MINIMUM_VERSION = (6, 2)

REDIS_ERRORS = (redis.RedisError, OSError)
"""What a call on the client may raise when Redis is away, full or refusing."""

ELSEWHERE = [redis.exceptions.ReadOnlyError, redis.exceptions.MasterDownError]
"""After these the connection is given up: its name may lead to the new master by now."""


def redis_url(given: str | None) -> str:
    """Choose the address: the flag, HEADRACE_REDIS, RQ_REDIS_URL, else localhost."""
    url = (
        given or os.environ.get("HEADRACE_REDIS") or os.environ.get("RQ_REDIS_URL") or DEFAULT_URL
    )
    if "://" not in url and not url.startswith("embedded:"):
        # It is not repeated here: USER:PASSWORD@HOST is what a forgotten scheme leaves.
        raise UsageError(
            "the address of Redis (--redis) has no scheme: give redis://HOST:PORT/DB, rediss://…, "
            "unix://PATH or embedded:DIR"
        )
    return url


def public_address(url: str) -> str:
    """Name a Redis for people: scheme, host, port and database, never user or password."""
    try:
        parts = urlsplit(url)
        if parts.scheme == "unix":
            return f"unix://{parts.path}"
        port = parts.port or DEFAULT_PORT
    except ValueError:
        # What stands there may be half a password.
        raise UsageError(
            "the address of Redis (--redis) has no number below 65536 as its port: in a "
            "password, write "
            "/ as %2F, # as %23, ? as %3F and @ as %40"
        ) from None
    return f"{parts.scheme}://{parts.hostname or 'localhost'}:{port}{parts.path}"


def client_for(url: str) -> "redis.Redis":
    """Make a client without talking to the server.

    A call that fails to connect, or whose answer is lost, is repeated three times within about two
    seconds; whoever must survive a longer outage loops outside. A repeated write is safe, because
    every script of ours recognises its own repetition; two would count it, and are sent
    `without_retries`.
    """
    hide_address(url)
    try:
        return redis.Redis.from_url(url, **timing(unix=url.startswith("unix:")))
    except ValueError as error:
        raise UsageError(f"--redis {public_address(url)}: {error}") from None


def timing(*, unix: bool) -> dict[str, Any]:
    """Give a connection's time-outs and retries, for those who make a pool of their own."""
    # A unix socket cannot go half-open, and redis-py refuses the option there.
    tcp = {} if unix else {"socket_keepalive": True}
    return {
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "health_check_interval": 15,
        "retry": Retry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), 3),
        "retry_on_error": [redis.ConnectionError, redis.TimeoutError, *ELSEWHERE],
        "decode_responses": False,
        **tcp,
    }


def without_retries(client: "redis.Redis") -> "redis.Redis":
    """Make a client for the same Redis whose calls are sent once: a lost answer is an error.

    For calls whose repetition must say so: the caller repeats them itself.
    """
    return _alike(client, retry=Retry(NoBackoff(), 0), retry_on_error=ELSEWHERE)


def impatient_client(url: str, limit_s: float) -> "redis.Redis":
    """Make a client that gives up soon, for what is worth no waiting."""
    limits = {"socket_timeout": limit_s, "socket_connect_timeout": limit_s}
    return without_retries(_alike(client_for(url), **limits))


def _alike(client: "redis.Redis", **settings: Any) -> "redis.Redis":
    """Make a client for the same Redis with other settings."""
    pool = client.connection_pool
    kwargs = {**pool.connection_kwargs, **settings}
    return redis.Redis(
        connection_pool=redis.ConnectionPool(connection_class=pool.connection_class, **kwargs)
    )


def connect(url: str) -> "redis.Redis":
    """Connect and check that this Redis keeps what it is given.

    Raises:
        RedisUnusableError: See `check`.
    """
    client = client_for(url)
    check(client, public_address(url))
    return client


def check(client: "redis.Redis", where: str) -> None:
    """Check that this Redis keeps what it is given; waits for one that is loading its data.

    Args:
        client: Of that Redis.
        where: Its address, for people.

    Raises:
        RedisUnusableError: Away, refusing, older than 6.2, a replica, of a cluster, or set to
            evict keys.
    """
    info = info_of(client, where)
    said = False
    while info.get("loading") and info.get("role") == "master":
        if not said:
            log.warning("Redis at %s is loading its data: waiting for it", where)
            said = True
        time.sleep(jittered(LOADING_LOOK_S))
        info = info_of(client, where)
    refuse_old(info, where)
    refuse_role(info, where)
    refuse_eviction(info, where)


def refuse_old(info: Mapping[str, Any], where: str) -> None:
    """Raise RedisUnusableError where Redis lacks commands that are needed; `info` is its INFO."""
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < MINIMUM_VERSION:
        raise RedisUnusableError(
            f"Redis at {where} is version {info['redis_version']}: Headrace needs 6.2 or newer"
        )


def refuse_role(info: Mapping[str, Any], where: str) -> None:
    """Raise RedisUnusableError for a replica and a node of a cluster; `info` is its INFO."""
    if info.get("cluster_enabled"):
        raise RedisUnusableError(
            f"Redis at {where} is a node of a Redis Cluster, which Headrace does not support: "
            "give a Redis that is none"
        )
    if info.get("role") != "master":
        master = f"{info.get('master_host')}:{info.get('master_port')}"
        raise RedisUnusableError(
            f"Redis at {where} is a replica of {master} and takes no writes: give the address of "
            "its master"
        )


def info_of(client: "redis.Redis", where: str) -> dict[str, Any]:
    """Read all of Redis' INFO within seconds.

    Raises:
        RedisUnusableError: Away or refusing, in words.
    """
    # A Redis that takes connections and does not answer is told within seconds.
    once_more = Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), 1)
    try:
        with (
            _telling_of_silence(where),
            _alike(client, socket_timeout=CHECK_TIMEOUT_S, retry=once_more) as asking,
        ):
            return cast("dict[str, Any]", asking.info())
    except redis.AuthenticationError as error:
        raise RedisUnusableError(
            f"Redis at {where} refused the user or password: check the address"
        ) from error
    except redis.ResponseError as error:
        raise mapped(error, where) from error
    except REDIS_ERRORS as error:
        raise RedisUnusableError(
            f"Redis at {where} cannot be reached ({reason(error)}): {remedy(error, where)}"
        ) from None


@contextlib.contextmanager
def _telling_of_silence(where: str) -> Iterator[None]:
    waits = "Redis at %s does not answer yet: waiting for it"
    later = threading.Timer(SILENT_S, log.warning, (waits, where))
    later.daemon = True
    later.start()
    try:
        yield
    finally:
        later.cancel()


def refuse_eviction(memory: Mapping[str, Any], where: str) -> None:
    """Raise RedisUnusableError where Redis may drop keys to make room.

    Args:
        memory: Of its INFO, the section memory or all.
        where: Its address, for people.
    """
    policy = str(memory.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        raise RedisUnusableError(
            f"Redis at {where} has maxmemory-policy {policy}, which drops queued prompts and "
            "results without an error: set maxmemory-policy noeviction"
        )


def persistence_warning(client: "redis.Redis") -> str | None:
    """Say in one sentence that this Redis forgets everything when it stops, or None.

    Raises:
        RedisUnusableError: Away.
    """
    with mapping_errors(client):
        info = client.info("persistence")
    if info.get("aof_enabled"):
        return None
    return (
        "Redis keeps no append-only file: what is not yet in the store is redone when it restarts "
        "(appendonly yes avoids it)"
    )


def server_run_id(client: "redis.Redis") -> str:
    """Name what a Redis holds: changes when it restarts, and when it takes another's data.

    The scripts make the same of it (prelude.lua).
    """
    return run_id_of(client.info("server"), client.info("replication"))


def run_id_of(server: Mapping[str, Any], replication: Mapping[str, Any]) -> str:
    """Make that name from what INFO says in these sections."""
    return f"{server['run_id']}/{replication['master_replid']}"


def mapped(error: Exception, where: str) -> RedisUnusableError:
    """Turn what redis-py raised into ours."""
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return RedisFullError(
            f"Redis at {where} is full (maxmemory): the flow pauses until it has room"
        )
    return RedisUnusableError(f"Redis at {where}: {reason(error)}")


def address_of(client: "redis.Redis") -> str:
    """Name the Redis that a client talks to, for people: no user and no password."""
    settings = client.connection_pool.connection_kwargs
    if "path" in settings:
        return f"unix://{settings['path']}"
    return f"redis://{settings.get('host')}:{settings.get('port')}/{settings.get('db', 0)}"


@contextlib.contextmanager
def mapping_errors(client: "redis.Redis", where: str = "") -> Iterator[None]:
    """Turn whatever redis-py raises within the block into ours, naming the Redis as `where`."""
    try:
        yield
    except REDIS_ERRORS as error:
        raise mapped(error, where or address_of(client)) from error


def jittered(delay_s: float) -> float:
    """Spread a delay over [0.5, 1) of itself, so that many processes do not return as one."""
    return delay_s * random.uniform(0.5, 1.0)  # noqa: S311 - spreading, not secrecy
