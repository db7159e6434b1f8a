"""Feeding: requests that wait in `inputs/` come into RQ's queue as room comes (`lua/feed.lua`)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from common import connect
from common.models import RawRow, RunRecord
from common.queue.ledger import job_timeout_s
from common.queue.scripts import call

if TYPE_CHECKING:
    import redis


class FeedLostError(Exception):
    """This process may not feed any more: another does, Redis restarted, or the run has gone."""


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to feed at this instant.

    Attributes:
        start: Sequence in `inputs/` from which prompts may wait.
        again: From which sequence on all is to be listed and read again, since prompts came to
            wait there, or another process has fed; None as a rule.
        requests: How many may be fed.
    """

    start: int
    again: int | None
    requests: int


class FeedTurn:
    """One process's turn at feeding a run; the lease runs out by itself after 10 s."""

    def __init__(self, client: "redis.Redis", record: RunRecord, *, token: str) -> None:
        self._client = client
        self._record = record
        self._token = token
        self._timeout_s = job_timeout_s(record.params)

    def begin(self) -> Room | None:
        """Take the turn, if anything waits and there is room worth it; None otherwise."""
        reply = self._call("begin")
        if reply[0] != b"ok":
            return None
        return Room(
            start=int(reply[1]),
            again=None if reply[2] == b"" else int(reply[2]),
            requests=int(reply[3]),
        )

    def feed(self, rows: Sequence[RawRow], *, most: int) -> tuple[int, int]:
        """Queue those of the rows that wait, in their order, while there is room.

        Args:
            rows: At most about 1,000.
            most: Feed no more than these.

        Returns:
            How many rows are settled, from the first, and how many of them were fed.

        Raises:
            FeedLostError: Begin again.
        """
        flat = [part for row in rows for part in row]
        reply = self._turn("feed", self._timeout_s, most, *flat)
        return int(reply[1]), int(reply[2])

    def advance(self, done: int, start: int) -> None:
        """Go on with another object of `inputs/`: `done` is through."""
        self._turn("advance", done, start)

    def finish(self) -> None:
        """Give the turn up."""
        self._turn("finish")

    def _turn(self, operation: str, *args: Any) -> list[Any]:
        reply = self._call(operation, *args)
        if reply[0] != b"ok":
            raise FeedLostError(reply[0].decode())
        return reply

    def _call(self, operation: str, *args: Any) -> list[Any]:
        with connect.mapping_errors(self._client):
            return cast(
                "list[Any]",
                call(
                    self._client,
                    "feed",
                    operation,
                    self._record.run,
                    self._record.uid,
                    self._token,
                    *args,
                ),
            )
