"""What worker groups and sinks say of themselves: one JSON a process, with the instant it was said."""

import contextlib
from collections.abc import Iterator
from typing import cast

import msgspec
import redis

from common import connect, names

FRESH_MS = 30_000
"""A figure older than this is of a process that is away."""

_FORGET_MS = 3_600_000


class GroupFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One worker group's figures, design.md §5.

    Attributes:
        group: `gpu0@host`.
        state: starting, waiting_for_server, wrong_model, ready, down, draining.
        detail: Why, for people; empty when ready.
        in_flight: Open requests.
        leased: Jobs held: open, prefetched and not yet recorded.
        bound, cap: The most requests open at once; the server's effective cap (None: not told).
        gen_tokens_per_s: Rate of the server's counter between two readings.
        occupancy: Mean open requests over slots, over the last minute.
        oldest_s: Age of the oldest open request.
        completed: Completions recorded by this process.
        at_ms: Redis TIME of this reading, filled in when published.
    """

    group: str
    epoch: str
    host: str
    pid: int
    server: str
    state: str
    detail: str = ""
    in_flight: int = 0
    leased: int = 0
    bound: int = 0
    cap: int | None = None
    running: int | None = None
    queued: int | None = None
    gen_tokens_per_s: float | None = None
    kv_usage: float | None = None
    mamba_usage: float | None = None
    strategy: str | None = None
    server_version: str | None = None
    model: str | None = None
    occupancy: float | None = None
    oldest_s: float | None = None
    completed: int = 0
    at_ms: int = 0


class Groups:
    """The worker groups that one Redis has heard of."""

    def __init__(self, client: "redis.Redis", *, where: str = "") -> None:
        self._client = client
        self._where = where or "the given address"

    def publish(self, figures: GroupFigures) -> None:
        """Say how this process is."""
        with self._errors():
            at_ms = self._now_ms()
            stamped = msgspec.structs.replace(figures, at_ms=at_ms)
            self._client.hset(
                names.WORKER_GROUPS, figures.epoch, msgspec.json.encode(stamped).decode()
            )

    def withdraw(self, epoch: str) -> None:
        """Say that this process has ended."""
        with self._errors():
            self._client.hdel(names.WORKER_GROUPS, epoch)

    def fresh(self) -> list[GroupFigures]:
        """Read the processes that spoke within `FRESH_MS`; those long silent are forgotten."""
        with self._errors():
            now_ms = self._now_ms()
            raw = cast("dict[bytes, bytes]", self._client.hgetall(names.WORKER_GROUPS))
            read = {
                epoch: msgspec.json.decode(value, type=GroupFigures) for epoch, value in raw.items()
            }
            old = [e for e, figures in read.items() if now_ms - figures.at_ms > _FORGET_MS]
            if old:
                self._client.hdel(names.WORKER_GROUPS, *old)
        return sorted(
            (figures for figures in read.values() if now_ms - figures.at_ms <= FRESH_MS),
            key=lambda figures: figures.group,
        )

    def _now_ms(self) -> int:
        seconds, micros = cast("tuple[int, int]", self._client.time())
        return seconds * 1000 + micros // 1000

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except connect.REDIS_ERRORS as error:
            raise connect.mapped(error, self._where) from error
