"""Keep what this process holds: slots every 5 s, leases every 10 s; end what others left behind.

A process past its own deadline, counted on its own monotonic clock from before the call that was
granted, opens nothing: by then another may hold its slots.
"""

import asyncio
import json
import logging
import os
import time
from functools import partial

from common.crashpoints import reached
from common.errors import BackendError, RedisUnusableError
from common.queue import SlotReply
from common.queue.jobs import Holder
from common.queue.records import Drained
from workers.engine.aborts import abort_all
from workers.engine.core import Core
from workers.engine.desk import Bell
from workers.engine.endings import Endings
from workers.engine.zombies import Zombies
from workers.lives import process_start
from workers.rids import possible_rids

log = logging.getLogger(__name__)

LOOK_S = 0.2
DRAIN_LOOK_S = 1.0
"""While its server is drained a process says so often what it still has open."""
TAKE_OVER_LOOK_S = 1.0
TAKE_OVER_ABORT_S = 3.0
"""With the look before it: what a predecessor left ends within 5 s, whatever the server does."""


class Keeper:
    """Slots, leases and reaping of one process.

    Attributes:
        slots: How many requests may be open now; 0 past the deadline, and at a drained server.
    """

    def __init__(self, core: Core, endings: Endings) -> None:
        self._core = core
        self._jobs = core.jobs
        self._holdings = core.holdings
        self._desk = core.beat
        self._watch = core.watch
        self._rids = core.rids
        self._timing = core.timing
        self._draining = core.draining
        self._bell = Bell()
        self._looked_s = float("-inf")
        self._endings = endings
        self._zombies = Zombies(core)
        self._granted = 0
        self._deadline_s = 0.0
        self._held_since_s = float("inf")
        # What the last line said of others that hold our slots, and when.
        self._said_others: set[str] = set()
        self._renewed_s = float("-inf")
        self._pid = os.getpid()
        self._started = process_start(self._pid)

    @property
    def slots(self) -> int:
        """How many requests this process may have open at this instant."""
        if self._draining.token or time.monotonic() >= self._deadline_s:
            return 0
        # A server that came back with a smaller cap must not wait for the next renewal.
        return min(self._granted, self._core.bound())

    def held_since(self, instant_s: float) -> bool:
        """Whether slots were held without a gap since an instant of the monotonic clock."""
        return self.slots > 0 and self._held_since_s <= instant_s

    async def keep_slots(self) -> None:
        """Take over from a dead process of this name, then take and renew slots for ever.

        Raises:
            BackendError: Another worker group drives this server.
        """
        await self._take_over()
        while True:
            try:
                wait_s = await self._renew_slots()
            except RedisUnusableError:
                wait_s = self._desk.wait_s()
            await self._bell.wait(wait_s)

    def look_now(self) -> None:
        """Ask for slots at once: they may not be what they were."""
        self._bell.ring()

    async def keep_leases(self) -> None:
        """Renew leases for ever, and say what is no longer ours."""
        while True:
            try:
                await self._renew_leases()
            except RedisUnusableError:
                await asyncio.sleep(self._desk.wait_s())
                continue
            await asyncio.sleep(self._timing.leases_every_s)

    async def reap(self) -> None:
        """End other processes' leases that have run out.

        The script refuses until our own renewals have held for a whole lease: after an outage of
        Redis every lease has run out, and whoever lives renews first.
        """
        while True:
            await asyncio.sleep(self._timing.reap_every_s)
            try:
                await self._reap("")
                await self._zombies.look()
            except RedisUnusableError:
                continue

    async def release(self) -> None:
        """Give up all slots."""
        self._granted = 0
        await self._desk.ask(lambda: self._take(0, ""))
        reached("slots.released")

    async def _take_over(self) -> None:
        """End what a dead process of this worker group left: its requests, leases and slots."""
        while True:
            try:
                holders = await self._desk.ask(self._jobs.holders)
                for epoch, holder in holders.items():
                    if holder.group == self._jobs.group and self._is_dead(holder):
                        await self._inherit(epoch, holder)
            except RedisUnusableError:
                await asyncio.sleep(self._desk.wait_s())
            else:
                return

    async def _renew_slots(self) -> float:
        """Take or renew slots; returns when to do so again."""
        if not self._watch.ready and not self._granted and not self._draining.token:
            await self._look_for_drain()
            return LOOK_S
        wanted = self._core.bound()
        # Redis may take note of fewer and its answer be lost: then the others are another's.
        self._granted = min(self._granted, wanted)
        before_s = time.monotonic()
        reply = await self._desk.ask(lambda: self._take(wanted, ""))
        if reply.what == "wait":
            if await self._watch.quiet():
                reply = await self._desk.ask(lambda: self._take(wanted, "", quiet=True))
            else:
                wait_s = reply.wait_ms / 1000
                log.info("Redis is new: waiting %.0f s for others to declare slots", wait_s)
                return min(wait_s + 0.1, self._timing.slots_every_s)
        while reply.what == "settle":
            dead = reply.other
            await self._abort(dead)
            reached("slots.aborted")
            before_s = time.monotonic()
            reply = await self._desk.ask(partial(self._take, wanted, dead))
        if reply.what == "refused":
            self._granted = 0
            raise BackendError(
                f"the server {self._jobs.server} is driven by worker group {reply.other}: stop "
                f"that one first, or give this one ({self._jobs.group}) its own server"
            )
        if reply.drain is not None:
            return self._drained(reply.slots, reply.drain, before_s)
        if reply.slots:
            reached("slots.taken")
        self._note_granted(reply.slots, before_s)
        await self._say_who_else(wanted)
        return self._timing.slots_every_s

    def _note_granted(self, slots: int, asked_s: float) -> None:
        changed = slots != self.slots
        if not self.slots:
            self._held_since_s = time.monotonic()
        self._granted = slots
        self._deadline_s = asked_s + self._timing.slots_trusted_s
        if self._draining.over():
            # Before anything is opened: its server may be another by now.
            self._watch.look_again()
        if changed:
            self._core.on_change()

    def _drained(self, kept: int, drain: Drained, asked_s: float) -> float:
        """Take note that nothing may be opened; returns when to say again what still is."""
        new = self._draining.hear(drain, asked_s)
        self._granted = kept
        self._deadline_s = asked_s + self._timing.slots_trusted_s
        if new:
            self._core.on_change()
        # Who drains the server waits for our word that we know.
        return 0.0 if new else min(DRAIN_LOOK_S, self._timing.slots_every_s)

    async def _look_for_drain(self) -> None:
        """See whether the server is away because it is drained, which is no reason for alarm."""
        asked_s = time.monotonic()
        if asked_s - self._looked_s < self._timing.slots_every_s:
            return
        self._looked_s = asked_s
        drain = await self._desk.ask(self._jobs.drained)
        if drain is not None:
            self._draining.hear(drain, asked_s)

    async def _say_who_else(self, wanted: int) -> None:
        """Say once that another process of this worker group has slots that we want."""
        if self._granted >= wanted:
            self._said_others.clear()
            return
        holders = await self._desk.ask(self._jobs.holders)
        others = {
            epoch: holder
            for epoch, holder in holders.items()
            if epoch != self._jobs.epoch and holder.slots
        }
        if not others.keys() - self._said_others:
            return
        self._said_others = set(others)
        log.warning(
            "worker group %s runs more than once: %s; the server %s gets at most %d requests from "
            "all together, so this process has %d and takes over what the others leave. Stop all "
            "but one, or give each its own --gpu and --server",
            self._jobs.group,
            ", ".join(_named(holder) for holder in others.values()),
            self._jobs.server,
            wanted,
            self._granted,
        )

    def _take(self, wanted: int, settled: str, *, quiet: bool = False) -> SlotReply:
        # Past its own deadline it holds nothing: another may have been given its slots.
        holds, open_requests = self.slots, self._holdings.in_slots
        if self._draining.token and time.monotonic() < self._deadline_s:
            holds = open_requests
        about: dict[str, object] = {"holds": holds} if holds else {}
        about |= {
            "host": self._core.options.host,
            "pid": self._pid,
            "started": self._started,
            "most": max(wanted, self._rids.most),
        }
        return self._jobs.take_slots(
            wanted,
            bound=max(wanted, 0),
            rid_prefix=self._rids.prefix,
            about=about,
            settled=settled,
            quiet=quiet,
            heard=self._draining.token,
            open_requests=open_requests,
            ttl_ms=self._timing.slot_ttl_ms,
        )

    async def _renew_leases(self) -> None:
        self._endings.lose_strangers()
        held = self._holdings.leased()
        self._holdings.claimed.clear()
        lease_ms = self._timing.lease_ms
        # Also with nothing held: the right to reap hangs on it.
        words = await self._desk.ask(lambda: self._jobs.renew(held, lease_ms=lease_ms))
        if held:
            reached("lease.renewed")
        for key, word in zip(held, words, strict=True):
            if word in {"gone", "stolen"} and key not in self._holdings.claimed:
                self._endings.lose(key)

    async def _reap(self, dead_epoch: str) -> None:
        back, parked, convicted = await self._desk.ask(
            lambda: self._jobs.reap(
                dead_epoch=dead_epoch, lease_ms=self._timing.lease_ms, steady=not dead_epoch
            )
        )
        if back or parked or convicted:
            reached("reap.ended")
        if back or parked:
            log.warning("took back %d jobs of a process that is gone, parked %d", back, parked)
        for claim in convicted:
            self._endings.convict(claim)

    async def _inherit(self, epoch: str, holder: Holder) -> None:
        log.warning("process %s of this worker group is gone: ending what it left", epoch)
        await self._abort(epoch, holder)
        reached("takeover.aborted")
        await self._reap(epoch)
        reached("takeover.reaped")
        await self._desk.ask(lambda: self._take(0, epoch))
        reached("takeover.settled")

    async def _abort(self, epoch: str, holder: Holder | None = None) -> None:
        """Abort whatever a process that is gone may have left open at the server."""
        if await self._watch.quiet(TAKE_OVER_LOOK_S):
            return
        if holder is None:
            holder = (await self._desk.ask(self._jobs.holders)).get(epoch)
        if holder is not None:
            most = int(json.loads(holder.about).get("most", holder.slots))
            rids = possible_rids(holder.rid_prefix, most)
            await abort_all(self._core.client, rids, limit_s=TAKE_OVER_ABORT_S)
            self._zombies.note(holder.rid_prefix, most)

    def _is_dead(self, holder: Holder) -> bool:
        about = json.loads(holder.about)
        if about.get("host") != self._core.options.host:
            return False
        # Another process may have its pid by now, in a restarted container this very one.
        return process_start(int(about["pid"])) != str(about["started"])


def _named(holder: Holder) -> str:
    about = json.loads(holder.about)
    return f"pid {about.get('pid')} on {about.get('host')} has {holder.slots} slots"
