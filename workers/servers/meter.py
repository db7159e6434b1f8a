"""Make rates and shares of a server's readings, one after the other. Pure."""

from collections import deque

from workers.readings.loads import ServerLoad

STALE_S = 30.0
"""A figure that nothing has brought up to date for so long is none."""

SHARES_S = 300.0
"""Over how long shares and retractions are counted."""

MOST_READINGS = 512


class Meter:
    """What passed at a server between its readings.

    Args:
        window_s: Over how long rates are: a few readings, since servers bring their counters up
            to date in steps of their own.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._readings: deque[tuple[float, ServerLoad]] = deque(maxlen=MOST_READINGS)
        # Since when not one of the figures has changed.
        self._same_since_s = float("-inf")

    def note(self, load: ServerLoad, at_s: float) -> None:
        """Take a reading in; one of a server that counts from the beginning again forgets all."""
        # The last one: an earlier one may be of when the server had only just begun.
        alike = (
            each for _, each in reversed(self._readings) if each.counted_by == load.counted_by
        )
        before = next(alike, None)
        if before is not None and load.went_back(before):
            self._readings.clear()
        if not self._readings or load != self._readings[-1][1]:
            self._same_since_s = at_s
        self._readings.append((at_s, load))
        while self._readings[0][0] < at_s - SHARES_S:
            self._readings.popleft()

    @property
    def gen_tokens_per_s(self) -> float | None:
        """Generated tokens a second: of the counter where there is one, else by its own word."""
        if not self._readings:
            return None
        at_s, load = self._readings[-1]
        if load.counted_by == "log":
            return load.gen_throughput  # a mean over lines that are not stale
        if load.gen_tokens_total is not None:
            rate = self._rate("gen_tokens_total")
            if rate is not None:
                return rate
        if load.running == 0:
            return 0.0  # its own word is of when something ran last
        return load.gen_throughput if at_s - self._same_since_s < STALE_S else None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Tokens of prompts computed a second."""
        return self._rate("prompt_tokens_total")

    @property
    def cached_share(self) -> float | None:
        """Share of the tokens of prompts that were found in the cache; None without prompts."""
        cached = self._passed("cached_tokens_total", SHARES_S)
        computed = self._passed("prompt_tokens_total", SHARES_S)
        if cached is None or computed is None or not cached[0] + computed[0]:
            return None
        return cached[0] / (cached[0] + computed[0])

    @property
    def retracted(self) -> int | None:
        """Requests that were set back in the last minutes (`SHARES_S`)."""
        passed = self._passed("retracted_total", SHARES_S)
        return int(passed[0]) if passed else None

    def _rate(self, figure: str) -> float | None:
        passed = self._passed(figure, self._window_s)
        return passed[0] / passed[1] if passed and passed[1] > 0 else None

    def _passed(self, figure: str, window_s: float) -> tuple[float, float] | None:
        """Say by how much a counter has grown, and in how many seconds."""
        if len(self._readings) < 2:  # noqa: PLR2004 - from one to another
            return None
        at_s, load = self._readings[-1]
        # One reading before the window's begin too: with slow readings there is no other in it.
        before = self._since(load, min(at_s - window_s, self._readings[-2][0]))
        now = getattr(load, figure)
        if before is None or now is None or before[0] >= at_s:
            return None
        then = getattr(before[1], figure)
        # A page has no line for what has not happened yet.
        return max(0.0, now - (then or 0)), at_s - before[0]

    def _since(self, load: ServerLoad, since_s: float) -> tuple[float, ServerLoad] | None:
        """Find the first reading from then on whose counters are the same ones."""
        return next(
            (
                (at_s, each)
                for at_s, each in self._readings
                if at_s >= since_s and each.counted_by == load.counted_by
            ),
            None,
        )
