"""What is known of a server's work now: of its pages, its log, or both, whichever there is. Pure.

A page that was read and a line that was written more than `STALE_S` ago say nothing of now: a
figure that nobody brings up to date is None, and only its age is left (`told_s`). The cap and the
counters are what they were.
"""

from collections.abc import Iterable

import msgspec

from workers.readings.loads import ServerLoad, with_log
from workers.readings.log_figures import LogFigures
from workers.servers.log_tail import Noted
from workers.servers.meter import STALE_S, Meter


class ServerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A server's work at an instant; None is what nobody tells.

    Attributes:
        load: Its figures and counters.
        gen_tokens_per_s, prefill_tokens_per_s: Over the last seconds.
        cached_share: Of the tokens of the last minutes' prompts, those found in its cache.
        retracted: Requests set back in the last minutes.
        told_s: How old the newest figures are.
    """

    load: ServerLoad = ServerLoad()
    gen_tokens_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    cached_share: float | None = None
    retracted: int | None = None
    told_s: float | None = None


class Telemetry:
    """Takes in what a server says, from two sides, and puts it together.

    Args:
        window_s: See `Meter`.

    Attributes:
        log: What its log comes to.
    """

    def __init__(self, window_s: float) -> None:
        self.log = LogFigures()
        self._window_s = window_s
        self._meter = Meter(window_s)
        self._pages: ServerLoad | None = None
        self._pages_s = float("-inf")

    def note_pages(self, load: ServerLoad, at_s: float) -> None:
        """Take a reading of its pages in."""
        self._pages, self._pages_s = load, at_s
        self._meter.note(with_log(load, self.log.load(at_s)), at_s)

    def note_log(self, noted: Iterable[Noted], at_s: float) -> None:
        """Take in what its log has got since the last time."""
        for line, written_s in noted:
            if written_s is None:
                self.log.note_earlier(line)
            else:
                self.log.note(line, written_s)
        if at_s - self._pages_s > STALE_S and self.log.seen_s > float("-inf"):
            self._meter.note(self.log.load(at_s), at_s)

    def begin_anew(self) -> None:
        """Take note that it may be another server by now: its figures are not the old one's."""
        self._meter = Meter(self._window_s)
        self._pages, self._pages_s = None, float("-inf")

    def figures(self, now_s: float) -> ServerFigures:
        """Say how the server is now."""
        logged = self.log.load(now_s)
        fresh = self._pages is not None and now_s - self._pages_s <= STALE_S
        load = with_log(self._pages, logged) if fresh and self._pages is not None else logged
        told_at_s = max(self._pages_s, self.log.seen_s)
        told_s = max(now_s - told_at_s, 0.0) if told_at_s > float("-inf") else None
        if told_s is None or told_s > STALE_S:
            return ServerFigures(load=load, told_s=told_s)
        meter = self._meter
        return ServerFigures(
            load=load,
            gen_tokens_per_s=meter.gen_tokens_per_s,
            prefill_tokens_per_s=meter.prefill_tokens_per_s,
            cached_share=meter.cached_share,
            retracted=meter.retracted,
            told_s=told_s,
        )
