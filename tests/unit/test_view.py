"""The page of a run as people see it, on a wide and on a narrow terminal."""

import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from common.figures import progress
from common.group_figures import GroupFigures
from common.harmless import harmless
from common.models import Counts
from common.standing import Standing
from producer import groups_view
from producer.groups_view import notes_of
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


# --- Worker groups -------------------------------------------------------------------------------


def many(count: int, **odd: dict[str, Any]) -> list[dict[str, Any]]:
    """Worker groups of one kind, eight a machine; `odd` says what is otherwise by number: n3."""
    (one,) = figures()["worker_groups"]
    groups = []
    for number in range(count):
        name = f"gpu{number % 8}@node{number // 8:02d}.cluster.example.net"
        groups.append({**one, "group": name, **odd.get(f"n{number}", {})})
    return groups


ODD: dict[str, dict[str, Any]] = {
    "n3": {"state": "down", "detail": "no progress for 30 s", "unready_s": 250.0, "running": None},
    "n40": {"gen_tokens_per_s": 4_000.0},
    "n77": {"strategy": "no_buffer", "cap": 600},
    "n98": {"oldest_s": 9_000.0},
    "n99": {"state": "drained", "detail": "workers restart", "unready_s": 20.0},
}


@pytest.mark.parametrize("width", [80, 100, 160])
def test_of_a_hundred_the_odd_ones_stand_first_with_what_is_odd(width: int) -> None:
    told = figures() | {"worker_groups": many(100, **ODD)}

    lines = page(told, width)

    assert all(len(line) <= width for line in lines)
    text = " ".join(" ".join(lines).split())
    assert "100 worker groups: 98 ready, 1 down, 1 drained" in text
    rows = [line for line in lines if line.startswith("gpu")]
    assert [row.split()[0].split(".")[0] for row in rows[:6]] == [
        *("gpu3@node00", "gpu0@node05", "gpu5@node09", "gpu2@node12", "gpu3@node12"),
        "gpu0@node00",
    ]
    assert len(rows) == groups_view.MOST
    for note in (
        "down for 4.2 min: no progress for 30 s",
        "slow: 32% of what most generate",
        "no_buffer, most have extra_buffer; cap 600, most have 512",
        "its oldest request is 2.5 h old, elsewhere about 15 min",
        "drained for 20 s: workers restart",
        "84 more, nothing odd about them: --all-gpus shows each",
    ):
        assert note in text
    # Where a line is not cut, the last figure of it stands.
    assert all(row.rstrip()[-1] != "…" for row in rows)


def test_each_stands_there_where_all_are_asked_for_in_the_order_of_their_numbers() -> None:
    told = figures() | {"worker_groups": many(100, **ODD)}
    screen = Console(file=io.StringIO(), width=200, highlight=False)

    screen.print(of_run(told, width=200, most_groups=None))

    rows = [row for row in screen.file.getvalue().splitlines() if row.startswith("gpu")]  # type: ignore[attr-defined]
    assert len(rows) == 100
    assert rows[0].startswith("gpu0@node00.cluster.example.net ready")
    assert rows[99].startswith("gpu3@node12.cluster.example.net drained")


def test_more_odd_ones_than_lines_are_counted() -> None:
    away: dict[str, dict[str, Any]] = {
        f"n{n}": {"state": "down", "detail": "", "unready_s": 9.0} for n in range(40)
    }
    told = figures() | {"worker_groups": many(60, **away)}

    assert any("44 more, 24 of them odd too" in line for line in page(told, 80))


def test_in_a_pair_nobody_knows_which_one_is_odd() -> None:
    (one, other) = many(2, n1={"gen_tokens_per_s": 1.0, "strategy": "no_buffer"})

    assert notes_of([one, other]) == ["", ""]
    assert notes_of([]) == []


value = st.none() | st.floats(0, 1e9) | st.integers(0, 10**9)
named = st.none() | st.text(max_size=30)
a_group = st.fixed_dictionaries(
    {
        "group": st.text(max_size=60),
        "state": st.sampled_from(["ready", "down", "starting", "draining", "new word"]),
        "detail": st.text(max_size=80),
        "in_flight": st.integers(0, 999),
        "bound": st.integers(0, 999),
        **dict.fromkeys(("cap", "running", "queued"), st.none() | st.integers(0, 999)),
        **dict.fromkeys(("kv_usage", "mamba_usage", "occupancy"), st.none() | st.floats(0, 1)),
        **dict.fromkeys(("gen_tokens_per_s", "oldest_s", "unready_s"), value),
        **dict.fromkeys(("strategy", "server_version", "model"), named),
    }
)


@settings(max_examples=30)
@given(groups=st.lists(a_group, min_size=1, max_size=20), width=st.sampled_from([40, 80, 200]))
def test_whatever_they_say_there_is_a_page_and_each_has_its_line(
    groups: list[dict[str, Any]], width: int
) -> None:
    lines = page(figures() | {"worker_groups": groups}, width)

    assert sum(line.startswith("worker group ") for line in lines) >= 1
    assert all(harmless(line) == line for line in lines)
