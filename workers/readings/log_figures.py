"""What the lines of a server's log come to: a reading as of its pages. Pure.

The throughput of a decode line is what was generated since the last one over the time since then:
the first after an idle stretch is far too low, and says nothing of how fast the server is. So the
rate is all that was generated in the last lines over all the time that they stand for, without
lines that reach back into a silence which ended with an empty batch.

An idle server writes nothing, and a batch that ends by itself says nothing of it either: lines
older than `STALE_S` are no reading, neither of something nor of zero. What a start came to holds
until the next.
"""

from collections import deque

import msgspec

from workers.readings.loads import ServerLoad
from workers.readings.log_lines import Batch, Capped, Event, LogLine, MambaPool, Retracted, Started

STALE_S = 30.0
"""As long as SGLang itself shows a throughput that nothing has brought up to date."""

RATE_S = 20.0
SILENCE_S = 2.0
"""A stretch without a line, before a batch that finds nothing running, in which nothing ran."""

MOST_LINES = 256
LEAST_S = 0.5
"""Stamps are of whole seconds as a rule: over less than this they say nothing of a rate."""


class _Decode(msgspec.Struct, frozen=True):
    at_s: float
    rate: float
    tokens: float
    passed_s: float


class _Rank:
    """What one data-parallel rank says; the others have requests and pools of their own."""

    def __init__(self) -> None:
        self.last: Batch | None = None
        self.used_tokens: int | None = None
        self.at_s = self.decoded_at_s = float("-inf")
        self.idle = True
        self.decodes: deque[_Decode] = deque(maxlen=MOST_LINES)

    def note(self, line: Batch, at_s: float) -> float:
        """Take a line in; gives the tokens that were generated since the last decode line."""
        silent = at_s - self.at_s >= SILENCE_S
        if line.kind == "prefill":
            self.idle = self.idle or (silent and not line.running)
        generated = self._note_decode(line, at_s) if line.kind == "decode" else 0.0
        self.last, self.at_s = line, at_s
        self.used_tokens = self.used_tokens if line.used_tokens is None else line.used_tokens
        return generated

    def _note_decode(self, line: Batch, at_s: float) -> float:
        rate, passed_s = line.gen_tokens_per_s, max(at_s - self.decoded_at_s, 0.0)
        first, idle = self.decoded_at_s == float("-inf"), self.idle
        self.decoded_at_s, self.idle = at_s, False
        if rate is None or first:
            return 0.0
        tokens = rate * passed_s
        if idle:
            self.decodes.clear()  # how fast it was before says nothing of now
        else:
            self.decodes.append(_Decode(at_s, rate, tokens, passed_s))
        return tokens

    def gen_tokens_per_s(self) -> float | None:
        """Average what the last lines say, up to `RATE_S` before the last of them."""
        if not self.decodes:
            return None
        since_s = self.decodes[-1].at_s - RATE_S
        lines = [each for each in self.decodes if each.at_s > since_s]
        passed_s = sum(each.passed_s for each in lines)
        if passed_s < LEAST_S:
            return sum(each.rate for each in lines) / len(lines)
        return sum(each.tokens for each in lines) / passed_s


class LogFigures:
    """Takes lines in as they come, and says what they come to.

    Attributes:
        cap, kv_tokens, mamba_states, context_length: Of the last start; None before any is seen.
        strategy: Of the last launch that was seen, as its arguments say.
        seen_s: When the last line about a batch was written.
    """

    def __init__(self) -> None:
        self.strategy: str | None = None
        self.context_length: int | None = None
        self.seen_s = float("-inf")
        self._ranks: dict[int, _Rank] = {}
        self._started: dict[int, Started] = {}
        self._started_s = float("-inf")
        self._capped: int | None = None
        self._states: dict[int, int] = {}
        self._generated = 0.0
        self._prefilled = self._cached = self._retracted = 0

    @property
    def cap(self) -> int | None:
        """Requests that the server runs at once, over its data-parallel ranks."""
        told = [each.cap for each in self._started.values() if each.cap]
        return sum(told) or self._capped

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that its KV pools hold."""
        return sum(each.kv_tokens for each in self._started.values()) or None

    @property
    def mamba_states(self) -> int | None:
        """States that its mamba pools hold; None for a model without."""
        return sum(self._states.values()) or None

    def note(self, line: LogLine, at_s: float) -> None:
        """Take a line in.

        Args:
            line: As `parse_line` gives it.
            at_s: When it was written, on the clock that `load` is asked by; never falling.
        """
        if not line.stamp.first_rank:
            return
        if isinstance(line, Batch):
            self._note_batch(line, at_s)
        elif isinstance(line, Retracted):
            self._retracted += line.requests
        else:
            self._note_start(line, at_s)

    def note_earlier(self, line: LogLine) -> None:
        """Take in what was found further back: of a start, unless a later one is known."""
        if self._started_s == float("-inf"):
            self._note_start(line, self._started_s)

    def load(self, now_s: float) -> ServerLoad:
        """Give the reading as it is now; counts begin with the first line that was taken in.

        Of a reading that is stale only cap and counts are left.
        """
        ranks = [each for each in self._ranks.values() if now_s - each.at_s <= STALE_S]
        lasts = [each.last for each in ranks if each.last]
        rates = [rate for each in ranks if (rate := each.gen_tokens_per_s()) is not None]
        used = [each.used_tokens for each in ranks if each.used_tokens is not None]
        return ServerLoad(
            running=_sum([_running(each) for each in lasts]),
            queued=_sum([each.queued for each in lasts]),
            cap=self.cap,
            token_usage=_highest([each.token_usage for each in lasts]),
            mamba_usage=_highest([each.mamba_usage for each in lasts]),
            used_tokens=sum(used) if used else None,
            gen_throughput=sum(rates) if rates else None,
            gen_tokens_total=self._generated if self._ranks else None,
            prompt_tokens_total=self._prefilled if self._ranks else None,
            cached_tokens_total=self._cached if self._ranks else None,
            retracted_total=self._retracted if self._ranks else None,
            counted_by="log" if self._ranks else "",
        )

    def _note_batch(self, line: Batch, at_s: float) -> None:
        rank = self._ranks.setdefault(line.stamp.dp_rank, _Rank())
        self._generated += rank.note(line, at_s)
        self._prefilled += line.new_tokens or 0
        self._cached += line.cached_tokens or 0
        self.seen_s = max(self.seen_s, at_s)

    def _note_start(self, line: LogLine, at_s: float) -> None:
        if isinstance(line, Event):
            if line.what == "launching":
                self._begin_anew(at_s)
                self.strategy = line.strategy
        elif isinstance(line, MambaPool):
            self._states[line.stamp.dp_rank] = line.states
        elif isinstance(line, Capped):
            self._capped = line.cap
        elif isinstance(line, Started):
            if line.stamp.dp_rank in self._started:
                # Another start, of which the first line was not seen; those of its pools were.
                self._started.clear()
                self._forget_batches(at_s)
            self._started[line.stamp.dp_rank] = line
            self._started_s = at_s
            self.context_length = line.context_length or self.context_length

    def _begin_anew(self, at_s: float) -> None:
        """Forget what an earlier life said of itself."""
        self._started.clear()
        self._states.clear()
        self._capped = None
        self._forget_batches(at_s)

    def _forget_batches(self, at_s: float) -> None:
        self._ranks = {number: rank for number, rank in self._ranks.items() if rank.at_s > at_s}


def _running(line: Batch) -> int | None:
    """Say how many a batch leaves running: a prefill's line counts only the others."""
    if line.running is None or line.kind == "decode":
        return line.running
    return line.running + (line.new_seqs or 0)


def _sum(figures: list[int | None]) -> int | None:
    told = [each for each in figures if each is not None]
    return sum(told) if told else None


def _highest(figures: list[float | None]) -> float | None:
    return max((each for each in figures if each is not None), default=None)
