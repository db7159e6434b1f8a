"""Take one run out of Redis: what stands in the way, the begin, the sweep."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from common import connect, names
from common.crashpoints import reached
from common.queue.ledger import slice_buckets
from common.queue.scripts import call

if TYPE_CHECKING:
    import redis


class Left(msgspec.Struct, frozen=True):
    """What a forget that was begun needs to come to its end."""

    uid: str
    bits: int
    partitions: int


class ForgetLook(msgspec.Struct, frozen=True, kw_only=True):
    """What a forget finds.

    Attributes:
        left: Of one that was begun before; None when there is none.
        known: The run is there.
        waiting: Results that are not in the store yet.
        set_aside: Entries that are nobody's result.
        live: Leases that have not run out.
        holders: Epochs of the processes that hold them.
    """

    left: Left | None
    known: bool
    waiting: int
    set_aside: int
    live: int
    holders: list[str]


class Forgets:
    """The removal of one run from Redis. Every call may be repeated.

    Args:
        client: From `common.connect`.
        run: Its name.
    """

    def __init__(self, client: "redis.Redis", run: str) -> None:
        self._client = client
        self._run = run

    def look(self) -> ForgetLook:
        """See what stands in the way; changes nothing."""
        reply = self._call("look")
        return ForgetLook(
            left=msgspec.json.decode(reply[0], type=Left) if reply[0] else None,
            known=reply[1] == b"1",
            waiting=int(reply[2]),
            set_aside=int(reply[3]),
            live=int(reply[4]),
            holders=[epoch.decode() for epoch in reply[5:]],
        )

    def begin(
        self, uid: str, *, lose_results: bool
    ) -> Left | Literal["unknown", "leased", "waiting"]:
        """Take the run from everybody, in one atomic step, and leave the tombstone.

        Args:
            uid: Which run of the name.
            lose_results: Also where results wait for a sink.

        Returns:
            What is to be removed yet; or a word that says why nothing was done.
        """
        reply = self._call("begin", uid, "1" if lose_results else "")
        if reply[0] == b"ok":
            return msgspec.json.decode(reply[1], type=Left)
        return cast("Literal['unknown', 'leased', 'waiting']", reply[0].decode())

    def sweep(self, left: Left, *, total: int) -> Iterator[tuple[int, int]]:
        """Remove ledger and jobs slice by slice, then the rest.

        Args:
            left: From `look` or `begin`.
            total: Prompts of the run, about, by which slices are cut.

        Yields:
            Buckets that are through, and prompts that were in the last ones.
        """
        step = slice_buckets(left.bits, total)
        for first in range(0, 1 << left.bits, step):
            swept = int(self._call("sweep", first, step, left.bits))
            if swept:
                reached("forget.swept")
            yield first + step, swept
        reached("forget.emptied")
        self._call("finish", *names.keys_of(self._run, left.partitions))
        reached("forget.ended")

    def _call(self, operation: str, *args: Any) -> Any:
        with connect.mapping_errors(self._client):
            return call(self._client, "forget", operation, self._run, *args)
