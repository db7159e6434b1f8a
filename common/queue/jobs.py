"""The worker side of the queue: claim, finish, renew, give back, charge, reap, slots.

One `Jobs` belongs to one process, which its epoch names. Every call is one script, atomic in
Redis, and safe to repeat when its answer was lost.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import msgspec

from common import connect, names
from common.leases import LEASES
from common.models import Claim, KeptTurns, Result
from common.quality import FLAGS
from common.queue.drains import look
from common.queue.records import ClaimReply, Drained, SlotReply
from common.queue.scripts import call
from common.streams import LETTERS

if TYPE_CHECKING:
    import redis

LEASE_MS = 60_000
"""How long a job may be silent before it goes back; renewed at least every 15 s."""

SLOT_TTL_MS = LEASES.slots_ms
"""How long a process keeps its slots without renewing them; renewed every 5 s."""

MOST_LOST = 5
"""Lost leases after which a job is tried alone."""

REAP_LIMIT = 1_000

_DIED_ALONE, _TURNS = 10, 11
"""Where a claim says how often a server died with it alone, and its finished turns, if at all."""


class Holder(msgspec.Struct, frozen=True):
    """A process that holds slots; `about` is JSON of what it said: host, pid, start time.

    `drain` is the token of the drain that it has heard of.
    """

    slots: int
    deadline_ms: float
    rid_prefix: str
    group: str
    about: str
    drain: str = ""


class Jobs:
    """The jobs that one process holds of any run, and its slots at one server.

    Args:
        client: From `common.connect`.
        epoch: Names this process and no other: lower-case letters, digits and dashes.
        group: Id of the worker group, for example `gpu0@host`.
        server: Canonical URL of its SGLang server.
    """

    def __init__(
        self, client: "redis.Redis", *, epoch: str, group: str, server: str, where: str = ""
    ) -> None:
        self._client = client
        # A silent repetition of these would count its own first call as another's.
        self._once = connect.without_retries(client)
        self._where = where or "the given address"
        self.epoch = epoch
        self.group = group
        self.server = server

    def claim(
        self,
        count: int,
        *,
        runs: Sequence[str] = (),
        stream_mark_bytes: int,
        worker_name: str = "",
        alone: bool = False,
        lease_ms: int = LEASE_MS,
    ) -> ClaimReply:
        """Lease up to `count` jobs, by priority of their runs, then age.

        Args:
            count: At least 1.
            runs: Serve only these runs; empty serves all.
            stream_mark_bytes: No claims while the result streams hold more.
            worker_name: RQ's name of this worker, for its tools.
            alone: This process holds nothing: it may get suspects of server deaths to try.
            lease_ms: How long they are leased.
        """
        reply = self._call(
            "claim",
            count,
            self.epoch,
            self.server,
            lease_ms,
            stream_mark_bytes,
            worker_name,
            "alone" if alone else "",
            *runs,
        )
        claims = [read_claim(item) for item in reply[1:]]
        trial = int(reply[1][9]) if claims else 0
        return ClaimReply(
            why=reply[0].decode(), claims=claims, suspects=trial > 0, alone=trial == 1
        )

    def finish(self, results: Sequence[Result]) -> list[str]:
        """End prompts; the first finisher of a (key, try) wins, whoever holds the lease.

        Returns:
            One word a result: ok, duplicate, repeated, changed, unknown, untaught or forgotten;
            after unknown and untaught the caller keeps the result and claims nothing.

        Raises:
            RedisFullError: Nothing was written; keep the results and call again.
            RedisUnusableError: Perhaps all was written and the answer lost: call again with
                results that say `repeat`.
        """
        args: list[Any] = []
        for result in results:
            args += [
                result.run,
                result.uid,
                result.key,
                result.fingerprint,
                result.try_,
                LETTERS[result.outcome],
                result.row,
                result.input_tokens,
                result.output_tokens,
                "".join(FLAGS.get(flag, "") for flag in result.flags),
                "1" if result.repeat else "",
                result.reason,
            ]
        return _words(self._call("finish", self.epoch, *args, client=self._once))

    def keep_turns(self, kept: Sequence[KeptTurns]) -> list[str]:
        """Keep the finished turns of prompts that go on; safe to repeat.

        Returns:
            One word each: ok or repeated; other (another process's turns are kept), stolen,
            changed, gone or forgotten: the caller's work on the prompt is of no use any more; or
            unknown, untaught, removed: not kept, ask again later.

        Raises:
            RedisFullError, RedisUnusableError: Call again with these or with longer ones.
        """
        args: list[Any] = []
        for each in kept:
            args += [each.run, each.uid, each.key, each.fingerprint, each.try_, each.turns]
        return _words(self._call("turn", self.epoch, *args))

    def renew(self, held: Sequence[tuple[str, bytes]], *, lease_ms: int = LEASE_MS) -> list[str]:
        """Renew leases; `held` is (run, key) pairs.

        Returns:
            One word a pair: ok, retaken, stolen, gone (ended or cancelled: stop) or unknown.
        """
        flat = [part for pair in held for part in pair]
        return _words(self._call("renew", self.epoch, lease_ms, *flat))

    def give_back(self, held: Sequence[tuple[str, bytes]], *, died: bool = False) -> list[str]:
        """Put jobs back at the front of their queues.

        Args:
            held: (run, key) pairs.
            died: The server died with them: counted, and a job of two deaths is parked. Not
                counted while the server is drained.

        Returns:
            One word a pair: queued, parked, not_held, or removed: RQ's tools cancelled the job or
            took its body away meanwhile.
        """
        if not held:
            return []
        flat = [part for pair in held for part in pair]
        return _words(
            self._call("give_back", self.epoch, self.server, "death" if died else "", *flat)
        )

    def charge(self, run: str, key: bytes, reason: str, *, before: int | None = None) -> int:
        """Charge an attempt to a job that is still held.

        Args:
            run: Of which run.
            key: Whose, 16 bytes.
            reason: One word.
            before: Attempts that the caller knows of; with it the call may be repeated.

        Returns:
            The attempts in this try; 0 when another process holds the job now.
        """
        known = "" if before is None else before
        client = self._once if before is None else self._client
        return int(self._call("charge", self.epoch, run, key, reason, known, client=client))

    def reap(
        self, *, dead_epoch: str = "", lease_ms: int = LEASE_MS, steady: bool = False
    ) -> tuple[int, int, list[Claim]]:
        """End leases that have run out, or all of a process that is known to be dead.

        Args:
            dead_epoch: That process; empty: whatever has run out.
            lease_ms: Of what is handed over.
            steady: Do it only when this process's own renewals have come without a gap for one
                lease: after an outage of Redis every lease has run out, and those who live renew
                first.

        Returns:
            How many jobs went back, how many were parked, and those that were lost again while
            they were tried alone: leased to this process, which ends them as `poison_worker`.
        """
        word = "steady" if steady else ""
        reply = self._call("reap", dead_epoch, REAP_LIMIT, MOST_LOST, self.epoch, lease_ms, word)
        return int(reply[0]), int(reply[1]), [read_claim(item) for item in reply[2:]]

    def take_slots(
        self,
        wanted: int,
        *,
        bound: int,
        rid_prefix: str,
        about: dict[str, Any],
        settled: str = "",
        quiet: bool = False,
        heard: str = "",
        open_requests: int = 0,
        ttl_ms: int = SLOT_TTL_MS,
    ) -> SlotReply:
        """Take or renew this process's slots of its server; 0 gives them up.

        Args:
            wanted: Requests that this process wants to hold open at most.
            bound: The most that all processes together may hold open at this server.
            rid_prefix: What the ids of its requests begin with.
            about: Host, pid and start time; first of all `holds`, the slots that this process
                holds by its own clock: what it declares to a Redis that has forgotten it.
            settled: Epoch of an expired holder whose requests the caller has aborted.
            quiet: The server itself says that nothing is open there.
            heard: Token of the drain that this process has heard of: it opens nothing.
            open_requests: What it has open at the server: those keep their slots through a drain.
            ttl_ms: How long they are held without renewing.
        """
        reply = self._call(
            "slots",
            self.server,
            self.epoch,
            wanted,
            bound,
            ttl_ms,
            self.group,
            rid_prefix,
            msgspec.json.encode(about),
            settled,
            "1" if quiet else "",
            heard,
            open_requests,
        )
        what = reply[0].decode()
        if what == "granted":
            return SlotReply(what=what, slots=int(reply[1]))
        if what == "wait":
            return SlotReply(what=what, wait_ms=int(reply[1]))
        if what == "drained":
            return SlotReply(what=what, slots=int(reply[1]), drain=_drained(reply[2:]))
        prefix = reply[2].decode() if what == "settle" else ""
        return SlotReply(what=what, other=reply[1].decode(), rid_prefix=prefix)

    def holders(self) -> dict[str, "Holder"]:
        """Read who holds slots of this server: epoch -> what it said of itself."""
        with self._errors():
            raw = cast("dict[bytes, bytes]", self._client.hgetall(names.slots(self.server)))
        return {
            epoch.decode(): msgspec.json.decode(value, type=Holder)
            for epoch, value in raw.items()
            if value.startswith(b"{")
        }

    def drained(self) -> Drained | None:
        """Read whether this server is drained, without asking for slots."""
        with self._errors():
            return look(self._client, self.server)

    def _call(self, name: str, *args: Any, client: "redis.Redis | None" = None) -> Any:
        with self._errors():
            return call(client or self._client, name, *args)

    def _errors(self) -> AbstractContextManager[None]:
        return connect.mapping_errors(self._client, self._where)


def read_claim(item: Sequence[Any]) -> Claim:
    """Read one job as the scripts hand it out."""
    return Claim(
        run=item[0].decode(),
        uid=item[1].decode(),
        key=item[2],
        fingerprint=item[3],
        try_=int(item[4]),
        attempts=int(item[5]),
        deaths=int(item[6]),
        lost=int(item[7]),
        prompt=item[8],
        died_alone=int(item[_DIED_ALONE]) if len(item) > _DIED_ALONE else 0,
        # Only where there are any.
        turns=item[_TURNS] if len(item) > _TURNS else b"",
    )


def _drained(reply: Sequence[Any]) -> Drained:
    return Drained(
        token=reply[0].decode(),
        left_ms=int(reply[1]),
        owner=reply[2].decode(errors="replace"),
        reason=reply[3].decode(errors="replace"),
    )


def _words(reply: Any) -> list[str]:
    return [word.decode() for word in cast("list[bytes]", reply)]
