"""What the machine knows of a run by itself: what was answered, and what was done to it. Pure."""

import copy
from collections.abc import Iterable

import msgspec

from common.ids import key_of

PROMPTS = 14
SAMPLES = 2


class Answer(msgspec.Struct, frozen=True):
    """What some process ended a (key, try) with; `row` is what must stand in the store."""

    outcome: str
    fingerprint: bytes
    row: bytes
    poison: bool = False


class Known(msgspec.Struct):
    """What Redis was told, and so goes back with it.

    Attributes:
        ended: (key, try) -> outcome of what Redis has taken.
        touched: Keys that RQ's tools have had in hand and that nothing has held since.
    """

    ended: dict[tuple[bytes, int], str] = {}
    touched: set[bytes] = set()

    def copy(self) -> "Known":
        return copy.deepcopy(self)


class RunModel:
    """One run.

    Attributes:
        answers: (key, try) -> all that was ever produced for it.
        poisoned: Keys of which an answer cannot be stored.
        cancelled: Somebody has asked for it.
        forgotten: Somebody has taken it out of Redis, and nobody has brought it back since.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.known = Known()
        self.answers: dict[tuple[bytes, int], list[Answer]] = {}
        self.poisoned: set[bytes] = set()
        self.cancelled = False
        self.keys = {
            key_of(run, b"%d" % number, sample): (number, sample)
            for number in range(PROMPTS)
            for sample in range(SAMPLES)
        }

    def note_answer(self, key: bytes, try_: int, answer: Answer) -> None:
        self.answers.setdefault((key, try_), []).append(answer)
        if answer.poison:
            self.poisoned.add(key)

    def note_taken(self, key: bytes, try_: int, outcome: str) -> None:
        """Redis has said that this one is the end of the try."""
        before = self.known.ended.get((key, try_))
        assert before is None, f"{self.name(key)} try {try_} ended twice: {before}, {outcome}"
        self.known.ended[key, try_] = outcome

    def touch(self, keys: Iterable[bytes]) -> None:
        self.known.touched.update(keys)

    def name(self, key: bytes) -> str:
        number, sample = self.keys[key]
        return f"{self.run}/{number}.{sample}"
