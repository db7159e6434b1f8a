"""Carry a schedule out on a world: strike, start again, let go on."""

import time
from collections.abc import Callable, Iterator

import redis

from common.errors import HeadraceError
from common.queue import Runs
from tests.chaos.actors import Actor
from tests.chaos.hunting import Hunter
from tests.chaos.kit import RUN
from tests.chaos.schedule import Action, Step
from tests.chaos.toll import Toll
from tests.chaos.world import World
from tests.support import s3_proxy

TICK_S = 0.002
COUNT_EVERY_S = 0.25
NEARLY = 0.9
KILLED = -9
CANNOT_START = 4
"""Exit code of a process that found Redis or the store unusable."""

START_AGAIN_S = 0.3


class Player:
    """Plays one round's schedule.

    Attributes:
        toll: What it has cost.
        completed: How many prompts had ended at the last look.
        stood_still_s: The longest that this machine kept even us from looking.
    """

    def __init__(self, world: World, *, show: Callable[["Player"], None]) -> None:
        self.world = world
        self.toll = Toll()
        self.completed = 0
        self.stood_still_s = self._ticked_s = 0.0
        self._show = show
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._hunter = Hunter(world, self.toll, later=self._later)
        self._count_s = 0.0

    def play(self, schedule: Iterator[Step], *, until_s: float) -> None:
        """Go on until the kills are done, the prompts are nearly, or the time is over."""
        kit = self.world.kit
        for actor in [*self.world.groups, *self.world.sinks]:
            actor.start()
        for step in schedule:
            due_s = time.monotonic() + step.gap_s
            while time.monotonic() < due_s or (kit.calm and self._hunter.hunts):
                self.tick()
                if self._enough(until_s):
                    self._hunter.hunts.clear()
                    return
            for action in step.actions:
                self._begin(action)

    def _enough(self, until_s: float) -> bool:
        kit = self.world.kit
        if self.toll.total >= kit.kills or self.toll.wrong or time.monotonic() > until_s:
            return True
        # From here on too few hold work.
        return self.completed > kit.prompts * NEARLY

    def tick(self) -> None:
        """Do what is due."""
        now_s = time.monotonic()
        if self._ticked_s:
            self.stood_still_s = max(self.stood_still_s, now_s - self._ticked_s)
        self._ticked_s = now_s
        due = [timer for timer in self._timers if timer[0] <= now_s]
        self._timers = [timer for timer in self._timers if timer[0] > now_s]
        for _, call in due:
            call()
        for actor in self.world.actors:
            self._look_after(actor, now_s)
        self._count(now_s)
        self._hunter.go_on()
        self._show(self)
        time.sleep(TICK_S)

    def heal(self) -> None:
        """Let everything live and work from now on: nobody is killed, nothing fails."""
        self.world.redis.proxy.losing, self.world.redis.proxy.delay_s = 0, 0.0
        if self.world.s3 is not None:
            self.world.s3.plan = s3_proxy.never
        limit_s = time.monotonic() + self.world.kit.lease_s + 10
        while (self._timers or self._any_frozen()) and time.monotonic() < limit_s:
            self.tick()
        for actor in self.world.actors:
            if actor.process is not None and not actor.alive:
                self._note_end(actor)
            if actor.process is not None and actor.armed and actor.kind != "producer":
                self._disarm(actor)
            if actor.process is None and actor.kind != "producer":
                actor.start()

    def _any_frozen(self) -> bool:
        return any(actor.frozen_until_s for actor in self.world.actors)

    def _disarm(self, actor: Actor) -> None:
        """Put a process in its place that will not die: its point may still come."""
        actor.freeze()
        self.toll.note_risk(actor, self._hunter.held(actor), "killed")
        actor.kill()
        actor.process = None

    # --- the schedule -----------------------------------------------------------------------

    def _begin(self, action: Action) -> None:
        if action.how in {"kill", "term", "freeze"}:
            hunt = self._hunter.begin(action)
            if hunt is not None and isinstance(hunt.victim, Actor):
                victim = hunt.victim
                if victim.kind == "producer" and victim.process is None:
                    arm = action.arm if action.how == "kill" else None
                    self.world.producing.begin(victim, arm=arm, nth=action.nth)
            return
        self.toll.others[action.how if action.how != "store" else f"store {action.fault}"] += 1
        self._trouble(action)

    def _trouble(self, action: Action) -> None:
        """Have connections fail, or the store."""
        proxy, s3 = self.world.redis.proxy, self.world.s3
        if action.how == "cut":
            proxy.cut()
        elif action.how == "lose":
            proxy.losing += action.nth
        elif action.how == "slow":
            proxy.delay_s = 0.02 + action.which / 10
            self._later(max(action.length_s, 0.5), self._quick)
        elif s3 is not None:
            fault = getattr(s3_proxy, action.fault)
            s3.plan = s3_proxy.in_turn([None, *[fault] * action.nth])

    def _quick(self) -> None:
        self.world.redis.proxy.delay_s = 0.0

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._timers.append((time.monotonic() + delay_s, call))

    # --- what is there ----------------------------------------------------------------------

    def _count(self, now_s: float) -> None:
        """See now and then how far the run is, and let more files in."""
        if now_s < self._count_s or not self.world.redis.up:
            return
        self._count_s = now_s + COUNT_EVERY_S
        try:
            counts = Runs(self.world.redis.client).counts(RUN)
        except (HeadraceError, redis.RedisError):
            return  # not made yet, or just restarted
        parts = (
            counts.completed,
            counts.failed,
            counts.cancelled,
            counts.in_flight,
            counts.queued,
        )
        if min(parts) < 0 or sum(parts) != counts.total:
            self.toll.wrong.append(f"the counts do not add up: {counts}")
        self.completed = counts.completed + counts.failed
        per_file = self.world.kit.prompts // self.world.kit.files
        self.world.producing.allowed = self.completed // per_file + 3

    def _look_after(self, actor: Actor, now_s: float) -> None:
        """Wake who has been frozen long enough, note who has died, start who is missing."""
        if actor.frozen_until_s and now_s >= actor.frozen_until_s:
            actor.thaw()
        if actor.process is not None:
            if not actor.alive:
                self._note_end(actor)
        elif actor.kind == "producer":
            hunted = any(hunt.victim is actor for hunt in self._hunter.hunts)
            if self.world.producing.wanted or hunted:
                self.world.producing.begin(actor)
        elif not actor.waits and now_s >= actor.due_s:
            actor.start()

    def _note_end(self, actor: Actor) -> None:
        """A process has ended, not by our hand: at its crash point, as it was told, or oddly."""
        code, armed = actor.exit_code, actor.armed.partition(":")[0]
        if armed and code == KILLED:
            if actor.kind == "group" and not self.world.redis.up:
                return  # what it held can be read when Redis is back
            self.toll.note_death(actor, self._hunter.held(actor), "armed", armed)
            self._hunter.leave(actor)
        elif code != CANNOT_START and not actor.leaving and (code or actor.kind != "producer"):
            self.toll.wrong.append(f"{actor.name} ended with {code}: {actor.said()}")
        if actor.kind == "producer":
            self.world.producing.note_end(actor, done=code == 0)
        actor.process = None
        actor.due_s = time.monotonic() + (START_AGAIN_S if code == CANNOT_START else 0.0)
