"""What a log comes to: rates that an idle stretch does not spoil, and nothing that is stale."""

import random

import pytest

from workers.readings.loads import ServerLoad, with_log
from workers.readings.log_figures import STALE_S, LogFigures
from workers.readings.log_lines import parse_line

START = (
    "server_args=ServerArgs(mamba_scheduler_strategy='no_buffer', disable_radix_cache=False)",
    "Mamba Cache is allocated. max_mamba_cache_size: 216, conv_state size: 0.07GB",
    "max_total_num_tokens=450000, max_prefill_tokens=1, max_running_requests=72, context_len=9",
)


class Log:
    """A server that writes its log: it generates, prefills and stands idle on a clock of its own.

    Stamps are of whole seconds, as SGLang's are.
    """

    def __init__(self, figures: LogFigures | None = None, ranks: str = "") -> None:
        self.figures = figures or LogFigures()
        self.ranks = ranks
        self.now_s = 1000.0
        self.decoded_s = 0.0
        self.open_tokens = 0.0

    def say(self, text: str) -> None:
        second = int(self.now_s)
        stamp = f"2026-01-01 {second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
        line = parse_line(f"[{stamp}{self.ranks}] {text}\n".encode())
        assert line is not None, text
        # As the tail says it: by the stamps alone.
        self.figures.note(line, float(second))

    def prefill(self, *, running: int, new: int = 1, tokens: int = 100, cached: int = 0) -> None:
        self.say(
            f"Prefill batch, #new-seq: {new}, #new-token: {tokens}, #cached-token: {cached}, "
            f"full token usage: 0.10, mamba usage: 0.20, #running-req: {running}, #queue-req: 5"
        )

    def decode(
        self, seconds: float, speed: float, *, running: int = 70, silent: bool = False
    ) -> None:
        """Generate for so long, then say so."""
        self.now_s += seconds
        self.open_tokens += speed * seconds
        if silent:
            return
        rate = self.open_tokens / (self.now_s - self.decoded_s)
        self.decoded_s, self.open_tokens = self.now_s, 0.0
        self.say(
            f"Decode batch, #running-req: {running}, #full token: 9000, full token usage: 0.47, "
            f"mamba num: 140, mamba usage: 0.65, cuda graph: True, gen throughput (token/s): "
            f"{rate:.2f}, #queue-req: 3"
        )

    def load(self, later_s: float = 0.0) -> ServerLoad:
        return self.figures.load(self.now_s + later_s)


def test_a_log_tells_what_the_pages_tell() -> None:
    log = Log()
    for text in START:
        log.say(text)
    log.prefill(running=0, new=70, tokens=7000, cached=1000)
    for _ in range(5):
        log.decode(2.0, 1180.0)
    log.say("KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained: 8")
    load = log.load()

    assert (load.running, load.queued, load.cap, load.used_tokens) == (70, 3, 72, 9000)
    assert (load.token_usage, load.mamba_usage) == (0.47, 0.65)
    assert (load.prompt_tokens_total, load.cached_tokens_total) == (7000, 1000)
    assert (load.retracted_total, load.counted_by) == (2, "log")
    figures = log.figures
    assert (figures.kv_tokens, figures.mamba_states, figures.strategy) == (
        450_000,
        216,
        "no_buffer",
    )


def test_the_rate_is_the_mean_over_time_however_uneven_the_lines_come() -> None:
    log, dice = Log(), random.Random(7)
    log.prefill(running=0, new=70)
    log.decode(1.0, 1000.0)
    # Twenty seconds of it, in lines from a tenth of a second to three.
    tokens = spent_s = 0.0
    while spent_s < 19.0:
        seconds, speed = dice.uniform(0.1, 3.0), dice.choice([500.0, 2000.0])
        log.decode(seconds, speed)
        tokens, spent_s = tokens + seconds * speed, spent_s + seconds

    assert log.load().gen_throughput == pytest.approx(tokens / spent_s, rel=0.12)


def test_the_first_line_after_an_idle_stretch_is_no_rate() -> None:
    log = Log()
    log.prefill(running=0, new=70)
    for _ in range(10):
        log.decode(2.0, 1000.0)
    log.now_s += 600.0
    assert log.load().gen_throughput is None
    log.prefill(running=0, new=70)
    log.decode(2.0, 1000.0)
    # Its own word is 3 tokens a second.
    assert log.load().gen_throughput is None
    log.decode(2.0, 1000.0)

    assert log.load().gen_throughput == pytest.approx(1000.0, rel=0.1)
    assert log.load().gen_tokens_total == pytest.approx(22_000.0, rel=0.1)


def test_a_long_prefill_between_two_lines_counts_as_the_time_that_it_took() -> None:
    log = Log()
    log.prefill(running=0, new=70)
    log.decode(2.0, 1000.0)
    log.decode(2.0, 1000.0)
    log.now_s += 6.0
    log.prefill(running=70, new=8)
    log.decode(2.0, 1000.0)

    assert log.load().gen_throughput == pytest.approx(400.0, rel=0.1)


def test_lines_within_one_second_are_averaged_by_what_they_say() -> None:
    log = Log()
    log.prefill(running=0)
    log.decode(0.05, 100.0)
    for speed in (100.0, 300.0, 200.0):
        log.decode(0.1, speed)

    assert log.load().gen_throughput == pytest.approx(200.0, rel=0.05)


def test_of_lines_that_are_stale_only_cap_and_counts_are_left() -> None:
    log = Log()
    for text in START:
        log.say(text)
    log.prefill(running=0, new=70)
    log.decode(2.0, 1000.0)
    log.decode(2.0, 1000.0)
    fresh, stale = log.load(STALE_S - 1), log.load(STALE_S + 2)

    assert fresh.running == 70
    assert fresh.gen_throughput == pytest.approx(1000.0, rel=0.1)
    assert stale == ServerLoad(
        cap=72,
        gen_tokens_total=fresh.gen_tokens_total,
        prompt_tokens_total=100,
        cached_tokens_total=0,
        retracted_total=0,
        counted_by="log",
    )


def test_a_prefill_leaves_its_own_prompts_running_too() -> None:
    log = Log()
    log.prefill(running=30, new=8)

    assert (log.load().running, log.load().queued) == (38, 5)


def test_data_parallel_ranks_are_summed_and_repetitions_left_out() -> None:
    figures = LogFigures()
    for rank, speed in ((0, 1000.0), (1, 500.0)):
        log = Log(figures, f" DP{rank} TP{rank}")
        log.say(START[2])
        log.prefill(running=0, new=70, tokens=100)
        log.decode(2.0, speed)
        log.decode(2.0, speed)
    repeated = Log(figures, " DP1 PP1 TP1")
    repeated.prefill(running=900, tokens=10_000)
    load = figures.load(1004.0)

    assert (load.running, load.queued, load.cap, load.prompt_tokens_total) == (140, 6, 144, 200)
    assert load.gen_throughput == pytest.approx(1500.0, rel=0.1)
    assert load.token_usage == 0.47


def test_another_start_is_another_life() -> None:
    log = Log()
    for text in START:
        log.say(text)
    log.prefill(running=0, new=30)
    log.now_s += 1
    log.say(START[0].replace("no_buffer", "extra_buffer"))
    assert (log.load().running, log.load().cap) == (None, None)
    log.say(START[1].replace("216", "160"))
    log.say(START[2].replace("72", "32"))

    assert (log.load().running, log.load().cap) == (None, 32)
    assert (log.figures.mamba_states, log.figures.strategy) == (160, "extra_buffer")


def test_a_start_of_which_the_first_lines_are_missing_takes_the_place_of_the_last() -> None:
    log = Log()
    for text in START:
        log.say(text)
    log.prefill(running=0, new=30)
    log.now_s += 1
    log.say(START[1].replace("216", "160"))
    log.say(START[2].replace("72", "32"))

    assert (log.load().running, log.load().cap, log.figures.mamba_states) == (None, 32, 160)


def test_the_warning_tells_the_cap_where_no_summary_does() -> None:
    log = Log()
    log.say("max_running_requests is capped to 4 by the mamba state cache")

    assert log.load().cap == 4


def test_what_was_found_further_back_stands_until_a_later_start_is_seen() -> None:
    log = Log()
    log.prefill(running=0, new=30)
    earlier = [parse_line(f"[2025-12-31 10:00:00] {text}".encode()) for text in START]
    for line in earlier:
        assert line is not None
        log.figures.note_earlier(line)
    assert (log.load().running, log.load().cap) == (30, 72)

    log.say(START[0])
    log.say(START[2].replace("72", "32"))
    for line in earlier:
        assert line is not None
        log.figures.note_earlier(line)

    assert log.load().cap == 32


def test_a_log_fills_what_the_pages_leave_out_and_changes_nothing_else() -> None:
    log = ServerLoad(
        running=7, cap=9, mamba_usage=0.5, gen_throughput=80.0, gen_tokens_total=1000.0,
        prompt_tokens_total=10.0, retracted_total=1.0, counted_by="log",
    )  # fmt: skip
    counting = ServerLoad(
        running=8, gen_throughput=90.0, gen_tokens_total=5.0, counted_by="metrics"
    )
    silent = ServerLoad(running=8, gen_throughput=90.0, prompt_tokens_total=3, counted_by="loads")

    assert with_log(counting, log) == ServerLoad(
        running=8, cap=9, mamba_usage=0.5, gen_throughput=90.0, gen_tokens_total=5.0,
        retracted_total=1.0, counted_by="metrics",
    )  # fmt: skip
    # The pages' own word is that of one line of the log; the log's is their mean.
    assert with_log(silent, log) == ServerLoad(
        running=8, cap=9, mamba_usage=0.5, gen_throughput=80.0, gen_tokens_total=1000.0,
        prompt_tokens_total=10.0, retracted_total=1.0, counted_by="log",
    )  # fmt: skip
    assert with_log(ServerLoad(), ServerLoad()) == ServerLoad()
