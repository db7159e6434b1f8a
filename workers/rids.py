"""Give request ids from a small, known set, so that another process can abort them one by one.

Pure. SGLang aborts only ids that it knows: the front end (0.5.23,
`TokenizerManager.abort_request`) drops an abort by prefix before the scheduler, which would match
it, ever sees it. Whoever takes over from a dead process must therefore be able to name every id
that may be open. An id is the process's epoch, the number of a slot and a digit that changes with
each request, so that the next request of a slot does not meet the one before it: `{epoch}-{slot, 5
digits}-{0..3}`. The width is fixed, because versions that do match prefixes would else abort
`…-10` with `…-1`.
"""

import heapq
from collections.abc import Iterator

GENERATIONS = 4


class Rids:
    """The request ids of one process, and which of its slots are taken.

    Attributes:
        prefix: What all of them begin with.
        most: How many slots were ever taken at once: no id has a higher slot number.
    """

    def __init__(self, epoch: str) -> None:
        self.prefix = f"{epoch}-"
        self.most = 0
        self._free: list[int] = []
        self._generation: list[int] = []

    def take_slot(self) -> int:
        """Take the lowest free slot number."""
        if self._free:
            return heapq.heappop(self._free)
        self.most += 1
        self._generation.append(0)
        return self.most - 1

    def free_slot(self, slot: int) -> None:
        """Give a slot number back."""
        heapq.heappush(self._free, slot)

    def next(self, slot: int) -> str:
        """Give the id of the slot's next request."""
        generation = self._generation[slot]
        self._generation[slot] = (generation + 1) % GENERATIONS
        return _rid(self.prefix, slot, generation)


def possible_rids(prefix: str, most: int) -> Iterator[str]:
    """List every id that a process may have open, by its prefix and how many slots it ever had."""
    for slot in range(most):
        for generation in range(GENERATIONS):
            yield _rid(prefix, slot, generation)


def _rid(prefix: str, slot: int, generation: int) -> str:
    return f"{prefix}{slot:05d}-{generation}"
