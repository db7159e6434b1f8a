"""The page of a run as people see it, on a wide and on a narrow terminal."""

import io
from typing import Any

import pytest
from rich.console import Console

from common.figures import progress
from common.group_figures import GroupFigures
from common.models import Counts
from common.standing import Standing
from producer.view import WIDE, of_run, of_runs, pace

NOW_MS = 1_796_000_000_000


def figures() -> dict[str, Any]:
    group = GroupFigures(
        group="gpu0@node-with-a-name",
        epoch="e",
        host="h",
        pid=1,
        server="http://s",
        state="ready",
        in_flight=512,
        bound=520,
        cap=512,
        running=512,
        queued=8,
        gen_tokens_per_s=12_345.0,
        mamba_usage=0.5,
        strategy="extra_buffer",
        server_version="0.5.23",
        oldest_s=900.0,
        ages_s=9_000.0,
        up_s=1_000.0,
    )
    counts = Counts(
        total=1_234_567,
        completed=400_000,
        in_flight=512,
        queued=834_055,
        output_tokens=400_000_000,
        active_ms=9_000_000,
    )
    buckets = {NOW_MS // 5_000 - back: 60 for back in range(60)}
    told = progress(
        counts,
        standing=Standing(),
        now_ms=NOW_MS,
        groups=[group],
        per_bucket=buckets,
    )
    return {"run": "nightly", "output": "s3://bucket/prefix", **told}


def page(told: dict[str, Any], width: int) -> list[str]:
    screen = Console(file=io.StringIO(), width=width, highlight=False)
    screen.print(of_run(told, width=width))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, WIDE, 140])
def test_the_time_left_stands_on_one_line(width: int) -> None:
    told = figures()

    assert any(pace(told) in line for line in page(told, width))


def head_of(lines: list[str]) -> list[str]:
    (head,) = (line for line in lines if line.startswith("worker group"))
    return head.split()


def test_a_narrow_page_has_the_columns_that_matter() -> None:
    narrow, wide = page(figures(), 80), page(figures(), 140)

    assert not {"strategy", "SGLang"} & set(head_of(narrow))
    assert {"mamba", "strategy", "SGLang", "full"} < set(head_of(wide))
    # What all have alike stands above them instead.
    assert any("extra_buffer, SGLang 0.5.23" in line for line in narrow)
    # Each group on one line, nothing cut off.
    (row,) = (line for line in narrow if line.startswith("gpu0"))
    assert row.split() == [
        *("gpu0@node…h-a-name", "ready", "512/520/512", "512", "8", "12,345", "-", "50%"),
        *("15", "min"),
    ]
    assert "gpu0@node-with-a-name ready" in "\n".join(wide)


def test_times_have_one_form_wherever_they_are_told() -> None:
    told = figures() | {"eta_hours": 0.0009, "eta_hours_low": 0.0008, "eta_hours_high": 0.001}

    assert pace(told).endswith("3 s left (3 s to 4 s)")


def test_it_says_behind_which_run_it_waits() -> None:
    told = figures() | {"waits_behind": "big2 (priority 5)"}

    assert any("waits behind big2 (priority 5)" in line for line in page(told, 80))


def test_no_terminal_acts_on_what_servers_and_redis_say() -> None:
    acts = "\x1b]0;owned\x07[red]\u202e"
    told = figures()
    group = {**told["worker_groups"][0], "strategy": acts, "group": acts, "state": acts}
    told |= {"worker_groups": [group], "warnings": [acts], "output": acts, "limited_by": acts}
    screen = Console(file=io.StringIO(), width=300, highlight=False)

    screen.print(of_run(told, width=300))
    screen.print(of_runs([told]))

    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    # As text, and as no markup of rich's.
    assert shown.count("\\x1b]0;owned\\x07[red]\\u202e") >= 6
