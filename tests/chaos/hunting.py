"""Kill, stop or freeze processes, each at a moment at which it holds work.

A victim is first seen to be at work, then stopped, looked at once more, and only then killed: what
it holds cannot change under the eyes of whoever counts it.
"""

import signal
import time
from collections.abc import Callable

import msgspec
import redis

from common import connect, names
from tests.chaos.actors import (
    NOTHING,
    Actor,
    Held,
    held_by_group,
    held_by_producer,
    held_by_sink,
    wait_stopped,
)
from tests.chaos.kit import RUN, SINK_LEASE_S
from tests.chaos.schedule import Action
from tests.chaos.toll import Risk, Toll
from tests.chaos.world import Server, World

LOOK_AGAIN_S = 0.03
AFTER = {"producer": 0.3, "group": 1.0, "server": 1.0, "sink": 0.0, "redis": 1.0}
"""How much of an action's `after_s` a kind is given: a batch or a call may be over by then."""

PATIENCE = {"producer": 4.0, "group": 2.0, "server": 1.0, "sink": 4.0, "redis": 1.0}
"""How long a kind is at its work as a rule, beside the others."""

SHARE_UNRECONCILED = 0.3
"""Redis is most often left to recover first, or nothing else would ever get on."""

ANSWERED_S = 1.0
"""An answer that was sent so short before a server's death may not have been read."""

FORGOT_S = 5.0
"""A result may wait so long for its finish while connections to Redis are cut."""

Victim = Actor | Server | None


class Hunt(msgspec.Struct):
    """A strike that waits until its victim, Redis where it is None, holds work."""

    action: Action
    victim: Victim
    deadline_s: float
    look_s: float = 0.0
    found: bool = False


class Hunter:
    """Strikes at the processes of a world.

    Args:
        world: Whose.
        toll: Takes the kills.
        later: Calls something after so many seconds.

    Attributes:
        hunts: Those that go on.
    """

    def __init__(
        self, world: World, toll: Toll, *, later: Callable[[float, Callable[[], None]], None]
    ) -> None:
        self._world = world
        self._toll = toll
        self._later = later
        self.hunts: list[Hunt] = []

    def begin(self, action: Action) -> Hunt | None:
        """Begin a hunt, unless its victim is hunted already."""
        victim = self._victim(action)
        if any(hunt.victim is victim for hunt in self.hunts):
            return None
        patience_s = self._world.kit.patience_s * PATIENCE[action.kind]
        hunt = Hunt(action, victim, time.monotonic() + patience_s)
        self.hunts.append(hunt)
        return hunt

    def leave(self, victim: Victim) -> None:
        """Give up the hunts for a victim that is dead."""
        self.hunts = [hunt for hunt in self.hunts if hunt.victim is not victim]

    def go_on(self) -> None:
        """Go on with each hunt."""
        for hunt in list(self.hunts):
            now_s = time.monotonic()
            if now_s > hunt.deadline_s:
                self.hunts.remove(hunt)
                self._toll.missed[hunt.action.kind] += 1
            elif now_s >= hunt.look_s:
                self._go_on(hunt)

    def held(self, victim: "Actor | Server") -> Held:
        """Say what a process holds that is stopped or dead."""
        if isinstance(victim, Server):
            digests = victim.log.at_risk(time.time() - ANSWERED_S)
            return Held(bool(victim.log.open), digests, point="serving")
        point = victim.point()
        if victim.kind == "sink":
            return held_by_sink(point)
        if not self._world.redis.up:
            return NOTHING
        try:
            if victim.kind == "producer":
                return held_by_producer(self._world.redis.client, victim.pid, point)
            return held_by_group(self._world.redis.client, victim.pid, point)
        except (redis.RedisError, OSError):
            return NOTHING

    def _victim(self, action: Action) -> Victim:
        world = self._world
        places: dict[str, list[Actor] | list[Server]] = {
            "group": world.groups,
            "sink": world.sinks,
            "server": world.servers,
            "producer": world.producing.actors,
        }
        found = places.get(action.kind)
        return found[int(action.which * len(found))] if found else None

    def _go_on(self, hunt: Hunt) -> None:
        victim, action = hunt.victim, hunt.action
        if victim is None:
            self._strike_redis(hunt)
            return
        if not victim.alive or (isinstance(victim, Actor) and victim.frozen_until_s):
            return
        if not hunt.found:
            # Seen in passing first: one that is stopped at each look gets on slowly.
            brief = isinstance(victim, Actor) and victim.kind in {"sink", "producer"}
            if brief and not self.held(victim).work:
                return
            hunt.found = True
            after_s = action.after_s * AFTER[action.kind]
            if after_s > 0:
                hunt.look_s = time.monotonic() + after_s
                return
        if isinstance(victim, Server):
            self._strike_server(hunt, victim)
        else:
            self._strike(hunt, victim)

    def _not_yet(self, hunt: Hunt) -> None:
        hunt.found = False
        hunt.look_s = time.monotonic() + LOOK_AGAIN_S

    # --- ours ---------------------------------------------------------------------------------

    def _strike(self, hunt: Hunt, victim: Actor) -> None:
        """Stop the victim, look, and do to it what is to be done if it holds work."""
        action = hunt.action
        if victim.armed and victim.kind == "producer":
            return  # it dies by itself, or comes to its end
        victim.freeze()
        held = self.held(victim)
        if not held.work:
            victim.thaw()
            self._not_yet(hunt)
            return
        self.hunts.remove(hunt)
        if action.how == "kill":
            victim.kill()
            self._toll.note_death(victim, held, "random", held.point)
            self._bury(victim, action)
        elif action.how == "term":
            self._toll.note_risk(victim, held, "told to end")
            self._toll.others[f"term {victim.kind}"] += 1
            victim.tell_to_end()
        else:
            self._freeze(victim, action, held)

    def _bury(self, victim: Actor, action: Action) -> None:
        victim.process = None
        if victim.kind == "producer":
            self._world.producing.note_end(victim, done=False)
            return
        victim.waits = True
        self._later(action.length_s, lambda: victim.start(arm=action.arm, nth=action.nth))

    def _freeze(self, victim: Actor, action: Action, held: Held) -> None:
        lease_s = SINK_LEASE_S if victim.kind == "sink" else self._world.kit.lease_s
        long = action.long and victim.kind != "producer"
        if long:
            self._toll.note_risk(victim, held, "frozen beyond its lease")
        length_s = lease_s + 2.5 if long else action.length_s
        victim.frozen_until_s = time.monotonic() + length_s
        self._toll.others[f"freeze {victim.kind}{' beyond its lease' if long else ''}"] += 1

    # --- servers ------------------------------------------------------------------------------

    def _strike_server(self, hunt: Hunt, server: Server) -> None:
        action, process = hunt.action, server.process.process
        if process is None:
            return
        process.send_signal(signal.SIGSTOP)
        wait_stopped(process.pid)
        held = self.held(server)
        if not held.work:
            process.send_signal(signal.SIGCONT)
            self._not_yet(hunt)
            return
        self.hunts.remove(hunt)
        if action.how == "freeze":
            self._toll.others["freeze server"] += 1
            self._later(action.length_s, lambda: process.send_signal(signal.SIGCONT))
            return
        if action.how == "term":
            self._toll.others["term server"] += 1
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)
            process.wait()
            # What began on the way to its end has died too.
            held = msgspec.structs.replace(held, jobs=held.jobs | self.held(server).jobs)
        else:
            server.process.kill()
            self._toll.kills["server", "random", held.point] += 1
        what = f"{server.name} {action.how}"
        self._toll.risks.append(Risk(what, digests=held.jobs, at=time.time()))
        self._later(action.length_s, server.start)

    # --- Redis --------------------------------------------------------------------------------

    def _strike_redis(self, hunt: Hunt) -> None:
        side, action = self._world.redis, hunt.action
        if not side.up:
            return
        point = self._redis_at_work()
        if not point or ("reconciled" in point and action.which > SHARE_UNRECONCILED):
            self._not_yet(hunt)
            return
        self.hunts.remove(hunt)
        if action.how == "freeze":
            self._toll.others["freeze redis"] += 1
            side.freeze()
            self._later(action.length_s, side.thaw)
            return
        if action.how == "term":
            self._toll.others["term redis"] += 1
            side.end()
        else:
            side.kill()
            self._toll.kills["redis", "random", point] += 1
        self._later(action.length_s, self._redis_back)

    def _redis_at_work(self) -> str:
        """Say what Redis is in the midst of; empty when it holds no work."""
        try:
            run_id = connect.server_run_id(self._world.redis.client)
            with self._world.redis.client.pipeline(transaction=False) as pipe:
                pipe.zcard(names.leases(RUN))
                pipe.hget(names.run(RUN), "reconciled")
                for partition in range(self._world.kit.partitions):
                    pipe.hget(names.sink(RUN, partition), "intent")
                leased, reconciled, *intents = pipe.execute()
        except (redis.RedisError, OSError):
            return ""
        if not leased:
            return ""
        if reconciled != run_id.encode():
            return "leases, being reconciled"
        return "leases, a batch begun" if any(intents) else "leases"

    def _redis_back(self) -> None:
        side = self._world.redis
        loss = side.back()
        if loss.since is None:
            return
        since = loss.since - FORGOT_S
        logs = [server.log.at_risk(since) for server in self._world.servers]
        at_risk = frozenset[str]().union(*logs)
        self._toll.risks.append(Risk("redis forgot", digests=at_risk, at=loss.since))
