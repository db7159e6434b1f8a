"""Tell of a worker group's server what binds its concurrency, and what would give more.

What a request holds of the KV pool is measured while the server is full. The model's config.json
is read in a thread of its own: it may lie on a network's disk that does not answer, and a process
that is to stop waits for no thread of this kind.
"""

import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from workers.capacity.binding import measured_tokens
from workers.capacity.diagnosis import Diagnosis, diagnose
from workers.capacity.model_files import shape_at
from workers.capacity.strategies import Prompts
from workers.readings.facts import ServerFacts
from workers.readings.loads import ServerLoad

if TYPE_CHECKING:
    from workers.capacity.model_shape import ModelShape

READINGS = 120
"""Of a full server that are kept: some six minutes of them."""
SETTLED = 10
"""The largest counts, once so many later ones have not exceeded it: those of a ramp only grow."""


class Sizing:
    """What is known of one server's room."""

    def __init__(self) -> None:
        self._facts: ServerFacts | None = None
        self._shape: ModelShape | None = None  # set by a thread of ours, once
        self._load: ServerLoad | None = None
        self._tokens: deque[float] = deque(maxlen=READINGS)

    def diagnosis(self, facts: ServerFacts | None, load: ServerLoad | None) -> Diagnosis | None:
        """Say what binds; None while the server has not said what it is.

        Args:
            facts: What it says of its launch.
            load: What it last said of itself.
        """
        if facts is None:
            return None
        if facts != self._facts:
            self._facts, self._shape = facts, None
            self._tokens.clear()
            threading.Thread(target=self._read_shape, args=(facts,), daemon=True).start()
        if load is None:
            return diagnose(facts, shape=self._shape)
        if load.cap:
            # Of all ranks together; some versions tell it on that page alone.
            facts = msgspec.structs.replace(facts, cap=load.cap // facts.ranks)
        if load is not self._load:  # asked for more often than the server is
            self._load = load
            measured = measured_tokens(facts, load)
            if measured is not None:
                self._tokens.append(measured)
        prompts = Prompts(tokens=self._settled(), cached_share=_cached_share(load))
        return diagnose(facts, shape=self._shape, prompts=prompts)

    def _settled(self) -> float | None:
        largest = max(self._tokens, default=None)
        if largest is None:
            return None
        since = len(self._tokens) - 1 - self._tokens.index(largest)
        return largest if since >= SETTLED else None

    def _read_shape(self, facts: ServerFacts) -> None:
        with contextlib.suppress(OSError):
            shape = shape_at(
                facts.model_path, tp=facts.tp, ssm_dtype=facts.ssm_dtype, kv_dtype=facts.kv_dtype
            )
            if facts is self._facts:  # else a later one reads for what holds now
                self._shape = shape


def _cached_share(load: ServerLoad) -> float | None:
    cached, computed = load.cached_tokens_total, load.prompt_tokens_total
    if cached is None or computed is None or not cached + computed:
        return None
    return cached / (cached + computed)
