"""What worker groups and sinks say of themselves: one JSON a process, with its instant."""

from contextlib import AbstractContextManager, suppress
from typing import cast

import msgspec
import redis  # noqa: TC002 - as everywhere in this package

from common import connect, names
from common.group_figures import GroupFigures
from common.queue.samples import Samples

FRESH_MS = 30_000
"""A figure older than this is of a process that is away."""

REPLACED_MS = 10_000
"""A process silent for so long is gone where a later one of its worker group speaks."""

_FORGET_MS = 3_600_000


class Groups:
    """The worker groups that one Redis has heard of.

    Attributes:
        client: Of that Redis.
        samples: What they were like before.
    """

    def __init__(self, client: "redis.Redis", *, where: str = "") -> None:
        self.client = self._client = client
        self.samples = Samples(client)
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
        now_ms, read = self._read()
        spoke = [figures for figures in read if now_ms - figures.at_ms <= FRESH_MS]
        return sorted(
            (figures for figures in spoke if not _replaced(figures, spoke)),
            key=lambda figures: figures.group,
        )

    def spoke(self) -> list[GroupFigures]:
        """Read what processes said last, within the last hour, the latest first."""
        return sorted(self._read()[1], key=lambda figures: -figures.at_ms)

    def _read(self) -> tuple[int, list[GroupFigures]]:
        with self._errors():
            now_ms = self._now_ms()
            raw = cast("dict[bytes, bytes]", self._client.hgetall(names.WORKER_GROUPS))
            read: dict[bytes, GroupFigures] = {}
            for epoch, value in raw.items():
                # Another version's, or not ours: that one is not shown, the others are.
                with suppress(msgspec.MsgspecError):
                    read[epoch] = msgspec.json.decode(value, type=GroupFigures)
            old = [e for e, figures in read.items() if now_ms - figures.at_ms > _FORGET_MS]
            if old:
                self._client.hdel(names.WORKER_GROUPS, *old)
        return now_ms, [figures for epoch, figures in read.items() if epoch not in old]

    def _now_ms(self) -> int:
        seconds, micros = self._client.time()
        return seconds * 1000 + micros // 1000

    def _errors(self) -> AbstractContextManager[None]:
        return connect.mapping_errors(self._client, self._where)


def _replaced(figures: GroupFigures, all_fresh: list[GroupFigures]) -> bool:
    """Tell whether a killed process's last words still stand beside its successor's."""
    return any(
        other.group == figures.group and other.at_ms - figures.at_ms > REPLACED_MS
        for other in all_fresh
    )
