"""Why a server ended, in words; whether it is launched again."""

import pytest

from workers.supervisor.last_words import LastWords, last_words
from workers.supervisor.restarts import (
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    MOST_SAME,
    STABLE_S,
    Restarts,
)

UNKNOWN_FLAG = """usage: sglang serve [-h] --model-path MODEL_PATH
sglang serve: error: unrecognized arguments: --mamba-scheduler-strategy no_buffer
"""
OUT_OF_MEMORY = """[2026-11-30 17:28:41] Load weight begin. avail mem=3.20 GB
[2026-11-30 17:28:43 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 6370, in run_scheduler_process
    scheduler = Scheduler(
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.

[2026-11-30 17:28:43] SIGQUIT received. signum=None, frame=None. It usually means one child failed.
Traceback (most recent call last):
EOFError
"""
ASSERTION = """Traceback (most recent call last):
  File "mamba_hook.py", line 158, in validate_mamba_no_buffer
    assert view.disable_overlap_schedule, (
AssertionError: no_buffer do not support overlap schedule. Try to set another.
"""
CHILD = """[2026-11-30 17:28:43] Subprocess scheduler_0 (pid=123) crashed with exit code -9.
[2026-11-30 17:28:43] SIGQUIT received. signum=None, frame=None. It usually means one child failed.
"""
INITIALIZE = """RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.
RuntimeError: Initialization failed. Please see the error messages above.
"""


@pytest.mark.parametrize(
    ("log", "code", "words"),
    [
        (UNKNOWN_FLAG, 2, "refuses its arguments: unrecognized arguments: --mamba-scheduler"),
        (
            OUT_OF_MEMORY,
            1,
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. (see",
        ),
        (ASSERTION, 1, "AssertionError: no_buffer do not support overlap schedule"),
        (CHILD, -3, "a process of it ended: it was killed (SIGKILL)"),
        (INITIALIZE, 1, "Not enough memory"),
        ("", -9, "for want of memory"),
        ("", -11, "ended by SIGSEGV"),
        ("", -99, "ended by signal 99"),
        ("fine\n", 3, "exit code 3"),
        ("", None, "it is gone"),
        (
            "[2026-11-30 17:28:43] Scheduler watchdog timeout (self.watchdog_timeout=300)",
            -3,
            "watchdog",
        ),
    ],
)
def test_the_line_that_tells_is_found(log: str, code: int | None, words: str) -> None:
    assert words in last_words(log, code).text


def test_only_refused_arguments_repeat_for_sure() -> None:
    assert last_words(UNKNOWN_FLAG, 2).repeats
    assert not last_words(UNKNOWN_FLAG, -9).repeats
    assert not last_words(OUT_OF_MEMORY, 1).repeats


def test_a_line_of_any_length_is_shown_in_short() -> None:
    assert len(last_words("ValueError: " + "x" * 100_000, 1).text) < 600


def test_refused_arguments_are_not_tried_again() -> None:
    assert Restarts().ended(LastWords("no such flag", repeats=True), ready_s=None).wait_s is None


def test_a_start_that_fails_alike_is_given_up_and_one_that_fails_otherwise_is_not() -> None:
    alike = Restarts()
    verdicts = [alike.ended(LastWords("out of memory"), ready_s=None) for _ in range(MOST_SAME)]
    assert [verdict.wait_s is None for verdict in verdicts] == [False] * (MOST_SAME - 1) + [True]
    assert f"{MOST_SAME} times in a row: out of memory" in verdicts[-1].text
    changing = Restarts()
    for number in range(20):
        assert changing.ended(LastWords(f"{number}"), ready_s=None).wait_s is not None


def test_a_server_that_gave_a_token_once_is_tried_for_ever_ever_more_slowly() -> None:
    restarts = Restarts()
    restarts.ready()
    waits = [restarts.ended(LastWords("it died"), ready_s=None).wait_s or 0 for _ in range(20)]
    assert waits[0] == FIRST_BACKOFF_S
    assert waits == sorted(waits)
    assert waits[-1] == LONGEST_BACKOFF_S
    assert restarts.ended(LastWords("it died"), ready_s=STABLE_S).wait_s == FIRST_BACKOFF_S
