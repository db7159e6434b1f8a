"""Slots, queue and pace of one server: who runs, who waits, when each one ends.

Virtual time: `_time` is the work (tokens, or seconds with a latency distribution) that a request
would have had that has run since the start. It grows at the pace of the batch, the same for all
that run. A request that starts when it is t and needs n ends when it passes t + n; a heap of
these ends and one timer are all it takes, however many run.
"""

import asyncio
import heapq
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from workers.simulator.open_request import OpenRequest
from workers.simulator.settings import Settings

End = Literal["done", "waited", "ran", "oom"]

# A request is admitted only while this share of the KV pool is enough; retraction frees down to
# it, so that it does not happen at every token.
_KV_ROOM = 0.9
# uvloop's timers tick in milliseconds: late by one rather than early and again.
_TICK_S = 0.0005


class Engine:
    """The scheduler of one server.

    Attributes:
        waiting: Requests without a slot, oldest first.
        running: Requests with one by their serial, oldest first.
        requests, prompt_tokens, ended_tokens, latency_sum_s: Totals of the requests that ended.
        prefilled: Prompt tokens of all that were admitted.
        retractions: How often a request was sent back to the queue.
        on_admitted: Called for each request that gets a slot.
    """

    def __init__(self, settings: Settings, on_end: Callable[[OpenRequest, End], None]) -> None:
        self.pool = settings.pool
        self.kv_tokens = settings.kv_tokens
        self.waiting: deque[OpenRequest] = deque()
        self.running: dict[int, OpenRequest] = {}
        self.prompt_tokens = 0
        self.requests = 0
        self.ended_tokens = 0
        self.latency_sum_s = 0.0
        self.prefilled = 0
        self.retractions = 0
        self.on_admitted: Callable[[OpenRequest], None] | None = None
        self._settings = settings
        self._on_end = on_end
        self._factor = 1.0
        self._frozen = False
        self._serial = 0
        self._ends: list[tuple[float, int]] = []
        self._time = 0.0
        self._seen_s = time.monotonic()
        self._pace = 0.0  # virtual time per second, for the batch as it is
        # Sums over the running: prompt tokens, tokens per work, and that times the start.
        self._prompts = 0
        self._rates = 0.0
        self._offsets = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._settling = False

    # --- figures ---------------------------------------------------------------------------------

    @property
    def kv_used(self) -> float:
        """Tokens in the KV pool now."""
        return self._prompts + self._unfinished()

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated per second of real time, all requests together."""
        return self._rates * self._pace

    @property
    def generated(self) -> int:
        """Tokens generated since the start, those of running requests included."""
        return self.ended_tokens + round(self._unfinished())

    @property
    def steps_per_s(self) -> float:
        """Decode steps per second of real time: tokens per second of one request."""
        return self.tokens_per_s / len(self.running) if self.running else 0.0

    def generated_by(self, request: OpenRequest) -> int:
        """Tokens that one request has so far."""
        self._advance()
        work = self._time - request.started_at if request.serial else request.done
        return min(int(work * request.tokens_per_work), request.tokens)

    def _unfinished(self) -> float:
        self._advance()
        return max(self._time * self._rates - self._offsets, 0.0)

    # --- what the server does with it ------------------------------------------------------------

    def submit(self, request: OpenRequest) -> bool:
        """Run a request or let it wait; `on_end` may be called before this returns.

        Returns:
            False when the queue is full: the request is not taken.
        """
        if not self.waiting and self._has_room(request):
            if request.work <= 0:
                self.prefilled += request.prompt_tokens
                self._finish(request, "done")
                return True
            self._advance()
            self._admit(request)
        else:
            limit = self._settings.max_queued_requests
            if limit is not None and len(self.waiting) >= limit:
                return False
            self.waiting.append(request)
        self._settle_soon()
        return True

    def remove(self, request: OpenRequest) -> int:
        """Take a request out, wherever it is; give the tokens that it has so far."""
        tokens = self.generated_by(request)
        if request.serial:
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._count(request, tokens)
        self._settle_soon()
        return tokens

    def set_factor(self, factor: float) -> None:
        """Run at this share of the full pace from now on."""
        self._advance()
        self._factor = factor
        self._settle_soon()

    def freeze(self, *, frozen: bool) -> None:
        """Stop or go on: nothing starts, ends or makes progress in between."""
        self._advance()
        self._frozen = frozen
        self._settle_soon()

    def stop(self) -> None:
        """Forget everything without ending it: the process of this engine has died."""
        self._frozen = True
        self._settling = True
        self.waiting.clear()
        self.running.clear()
        if self._timer is not None:
            self._timer.cancel()

    # --- inside ----------------------------------------------------------------------------------

    def _advance(self) -> None:
        now = time.monotonic()
        self._time += (now - self._seen_s) * self._pace
        self._seen_s = now

    def _repace(self) -> None:
        count = len(self.running)
        if self._frozen or not count:
            self._pace = 0.0
            return
        settings = self._settings
        pace = 1.0 if settings.latency else settings.rate_max / (count + settings.rate_half)
        self._pace = pace * settings.speed * self._factor

    def _has_room(self, request: OpenRequest) -> bool:
        if self._frozen or len(self.running) >= self.pool.cap:
            return False
        if not self.running:
            return True
        held = request.prompt_tokens + request.done * request.tokens_per_work
        return self.kv_used + held <= self.kv_tokens * _KV_ROOM

    def _admit(self, request: OpenRequest) -> None:
        self._serial += 1
        request.serial = self._serial
        request.started_at = self._time - request.done
        request.admitted_s = request.admitted_s or self._seen_s
        self.running[self._serial] = request
        self.prefilled += request.prompt_tokens
        self._prompts += request.prompt_tokens
        self._rates += request.tokens_per_work
        self._offsets += request.tokens_per_work * request.started_at
        heapq.heappush(self._ends, (request.started_at + request.work, self._serial))
        self._repace()
        if self.on_admitted is not None:
            self.on_admitted(request)

    def _release(self, request: OpenRequest) -> None:
        del self.running[request.serial]
        request.serial = 0
        self._prompts -= request.prompt_tokens
        self._rates -= request.tokens_per_work
        self._offsets -= request.tokens_per_work * request.started_at
        if not self.running:
            # Nothing refers to the virtual time any more: start over, before sums drift.
            self._time = self._rates = self._offsets = 0.0
            self._ends.clear()
        self._repace()

    def _count(self, request: OpenRequest, tokens: int) -> None:
        self.requests += 1
        self.latency_sum_s += max(self._seen_s - request.arrived_s, 0.0)
        self.prompt_tokens += request.prompt_tokens
        self.ended_tokens += tokens

    def _finish(self, request: OpenRequest, end: End) -> None:
        tokens = request.tokens if end == "done" else self.generated_by(request)
        if request.serial:
            self._release(request)
        self._count(request, tokens)
        self._on_end(request, end)

    def _settle_soon(self) -> None:
        # Once a round of the loop, whatever came in it.
        if not self._settling:
            self._settling = True
            asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        self._settling = False
        self._advance()
        self._repace()
        if not self._frozen:
            while self._ends and self._ends[0][0] <= self._time:
                ended = self.running.get(heapq.heappop(self._ends)[1])
                if ended is not None:
                    self._finish(ended, "done")
            self._retract()
            self._expire()
            while self.waiting and self._has_room(self.waiting[0]):
                request = self.waiting.popleft()
                if request.work <= 0:
                    self._finish(request, "done")
                else:
                    self._admit(request)
        self._set_timer()

    def _retract(self) -> None:
        """Give the youngest requests' tokens up while the KV pool is too full."""
        if self.kv_used < self.kv_tokens:
            return
        while self.kv_used > self.kv_tokens * _KV_ROOM and len(self.running) > 1:
            request = next(reversed(self.running.values()))
            request.done = self._time - request.started_at
            self._release(request)
            request.retractions += 1
            self.retractions += 1
            self.waiting.appendleft(request)
        if self.kv_used >= self.kv_tokens:
            self._finish(next(iter(self.running.values())), "oom")

    def _expire(self) -> None:
        """End what is past the server's own deadlines."""
        now, speed = self._seen_s, self._settings.speed
        limit = self._settings.waiting_timeout_s
        while limit and self.waiting and (now - self.waiting[0].arrived_s) * speed >= limit:
            self._finish(self.waiting.popleft(), "waited")
        limit = self._settings.running_timeout_s
        while limit and self.running:
            oldest = next(iter(self.running.values()))
            if (now - oldest.admitted_s) * speed < limit:
                break
            self._finish(oldest, "ran")

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        delay = self._next_event_s()
        if not math.isinf(delay):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(delay, 0.0) + _TICK_S, self._settle)

    def _next_event_s(self) -> float:
        """Seconds until the next end, deadline or overflow; infinite when none is due."""
        delay = math.inf
        while self._ends and self._ends[0][1] not in self.running:
            heapq.heappop(self._ends)
        if self._ends and self._pace > 0:
            delay = (self._ends[0][0] - self._time) / self._pace
            if self.tokens_per_s > 0:
                delay = min(delay, (self.kv_tokens - self.kv_used) / self.tokens_per_s)
        settings, now = self._settings, self._seen_s
        if settings.waiting_timeout_s and self.waiting:
            age = now - self.waiting[0].arrived_s
            delay = min(delay, settings.waiting_timeout_s / settings.speed - age)
        if settings.running_timeout_s and self.running:
            age = now - next(iter(self.running.values())).admitted_s
            delay = min(delay, settings.running_timeout_s / settings.speed - age)
        return delay
