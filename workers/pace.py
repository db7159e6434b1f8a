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
    """Let the number of open requests grow by at most `per_s` a second, from when a server is cold.

    Growth is limited, not opening: a request that takes the place of one that has ended is no load
    more than before. Else a server with short answers would never get beyond the ramp.
    """

    def __init__(self, per_s: float, now_s: float) -> None:
        self._per_s = per_s
        self._since_s = now_s

    def restart(self, now_s: float) -> None:
        """The server is cold again."""
        self._since_s = now_s

    def wait_s(self, now_s: float, *, open_requests: int) -> float:
        """Say how long the next request must wait beside so many open ones; 0 means now."""
        allowed_s = (open_requests - 1) / self._per_s
        return max(0.0, self._since_s + allowed_s - now_s)


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
