"""Say what Redis' INFO and its settings mean for a run; asks nobody."""

from collections.abc import Callable, Mapping
from typing import Any

from common import connect
from common.errors import RedisUnusableError
from workers.node.doctor.lines import Scribe

LISTPACK_BYTES = 65_536
"""What deploy/redis.conf sets: a queued prompt's job stays in one piece of memory."""

FULL_SHARE, NEARLY_FULL_SHARE = 0.97, 0.75
BUSY_CLIENTS_SHARE = 0.8
GB_FROM_MB = 1_000
SLOW_MS, VERY_SLOW_MS = 20.0, 1_000.0
CLOCK_WARNING_S = 2.0

Values = Mapping[str, Any]

_CONF = "deploy/redis.conf has it"


def judge_info(say: Scribe, info: Values, where: str) -> None:
    """Judge version, role, eviction, loading, persistence, room and clients.

    Args:
        say: Gets the lines.
        info: All of INFO.
        where: Redis' address, for people.
    """
    name = "Valkey" if info.get("server_name") == "valkey" else "Redis"
    version = info.get("valkey_version") or info.get("redis_version")
    _unless(say, "version", lambda: connect.refuse_old(info, where), f"{name} {version}")
    _unless(say, "role", lambda: connect.refuse_role(info, where), "a master, no cluster")
    _unless(say, "eviction", lambda: connect.refuse_eviction(info, where), "noeviction")
    if info.get("loading"):
        say.warning(
            "loading",
            f"it is loading its data ({info.get('loading_loaded_perc', '?')} %)",
            "wait until it is there; worker groups and sinks do",
        )
    _judge_disk(say, info)
    _judge_room(say, info)
    clients, most = int(info.get("connected_clients", 0)), int(info.get("maxclients", 0))
    if most and clients >= BUSY_CLIENTS_SHARE * most:
        say.warning(
            "clients",
            f"{clients:,} of {most:,} connections are taken",
            "raise maxclients: each worker process takes some five",
        )


def _unless(say: Scribe, check: str, refuse: Callable[[], None], text: str) -> None:
    try:
        refuse()
    except RedisUnusableError as error:
        say.failed(check, error)
    else:
        say.ok(check, text)


def _judge_disk(say: Scribe, info: Values) -> None:
    if not info.get("aof_enabled"):
        say.warning(
            "persistence",
            "no append-only file: what is not yet in the store is redone when it restarts",
            "set appendonly yes and appendfsync everysec",
        )
        return
    broken = [
        word
        for word in ("aof_last_write_status", "aof_last_bgrewrite_status")
        if info.get(word, "ok") != "ok"
    ]
    if broken:
        say.fault(
            "persistence",
            f"it cannot write its append-only file ({', '.join(broken)})",
            "its log says why: a full disk as a rule",
        )
    else:
        say.ok("persistence", "append-only file")


def _judge_room(say: Scribe, info: Values) -> None:
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    machine = int(info.get("total_system_memory", 0))
    if not limit:
        say.warning(
            "room",
            f"{_size(used)} used, and no maxmemory: it grows until the system ends it"
            + (f" ({_size(machine)} in the machine)" if machine else ""),
            "set maxmemory; the flow pauses before it is reached",
        )
        return
    told = f"{_size(used)} of {_size(limit)} used"
    if used >= FULL_SHARE * limit:
        say.fault(
            "room", told, "start a sink, which makes room; or raise maxmemory: nothing is claimed"
        )
    elif used >= NEARLY_FULL_SHARE * limit:
        say.warning("room", told, "is a sink running? Else raise maxmemory")
    elif machine and limit > machine:
        say.warning(
            "room",
            f"{told}, but the machine has {_size(machine)}",
            "lower maxmemory, so that it pauses the flow before the system ends it",
        )
    else:
        say.ok("room", told)


def judge_settings(say: Scribe, settings: Values | None) -> None:
    """Judge what CONFIG tells: appendfsync, and how hashes are kept.

    Args:
        say: Gets the lines.
        settings: Setting -> value; None where this user may not read them.
    """
    if settings is None:
        say.ok(
            "settings", "not readable by this user (CONFIG GET); deploy/redis.conf has what fits"
        )
        return
    fsync = str(settings.get("appendfsync", ""))
    if str(settings.get("appendonly")) == "yes":
        if fsync == "no":
            say.warning(
                "appendfsync",
                "no: a power loss costs what the system had not written, half a minute as a rule",
                "set appendfsync everysec",
            )
        else:
            say.ok("appendfsync", fsync)
    listpack = settings.get("hash-max-listpack-value") or settings.get("hash-max-ziplist-value")
    if listpack is None:
        return
    if int(listpack) < LISTPACK_BYTES:
        say.warning(
            "hashes",
            f"hash-max-listpack-value {int(listpack):,}: a queued prompt takes half as much again",
            f"set hash-max-listpack-value {LISTPACK_BYTES} ({_CONF})",
        )
    else:
        say.ok("hashes", f"hash-max-listpack-value {int(listpack):,}")


def judge_answers(say: Scribe, trips_ms: list[float]) -> None:
    """Judge how fast it answers: times of some PINGs."""
    if not trips_ms:
        return
    median, worst = sorted(trips_ms)[len(trips_ms) // 2], max(trips_ms)
    told = f"{median:.1f} ms an answer, {worst:.1f} at worst of {len(trips_ms)}"
    if median >= VERY_SLOW_MS:
        say.fault("latency", told, "nothing can be claimed in time: is it swapping, or far away?")
    elif median >= SLOW_MS:
        say.warning("latency", told, "keep Redis near the worker groups; is its machine busy?")
    else:
        say.ok("latency", told)


def judge_clock(say: Scribe, ahead_s: float) -> None:
    """Judge how far Redis' clock is ahead of this machine's."""
    told = f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
    if abs(ahead_s) >= CLOCK_WARNING_S:
        say.warning("clock", told, "let a time service set both: times in rows and logs differ")
    else:
        say.ok("clock", f"within {CLOCK_WARNING_S:.0f} s of this machine's")


def _size(number: float) -> str:
    megabytes = number / 1e6
    return f"{megabytes / 1e3:,.1f} GB" if megabytes >= GB_FROM_MB else f"{megabytes:,.1f} MB"
