"""Open Redis: the only place where a client is made, so time-outs and retries are said once.

redis-py's two constructors have different defaults (one retries ten times, one never), and a
blocking read longer than the socket time-out raises. Both are set here explicitly.
"""

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.retry import Retry

from common.errors import RedisFullError, RedisUnusableError, UsageError
from common.secrecy import hide_address

DEFAULT_URL = "redis://localhost:6379/0"
DEFAULT_PORT = 6379
SOCKET_TIMEOUT_S = 20.0
CONNECT_TIMEOUT_S = 5.0
CHECK_TIMEOUT_S = 5.0
"""What the first call of a command gets: people wait for it."""

MINIMUM_VERSION = (6, 2)

REDIS_ERRORS = (redis.RedisError, OSError)
"""What a call on the client may raise when Redis is away, full or refusing."""


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
        "retry_on_error": [redis.ConnectionError, redis.TimeoutError],
        "decode_responses": False,
        **tcp,
    }


def without_retries(client: "redis.Redis") -> "redis.Redis":
    """Make a client for the same Redis whose calls are sent once: a lost answer is an error.

    For calls whose repetition must say so: the caller repeats them itself.
    """
    return _alike(client, retry=Retry(NoBackoff(), 0), retry_on_error=[])


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
        RedisUnusableError: Away, refusing, older than 6.2, or set to evict keys.
    """
    client = client_for(url)
    check(client, public_address(url))
    return client


def check(client: "redis.Redis", where: str) -> None:
    """Check that this Redis keeps what it is given.

    Args:
        client: Of that Redis.
        where: Its address, for people.

    Raises:
        RedisUnusableError: Away, refusing, older than 6.2, or set to evict keys.
    """
    # A Redis that takes connections and does not answer is told within seconds.
    once_more = Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), 1)
    try:
        with _alike(client, socket_timeout=CHECK_TIMEOUT_S, retry=once_more) as asking:
            info = asking.info()
    except redis.AuthenticationError as error:
        raise RedisUnusableError(
            f"Redis at {where} refused the user or password: check the address"
        ) from error
    except REDIS_ERRORS as error:
        raise RedisUnusableError(
            f"Redis at {where} cannot be reached ({_reason(error)}): is it running? Another "
            "address is given by --redis or HEADRACE_REDIS; --redis embedded:DIR starts one"
        ) from None
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < MINIMUM_VERSION:
        raise RedisUnusableError(
            f"Redis at {where} is version {info['redis_version']}: Headrace needs 6.2 or newer"
        )
    policy = str(info.get("maxmemory_policy", "noeviction"))
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
    """Read the id that changes whenever Redis restarts."""
    return str(client.info("server")["run_id"])


def mapped(error: Exception, where: str) -> RedisUnusableError:
    """Turn what redis-py raised into ours."""
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return RedisFullError(
            f"Redis at {where} is full (maxmemory): the flow pauses until it has room"
        )
    return RedisUnusableError(f"Redis at {where}: {_reason(error)}")


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


def _reason(error: BaseException) -> str:
    # The text of a connection error may hold the address with its password, so only its kind and
    # the system's own reason are told.
    cause = error.__cause__ or error.__context__ or error
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return type(error).__name__
