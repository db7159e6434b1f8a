"""Samples of worker groups in Redis: a bounded stream each. No result depends on any of them.

headrace:telemetry:GROUP   stream  `common.telemetry.Sample`, one an entry, at most
                                   `MOST_SAMPLES`; runs out three days after the last one
headrace:telemetry         zset    worker group -> when its last sample came
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from common import connect, names
from common.telemetry import KEPT_MS, MOST_SAMPLES, Sample, decode, encode

if TYPE_CHECKING:
    import redis

_FIELD = b"s"
_AT_ONCE = 64
"""Streams read in one call: some thousand entries."""


class Samples:
    """The samples that one Redis holds; calls raise `RedisUnusableError`."""

    def __init__(self, client: "redis.Redis") -> None:
        self._client = client

    def add(self, group: str, sample: Sample) -> None:
        """Keep a sample, in the place of the oldest where there are many.

        A full Redis takes none, and nothing is half done: what follows only says when to forget.
        """
        key = names.telemetry(group)
        with connect.mapping_errors(self._client):
            raw: Any = self._client.xadd(
                key, {_FIELD: encode(sample)}, maxlen=MOST_SAMPLES, approximate=False
            )
            at_ms = _at_ms(raw)
            with self._client.pipeline(transaction=False) as pipe:
                pipe.pexpire(key, KEPT_MS)
                pipe.zadd(names.TELEMETRY_GROUPS, {group: at_ms})
                pipe.zremrangebyscore(names.TELEMETRY_GROUPS, "-inf", at_ms - KEPT_MS)
                pipe.execute()

    def groups(self, since_ms: int) -> list[str]:
        """Name the worker groups with a sample from then on, sorted."""
        with connect.mapping_errors(self._client):
            found: Any = self._client.zrangebyscore(names.TELEMETRY_GROUPS, since_ms, "+inf")
        return sorted(cast("bytes", name).decode(errors="replace") for name in found)

    def first_ms(self, groups: Sequence[str], since_ms: int) -> int | None:
        """Say when the first sample of any of these came, from an instant on; None without one."""
        firsts = [
            _at_ms(entries[0][0])
            for entries in self._read(groups, str(since_ms), "+", count=1)
            if entries
        ]
        return min(firsts, default=None)

    def between(
        self, groups: Sequence[str], begin_ms: int, end_ms: int
    ) -> list[tuple[int, str, Sample]]:
        """Give the samples from one instant to before another: (instant, worker group, sample).

        Sorted; what is no sample is passed over.
        """
        found: list[tuple[int, str, Sample]] = []
        # The last entry before an instant ends in the highest number that an id can have.
        last = f"{end_ms - 1}-18446744073709551615"
        for group, entries in zip(groups, self._read(groups, str(begin_ms), last), strict=True):
            for entry_id, fields in entries:
                try:
                    found.append((_at_ms(entry_id), group, decode(fields[_FIELD])))
                except (KeyError, TypeError, msgspec.MsgspecError):
                    continue  # another version's, or nobody's
        return sorted(found, key=lambda each: each[:2])

    def _read(
        self, groups: Sequence[str], first: str, last: str, *, count: int | None = None
    ) -> list[list[Any]]:
        found: list[list[Any]] = []
        for start in range(0, len(groups), _AT_ONCE):
            with (
                connect.mapping_errors(self._client),
                self._client.pipeline(transaction=False) as pipe,
            ):
                for group in groups[start : start + _AT_ONCE]:
                    pipe.xrange(names.telemetry(group), first, last, count=count)
                found += map(_entries, pipe.execute(raise_on_error=False))
        return found


def _entries(reply: Any) -> list[Any]:
    """Give a stream's entries; a key that is somebody else's, of another kind, holds none."""
    if isinstance(reply, Exception):
        if str(reply).startswith("WRONGTYPE"):
            return []
        raise reply
    return list(reply)


def _at_ms(entry_id: bytes) -> int:
    return int(entry_id.partition(b"-")[0])
