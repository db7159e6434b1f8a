"""What a round has cost so far: kills, what each put at risk, what must not be and was."""

import time
from collections import Counter

import msgspec

from tests.chaos.actors import Actor, Held


class Risk(msgspec.Struct, frozen=True):
    """What one death put at risk of being redone.

    Attributes:
        what: Who died, and how.
        jobs: Keys (hex) of prompts.
        digests: Hashes of requests.
        at: Unix time.
    """

    what: str
    jobs: frozenset[str] = frozenset()
    digests: frozenset[str] = frozenset()
    at: float = 0.0


class Toll:
    """Taken by the hunter and the player of one round.

    Attributes:
        kills: By (kind, random or armed, point).
        missed: Kills whose victim held nothing in time, by kind.
        others: What else was done, by name.
        risks: What each death put at risk.
        deaths: Epoch of each worker group process that was killed -> Unix time.
        wrong: What must not happen and did.
    """

    def __init__(self) -> None:
        self.kills: Counter[tuple[str, str, str]] = Counter()
        self.missed: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        self.risks: list[Risk] = []
        self.deaths: dict[str, float] = {}
        self.wrong: list[str] = []

    @property
    def total(self) -> int:
        """How many were killed."""
        return sum(self.kills.values())

    def note_death(self, actor: Actor, held: Held, how: str, point: str) -> None:
        """Count a process that died with work in its hands."""
        self.kills[actor.kind, how, point or "before the first"] += 1
        self.note_risk(actor, held, "killed")

    def note_risk(self, actor: Actor, held: Held, what: str) -> None:
        """Take note of what may be done again, and when a dead one's requests became nobody's."""
        if actor.kind == "group":
            self.risks.append(Risk(f"{actor.name} {what}", jobs=held.jobs, at=time.time()))
        if held.epoch and what == "killed":
            self.deaths[held.epoch] = time.time()
