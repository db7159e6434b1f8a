"""The producers of a round: always at work on some file, whatever becomes of them.

Each `producer enqueue` adds one file to the run. When all files are in, those that come again add
nothing, and still open the run, compare and count. A call that was killed is made again.
"""

from collections.abc import Mapping
from pathlib import Path

from tests.chaos.actors import Actor
from tests.chaos.kit import RUN, Kit


class Producing:
    """The files, which are in, and who is at work on which.

    Attributes:
        actors: The producers.
        ended: How many calls came to their end.
        allowed: How many files may be in by now: not all at once, so that producers always work.
    """

    def __init__(
        self,
        kit: Kit,
        files: list[Path],
        *,
        output: str,
        endpoint: str | None,
        folder: Path,
        env: Mapping[str, str],
    ) -> None:
        self.files = files
        self._missing = list(range(len(files)))
        self._unsure: list[int] = []
        self._again = 0
        self.ended = 0
        self.allowed = 2
        where = ["--endpoint-url", endpoint] if endpoint else []
        self._flags = [
            "--run",
            RUN,
            "--output",
            output,
            *where,
            "--max-tokens",
            "64",
            "--partitions",
            str(kit.partitions),
            "--window",
            str(kit.window),
        ]
        self._work: dict[str, int] = {}
        self.actors = [self._actor(i, folder, env) for i in range(kit.producers)]

    @property
    def wanted(self) -> bool:
        """Whether there is a file that may be in and is not, and nobody at work on it."""
        return self._first_missing() is not None

    def _first_missing(self) -> int | None:
        taken = set(self._work.values())
        due = [*self._unsure, *(i for i in self._missing if i < self.allowed)]
        return next((number for number in due if number not in taken), None)

    def _next(self) -> int:
        """Choose what a producer that is free does next: what is missing, else anything again."""
        missing = self._first_missing()
        if missing is not None:
            return missing
        taken = set(self._work.values())
        self._again += 1
        free = [i for i in range(min(self.allowed, len(self.files))) if i not in taken]
        return free[self._again % len(free)]

    def begin(self, actor: Actor, *, arm: float | None = None, nth: int = 1) -> None:
        """Let a producer begin its next call."""
        self._work[actor.name] = self._next()
        actor.start(arm=arm, nth=nth)

    def note_end(self, actor: Actor, *, done: bool) -> None:
        """Take note that a call has ended: by itself and well, or not."""
        number = self._work.pop(actor.name, None)
        if number is None:
            return
        if done:
            self.finished(number)
        elif number not in self._unsure:
            self._unsure.append(number)

    def finished(self, number: int) -> None:
        """Take note that a call for this file came to its end."""
        self.ended += 1
        self._missing = [i for i in self._missing if i != number]
        self._unsure = [i for i in self._unsure if i != number]

    def left(self) -> list[int]:
        """List the files whose last call did not come to its end."""
        return sorted({*self._missing, *self._unsure, *self._work.values()})

    def command_of(self, number: int, *, last: bool = False) -> list[str]:
        """Give the enqueue of a file; the last one seals the run."""
        open_ = [] if last else ["--keep-open"]
        return ["producer", "enqueue", str(self.files[number]), *self._flags, *open_]

    def _actor(self, index: int, folder: Path, env: Mapping[str, str]) -> Actor:
        name = f"producer{index}"
        return Actor(
            "producer",
            index,
            command=lambda: self.command_of(self._work[name]),
            folder=folder,
            env=env,
        )
