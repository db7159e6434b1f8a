"""Drain one server: while it stands nobody opens a request there, whichever process it is.

A drain is a record with a short life that its owner renews. An owner that dies takes it along
soon after, and the worker groups go on; a second owner is refused by the first one's name. Whoever
drains waits until every living process has said that it knows and has nothing open.

The token is random, and another one after each gap: what processes said of the drain before the
gap says nothing of what they have opened in it.
"""

import secrets
import time
from typing import TYPE_CHECKING, cast

import msgspec

from common import connect, names
from common.crashpoints import reached
from common.leases import LEASES
from common.queue.records import Drained
from common.queue.scripts import call

if TYPE_CHECKING:
    import redis

DRAIN_TTL_MS = LEASES.drain_ms
"""How long a drain stands whose owner is silent."""

TRUSTED_SHARE = 0.8
"""For how much of that an owner trusts its own clock that it stands."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """How far a drain has come.

    Attributes:
        open: Requests that living processes have open at the server.
        unheard: Processes that have not said yet that they know.
        unsure_ms: For how long processes that this Redis has forgotten may still be there.
        refused: Who drains the server instead, and why; empty where we do.
    """

    open: int = 0
    unheard: int = 0
    unsure_ms: int = 0
    refused: str = ""

    @property
    def empty(self) -> bool:
        """Whether nothing is open at the server and nobody will open anything."""
        return not (self.open or self.unheard or self.unsure_ms or self.refused)


class Drain:
    """One server's drain, in the hands of one owner.

    Args:
        client: From `common.connect`.
        server: Canonical URL of the server, as its worker group names it.
        owner, reason: Who wants it and why, for people.
        limit_s: How long what is open may last before it is aborted.
        ttl_ms, slots_ttl_ms: How long it stands without being renewed; how long slots do.
    """

    def __init__(
        self,
        client: "redis.Redis",
        server: str,
        *,
        owner: str,
        reason: str,
        limit_s: float,
        ttl_ms: int = DRAIN_TTL_MS,
        slots_ttl_ms: int = LEASES.slots_ms,
    ) -> None:
        self._client = client
        self.server = server
        self._owner = owner
        self._reason = reason
        self._limit_s = limit_s
        self._ttl_ms = ttl_ms
        self._slots_ttl_ms = slots_ttl_ms
        self._token = ""
        self._until_s = float("-inf")
        self._ends_s = float("inf")

    @property
    def stands(self) -> bool:
        """Whether it stands for certain, by this process's own clock."""
        return time.monotonic() < self._until_s

    @property
    def left_s(self) -> float:
        """How long until what is open is aborted."""
        return max(0.0, self._ends_s - time.monotonic())

    def hold(self, *, quiet: bool = False) -> Held:
        """Take or renew it, and say how far it has come; to be called well within its life.

        Args:
            quiet: The server itself says that nothing is open there.

        Raises:
            RedisUnusableError: Not renewed; it may stand all the same.
        """
        before_s = time.monotonic()
        known = bool(self._token)
        if not known:
            self._begin(before_s)
        reply = self._call("renew" if known else "take", quiet=quiet)
        if reply[0] == b"gone":
            self._token = secrets.token_hex(16)
            reply = self._call("take", quiet=quiet)
        if reply[0] == b"refused":
            # Ours has gone, if it ever stood: the next one is another.
            self._token = ""
            self._until_s = float("-inf")
            owner, reason = (text.decode(errors="replace") for text in reply[1:3])
            return Held(refused=f"{owner} ({reason})")
        self._until_s = before_s + self._ttl_ms / 1000 * TRUSTED_SHARE
        if not known:
            reached("drain.taken")
        return Held(open=int(reply[1]), unheard=int(reply[2]), unsure_ms=int(reply[3]))

    def lift(self) -> bool:
        """End it; False when it had gone already.

        Raises:
            RedisUnusableError: It ends by itself soon.
        """
        token, self._until_s = self._token, float("-inf")
        if not token:
            return False
        lifted = self._call("lift")[0] == b"lifted"
        self._token = ""
        reached("drain.lifted")
        return lifted

    def _begin(self, now_s: float) -> None:
        self._token = secrets.token_hex(16)
        if self._ends_s == float("inf"):
            self._ends_s = now_s + self._limit_s

    def _call(self, what: str, *, quiet: bool = False) -> list[bytes]:
        with connect.mapping_errors(self._client):
            return cast(
                "list[bytes]",
                call(
                    self._client,
                    "drain",
                    self.server,
                    what,
                    self._token,
                    self._owner,
                    self._reason,
                    round(self.left_s * 1000),
                    self._ttl_ms,
                    self._slots_ttl_ms,
                    "1" if quiet else "",
                ),
            )


def look(client: "redis.Redis", server: str) -> Drained | None:
    """Read which drain stands at a server, None where none does; maps no errors."""
    with client.pipeline(transaction=False) as pipe:
        pipe.get(names.drain(server))
        pipe.time()
        value, (seconds, micros) = pipe.execute()
    if value is None:
        return None
    told = msgspec.json.decode(value, type=_Record)
    return Drained(
        token=told.token,
        left_ms=round(told.deadline_ms - seconds * 1000 - micros / 1000),
        owner=told.owner,
        reason=told.reason,
    )


class _Record(msgspec.Struct, frozen=True):
    token: str
    owner: str
    reason: str
    deadline_ms: float
