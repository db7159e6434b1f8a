"""Try Redis: reach it, do what the work needs, and read what it says of itself."""

import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from common import connect, names
from common.errors import HeadraceError, RedisUnusableError
from common.queue import Groups, Runs
from common.queue.rights import refuse_missing_rights
from workers.node.doctor.judging_redis import (
    judge_answers,
    judge_clock,
    judge_info,
    judge_settings,
)
from workers.node.doctor.lines import Scribe

if TYPE_CHECKING:
    import redis

ANSWER_S = 5.0
PINGS = 20
FORGOTTEN_MS = 60_000
_SETTINGS = ("appendonly", "appendfsync", "hash-max-listpack-value", "hash-max-ziplist-value")


def examine_redis(say: Scribe, url: str) -> None:
    """Tell of one Redis.

    Args:
        say: Gets the lines.
        url: Its address, as redis-py takes it.
    """
    where = connect.public_address(url)
    with connect.impatient_client(url, ANSWER_S) as client:
        try:
            info = connect.info_of(client, where)
        except RedisUnusableError as error:
            say.failed("reachable", error)
            return
        say.ok("reachable", where)
        judge_info(say, info, where)
        judge_settings(say, _settings(client))
        _try_rights(say, client, where)
        _try_writing(say, client, where)
        _try_clock(say, client)


def outputs_of_runs(url: str, most: int) -> Sequence[tuple[str, str | None]]:
    """List the outputs of the runs that this Redis knows: (address, endpoint), each once.

    Raises:
        HeadraceError: Redis cannot be read.
    """
    found: dict[tuple[str, str | None], None] = {}
    with connect.impatient_client(url, ANSWER_S) as client:
        runs = Runs(client, where=connect.public_address(url))
        for name in runs.names():
            state = runs.state(name)
            if state is not None and not state.cancelled:
                found[state.record.output, state.record.endpoint_url] = None
            if len(found) == most:
                break
    return list(found)


def servers_of_groups(url: str, host: str) -> dict[str, str]:
    """Give name and server of each worker group that lives on a host, by the name.

    Raises:
        HeadraceError: Redis cannot be read.
    """
    with connect.impatient_client(url, ANSWER_S) as client:
        fresh = Groups(client, where=connect.public_address(url)).fresh()
    return {each.group: each.server for each in fresh if each.host == host}


def _settings(client: "redis.Redis") -> dict[str, Any] | None:
    found: dict[str, Any] = {}
    try:
        for name in _SETTINGS:
            found |= cast("dict[str, Any]", client.config_get(name))
    except connect.REDIS_ERRORS:
        return None
    return found


def _try_rights(say: Scribe, client: "redis.Redis", where: str) -> None:
    try:
        refuse_missing_rights(client, where, listens=True)
    except HeadraceError as error:
        say.failed("rights", error)
    else:
        user = client.connection_pool.connection_kwargs.get("username") or "default"
        say.ok("rights", f"the user {user} may do what is needed")


def _try_writing(say: Scribe, client: "redis.Redis", where: str) -> None:
    """Write, read and remove a key of our own; what is left of it Redis forgets in a minute."""
    key = names.DOCTOR + secrets.token_hex(8)
    try:
        with connect.mapping_errors(client, where):
            client.hset(key, "tried", "1")
            client.pexpire(key, FORGOTTEN_MS)
            same = client.hget(key, "tried") == b"1"
            client.delete(key)
    except RedisUnusableError as error:
        say.failed("writes", error)
        return
    if same:
        say.ok("writes", "a key was written, read and removed")
    else:
        say.fault("writes", "it does not give back what was written", "is it a proxy?")


def _try_clock(say: Scribe, client: "redis.Redis") -> None:
    trips_ms: list[float] = []
    ahead_s: float | None = None
    best_ms = float("inf")
    try:
        for _ in range(PINGS):
            began, began_at = time.monotonic(), time.time()
            seconds, micros = client.time()
            took_s = time.monotonic() - began
            trips_ms.append(took_s * 1000)
            if trips_ms[-1] < best_ms:
                # The shortest way there and back says most of when the clock was read.
                best_ms = trips_ms[-1]
                ahead_s = seconds + micros / 1e6 - (began_at + took_s / 2)
    except connect.REDIS_ERRORS:
        say.fault("latency", f"it stopped answering after {len(trips_ms)} calls")
    judge_answers(say, trips_ms)
    if ahead_s is not None:
        judge_clock(say, ahead_s)
