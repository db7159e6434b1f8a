"""Decide how fast to open requests and how many jobs to hold ready. Pure.

The clock is an argument. A cold server is filled slowly, because hundreds of prompts at once are
one long prefill during which it generates nothing. What is held ready is leased and kept from
other worker groups, so it is no more than a fraction of a second's use: a slow server with a full
hand would make the tail of the run.
"""

PREFETCH_S = 0.25
"""How long the held jobs should last: many times a claim's round trip."""

LEAST_PREFETCH = 1


class Ramp:
    """Let the number of open requests grow by at most `per_s` a second.

    Growth is limited, not opening: a request that takes the place of one that has ended is no load
    more than before. Else a server with short answers would never get beyond the ramp. What was
    not used for a while is no allowance any more: a server that stood idle is filled slowly again.
    """

    KEEP_S = 5.0
    """For how long a number of open requests, once reached, may be reached again at once."""

    def __init__(self, per_s: float, now_s: float) -> None:
        self._per_s = per_s
        self.restart(now_s)

    def restart(self, now_s: float) -> None:
        """The server is cold again."""
        self._allowed = 1.0
        self._at_s = self._window_s = now_s
        # The most that was asked for in this window and in the one before it.
        self._peak = self._peak_before = 0

    def wait_s(self, now_s: float, *, open_requests: int) -> float:
        """Say how long the next request must wait beside so many open ones; 0 means now."""
        wanted = open_requests + 1
        if now_s - self._window_s >= self.KEEP_S:
            recent = now_s - self._window_s < 2 * self.KEEP_S
            self._peak_before = self._peak if recent else 0
            self._peak, self._window_s = 0, now_s
        self._peak = max(self._peak, wanted)
        grown = self._allowed + (now_s - self._at_s) * self._per_s
        self._allowed = min(grown, max(self._peak, self._peak_before))
        self._at_s = now_s
        return max(0.0, (wanted - self._allowed) / self._per_s)


class Throughput:
    """Measure opened requests a second over about the last two seconds."""

    WINDOW_S = 2.0

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._count = 0
        self._per_s = 0.0

    def note(self, now_s: float) -> None:
        """Count one opened request."""
        self._count += 1
        self._roll(now_s)

    def per_s(self, now_s: float) -> float:
        """Give the rate of the last whole window."""
        self._roll(now_s)
        return self._per_s

    def _roll(self, now_s: float) -> None:
        passed_s = now_s - self._since_s
        if passed_s >= self.WINDOW_S:
            self._per_s = self._count / passed_s
            self._since_s, self._count = now_s, 0


def prefetch_target(*, slots: int, open_requests: int, per_s: float) -> int:
    """Say how many jobs to hold beyond the open ones.

    Args:
        slots: What this process may have open.
        open_requests: What it has open now.
        per_s: Requests opened a second, lately.
    """
    free = max(0, slots - open_requests)
    # While slots are free, what is claimed goes out at once (or as the ramp lets it).
    ready = max(LEAST_PREFETCH, round(per_s * PREFETCH_S))
    return min(slots, max(ready, min(free, 16)))
