"""What happens when, from the seed alone: the same seed gives the same steps, for ever."""

import random
from collections.abc import Iterator
from typing import Literal

import msgspec

Kind = Literal["producer", "group", "server", "sink", "redis"]
How = Literal["kill", "term", "freeze", "cut", "lose", "slow", "store"]

KINDS: tuple[Kind, ...] = ("producer", "group", "server", "sink", "redis")
_WEIGHTS = (24, 26, 20, 22, 8)
_HOWS: tuple[How, ...] = ("kill", "term", "freeze", "cut", "lose", "slow", "store")
_HOW_WEIGHTS = (80, 4, 5, 2, 4, 2, 3)

SHARE_ARMED = 0.5
SHARE_LONG = 0.15
STORE_FAULTS = (
    "SLOW_DOWN",
    "INTERNAL_ERROR",
    "RESET_BEFORE",
    "RESET_MID",
    "RESET_AFTER",
    "HALF_REPLY",
    "ACCESS_DENIED",
)


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is done to one process or connection.

    Attributes:
        how: What. `cut` breaks all connections to Redis, `lose` swallows some of its answers,
            `slow` delays them, `store` has S3 refuse or lose some PUTs; these four are done to no
            process.
        kind, which: To whom; `which` in [0, 1) picks one of the kind.
        after_s: Wait so long, once it holds work.
        length_s: How long it stays dead, frozen or slow.
        long: Freeze it for longer than its lease lasts.
        arm: In [0, 1), picks the crash point that the next process in its place dies at; None: it
            is not armed.
        nth: Of how many passings, or how many answers or PUTs.
        fault: Of STORE_FAULTS.
    """

    how: How
    kind: Kind
    which: float
    after_s: float
    length_s: float
    long: bool
    arm: float | None
    nth: int
    fault: str


class Step(msgspec.Struct, frozen=True):
    """Actions that are done together, `gap_s` after those before them."""

    gap_s: float
    actions: tuple[Action, ...]


def steps(seed: int, *, pace: float = 1.0, kills_only: bool = False) -> Iterator[Step]:
    """Give the endless schedule of a seed.

    Args:
        seed: Any number.
        pace: Mean steps a second.
        kills_only: Nothing but SIGKILLs, the kinds in turn, none armed and one a step: where few
            must do.
    """
    dice = random.Random(seed)
    turn = 0
    while True:
        gap_s = min(dice.expovariate(pace), 4.0 / pace)
        together = dice.choices((1, 2, 3, 5), (60, 22, 12, 6))[0]
        actions = [_action(dice) for _ in range(together)]
        if kills_only:
            one = msgspec.structs.replace(actions[0], how="kill", arm=None)
            actions = [msgspec.structs.replace(one, kind=KINDS[turn % len(KINDS)])]
            turn += 1
        yield Step(gap_s, tuple(actions))


def _action(dice: random.Random) -> Action:
    # Every number is drawn whether it is needed or not, so that no kind shifts those behind it.
    how = dice.choices(_HOWS, _HOW_WEIGHTS)[0]
    kind = dice.choices(KINDS, _WEIGHTS)[0]
    arm, share = dice.random(), dice.random()
    return Action(
        how=how,
        kind=kind,
        which=dice.random(),
        after_s=dice.expovariate(1 / 0.02),
        length_s=dice.choice((0.0, 0.0, 0.05, 0.3, 1.0, 2.5)),
        long=dice.random() < SHARE_LONG,
        arm=arm if share < SHARE_ARMED else None,
        nth=dice.choice((1, 1, 1, 1, 2, 3, 7)),
        fault=dice.choice(STORE_FAULTS),
    )
