"""Marks: what makes one, how it is told, how the figures changed there."""

import contextlib
import io
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from common import object_names
from common.errors import UsageError
from common.marks.effect import (
    BUCKET_MS,
    COMPARED,
    FILL_MS,
    LEAST_MS,
    SHOWN,
    SIDE_MS,
    Bucket,
    buckets_of,
    effect_of,
    spans_of,
    with_effects,
)
from common.marks.events import (
    SILENT_S,
    Event,
    Heard,
    Present,
    Silence,
    changes,
    heard_of,
    of_arrival,
    of_change,
)
from common.marks.mark import Mark, by_hand, named_of, natural
from producer.mark import checked_text, instant_ms
from producer.marks_view import lines_of, of_marks

NOW_MS = 1_796_000_010_000
MINUTE_MS = 60_000


def mark(at_ms: int, until_ms: int | None = None, **own: Any) -> Mark:
    return Mark(
        **{
            "id": f"{at_ms:013d}-self-{'0' * 12}",
            "kind": "server_restarted",
            "at_ms": at_ms,
            "until_ms": at_ms if until_ms is None else until_ms,
            **own,
        }
    )


# --- How it is told ------------------------------------------------------------------------------

GPUS = [f"gpu{number}@h" for number in range(12)]

TOLD = [
    ({"kind": "came", "subjects": GPUS[:1]}, "worker group gpu0@h came"),
    (
        {"kind": "came", "subjects": list(reversed(GPUS)), "times": 12},
        "12 worker groups came (gpu0@h … gpu11@h)",
    ),
    (
        {"kind": "went", "subjects": GPUS[:2], "times": 2},
        "2 worker groups went (gpu0@h, gpu1@h)",
    ),
    (
        {"kind": "server_restarted", "subjects": GPUS[3:4], "times": 30},
        "server of gpu3@h restarted, 30 times in all",
    ),
    (
        {
            "subjects": GPUS[:8],
            "times": 8,
            "detail": "strategy extra_buffer -> no_buffer",
            "cap": [32, 32, 71, 72],
        },
        (
            "8 servers restarted (gpu0@h … gpu7@h): strategy extra_buffer -> no_buffer, "
            "cap 32 -> 71 to 72"
        ),
    ),
    (
        {"kind": "came", "subjects": GPUS[:4], "more": 300, "times": 304},
        "304 worker groups came (gpu0@h … gpu3@h)",
    ),
    ({"kind": "paused", "detail": "by hand"}, "paused: by hand"),
    ({"kind": "hand", "detail": "no_buffer on"}, "no_buffer on"),
    # Of another version.
    ({"kind": "eclipse", "detail": "of the moon"}, "of the moon"),
    ({"kind": "hand", "detail": "a\x1b[31m\nb"}, "a\\x1b[31m b"),
]


@pytest.mark.parametrize(("own", "text"), TOLD)
def test_a_mark_is_told_in_words(own: dict[str, Any], text: str) -> None:
    assert mark(NOW_MS, **own).text == text


def test_gpus_are_named_in_the_order_of_their_numbers() -> None:
    assert named_of(["gpu10@h", "gpu9@h"]) == "gpu9@h, gpu10@h"
    assert named_of([f"gpu{n}@{host}" for host in "ba" for n in (1, 0)]) == "gpu0@a … gpu1@b"


@given(st.lists(st.text(max_size=30), max_size=8))
def test_any_names_have_an_order(names: list[str]) -> None:
    assert Counter(sorted(names, key=natural)) == Counter(names)
    assert natural("²" + "9" * 5_000)


def test_a_mark_that_somebody_sets_has_a_name_of_its_own_in_the_store() -> None:
    one, other = by_hand("x", NOW_MS), by_hand("x", NOW_MS)

    assert one.id != other.id
    assert object_names.mark_of(object_names.mark_object(one.id)) == one.id
    for name in ("marks/x.json", "marks/1-hand-000000000000.json", f"marks/{one.id}.json.tmp"):
        assert object_names.mark_of(name) == ""


# --- What makes one ------------------------------------------------------------------------------

WAS = Present(epoch="e1", model="m", strategy="extra_buffer", version="0.5.12", cap=32)
IS = Present(epoch="e2", model="m", strategy="no_buffer", version="0.5.23", cap=72)


def test_what_differs_is_said_and_what_is_not_told_has_not_changed() -> None:
    assert changes(WAS, IS) == (
        "strategy extra_buffer -> no_buffer, SGLang 0.5.12 -> 0.5.23",
        (32, 72),
    )
    dumb = Present(epoch="e3")
    assert changes(WAS, dumb) == changes(dumb, WAS) == ("", None)
    assert dumb.knows_what(WAS) == Present(
        epoch="e3", model="m", strategy="extra_buffer", version="0.5.12", cap=32
    )


@pytest.mark.parametrize(
    ("away_ms", "left", "kinds"),
    [
        (5_000, True, [("restarted", "went"), ("server_changed", "")]),
        (5_000, False, [("restarted", ""), ("server_changed", "")]),
        (120_000, True, [("came", ""), ("server_changed", "")]),
    ],
)
def test_who_is_back_within_a_minute_has_restarted(
    away_ms: int,
    left: bool,  # noqa: FBT001 - of a case
    kinds: list[tuple[str, str]],
) -> None:
    before = Heard(what=WAS, heard_ms=NOW_MS - away_ms, left=left)

    events = of_arrival("gpu0@h", before, IS, now_ms=NOW_MS)

    assert [(event.kind, event.takes_back) for event in events] == kinds


def test_who_was_never_heard_of_comes() -> None:
    assert of_arrival("gpu0@h", None, IS, now_ms=NOW_MS) == [Event(kind="came", subject="gpu0@h")]


def test_who_says_once_more_that_it_came_because_no_answer_came_has_come() -> None:
    heard = Heard(what=IS, heard_ms=NOW_MS - 5_000)

    events = of_arrival("gpu0@h", heard, IS, now_ms=NOW_MS)

    assert events == [Event(kind="came", subject="gpu0@h")]


def test_a_restart_is_told_though_nothing_changed_and_a_change_only_if_there_is_one() -> None:
    assert of_change("g", WAS, WAS, kind="server_changed") == []
    (event,) = of_change("g", WAS, WAS, kind="server_restarted")
    assert (event.detail, event.cap) == ("", None)


def test_events_that_differ_in_words_are_different_marks_and_in_caps_the_same() -> None:
    one, other = (
        Event(kind="server_restarted", subject="g", detail="a -> b", cap=(32, cap))
        for cap in (71, 72)
    )
    assert one.burst == other.burst
    assert one.burst != Event(kind="server_restarted", subject="g").burst


def test_what_is_remembered_of_a_group_is_read_back_and_garbage_is_nothing() -> None:
    assert heard_of(b'1796000010000 1 {"epoch":"e","cap":3}') == Heard(
        what=Present(epoch="e", cap=3), heard_ms=NOW_MS, left=True
    )
    for garbage in (b"", b"x 0 {}", b'1 0 {"cap":3}', b"1 0 [", b"\xff\xfe"):
        assert heard_of(garbage) is None


def test_only_what_one_process_has_seen_silent_itself_is_silent() -> None:
    silence, quiet = Silence(), {"a": Heard(what=WAS, heard_ms=1)}
    step_s, looks = 10.0, int(SILENT_S / 10.0)

    for look in range(looks):
        assert silence.look(quiet, look * step_s) == []
    assert silence.look(quiet, looks * step_s) == ["a"]
    # Redis, or this process, was away meanwhile: all get the time anew.
    assert silence.look(quiet, looks * step_s + SILENT_S) == []
    # Who speaks is not silent.
    for look in range(looks):
        now_s = looks * step_s + SILENT_S + (look + 1) * step_s
        assert silence.look({"a": Heard(what=WAS, heard_ms=2 + look)}, now_s) == []
    # Who has left is known to have left.
    gone = {"a": Heard(what=WAS, heard_ms=1, left=True)}
    later_s = 2 * looks * step_s + SILENT_S
    assert not any(silence.look(gone, later_s + look * step_s) for look in range(3 * looks))


# --- Before and after ----------------------------------------------------------------------------


def minutes(
    first_ms: int, end_ms: int, *, tokens_per_s: float, running: float, rate: float, each: int
) -> dict[int, Bucket]:
    """What 8 servers bring in that time."""
    seconds = BUCKET_MS / 1000
    return {
        bucket: Bucket(
            completions=round(rate * seconds),
            output_tokens=round(rate * seconds) * each,
            tokens=round(tokens_per_s * seconds),
            running_ms=round(8 * running * BUCKET_MS),
            ready_ms=8 * BUCKET_MS,
        )
        for bucket in range(-(-first_ms // BUCKET_MS), end_ms // BUCKET_MS)
    }


def test_three_minutes_after_the_change_the_servers_tell_and_answers_do_not_yet() -> None:
    """The story that all this is for."""
    change = mark(NOW_MS - 3 * MINUTE_MS)
    history = minutes(
        change.at_ms - 10 * MINUTE_MS,
        change.at_ms,
        tokens_per_s=5_360,
        running=32,
        rate=1.7,
        each=3_150,
    ) | minutes(change.at_ms, NOW_MS, tokens_per_s=9_400, running=63, rate=1.7, each=1_974)
    answer_s = 9 * 60.0

    (told,) = with_effects([change], history=history, now_ms=NOW_MS, answer_s=answer_s)

    assert told["before"]["server_tokens_per_sec"] == pytest.approx(5_360)
    assert told["before"]["rate_per_sec"] == pytest.approx(1.7)
    assert told["after"]["server_tokens_per_sec"] == pytest.approx(9_400)
    assert (told["before"]["running_per_group"], told["after"]["running_per_group"]) == (32, 63)
    assert told["after"]["rate_per_sec"] is None
    assert 7 * 60 <= told["steady_in_sec"] <= 8 * 60
    servers, answers = lines_of(told, mean_tokens=3_150)
    assert "5,360 -> 9,400 tokens/s (+75%), 32 -> 63 running at each" in servers
    assert "1.7/s -> about 2.98/s by the servers' tokens; too early to tell" in answers
    assert answers.endswith("7.0 min")


def test_once_answers_tell_they_are_compared_and_the_ramp_is_left_out() -> None:
    change = mark(NOW_MS - 20 * MINUTE_MS)
    ramp_ms = change.at_ms + 9 * MINUTE_MS
    history = (
        minutes(
            change.at_ms - 10 * MINUTE_MS,
            change.at_ms,
            tokens_per_s=5_360,
            running=32,
            rate=1.7,
            each=3_150,
        )
        | minutes(change.at_ms, ramp_ms, tokens_per_s=9_400, running=63, rate=0.2, each=500)
        | minutes(ramp_ms, NOW_MS, tokens_per_s=9_400, running=63, rate=3.0, each=3_150)
    )

    (told,) = with_effects([change], history=history, now_ms=NOW_MS, answer_s=9 * 60.0)

    assert told["steady_in_sec"] == 0
    assert told["after"]["rate_per_sec"] == pytest.approx(3.0)
    assert list(lines_of(told))[1] == "answers 1.7 -> 3/s (+76%)"


def test_a_mark_that_another_follows_too_soon_says_so() -> None:
    one, other = mark(NOW_MS - 30 * MINUTE_MS), mark(NOW_MS - 28 * MINUTE_MS)
    history = minutes(
        NOW_MS - 60 * MINUTE_MS, NOW_MS, tokens_per_s=100, running=1, rate=1, each=100
    )

    newest, oldest = with_effects([one, other], history=history, now_ms=NOW_MS, answer_s=540.0)

    assert newest["after"]["rate_per_sec"] == pytest.approx(1.0)
    assert (oldest["after"]["rate_per_sec"], oldest["steady_in_sec"]) == (None, None)
    assert "nobody can tell" in list(lines_of(oldest))[1]


def test_several_marks_of_one_change_have_the_figures_of_all_of_it() -> None:
    """Eight servers are drained and restarted one by one, and somebody notes that by hand."""
    begin_ms, end_ms = NOW_MS - 30 * MINUTE_MS, NOW_MS - 12 * MINUTE_MS
    every = [
        mark(begin_ms, id="1", kind="servers"),
        mark(begin_ms + 1_000, end_ms - 60_000, id="2", kind="drained"),
        mark(begin_ms + 60_000, end_ms, id="3"),
        mark(end_ms + 20_000, id="4", kind="hand", detail="all on no_buffer"),
    ]
    history = minutes(
        NOW_MS - 60 * MINUTE_MS, begin_ms, tokens_per_s=5_360, running=32, rate=1.7, each=3_150
    ) | minutes(begin_ms, NOW_MS, tokens_per_s=9_400, running=63, rate=3.0, each=3_150)

    told = with_effects(every, history=history, now_ms=NOW_MS, answer_s=60.0)

    for one in told[:COMPARED]:
        assert one["before"]["server_tokens_per_sec"] == pytest.approx(5_360)
        assert one["after"]["server_tokens_per_sec"] == pytest.approx(9_400)
        assert one["after"]["rate_per_sec"] == pytest.approx(3.0)
    # On a page they are told once.
    shown = Console(file=io.StringIO(), width=120)
    shown.print(of_marks(told, width=120))
    assert shown.file.getvalue().count("tokens/s") == 1  # type: ignore[attr-defined]


def test_a_count_of_worker_groups_alone_says_nothing_of_servers() -> None:
    told = {
        "before": {"worker_groups": 0, "rate_per_sec": 0.5},
        "after": None,
        "steady_in_sec": 76.0,
    }

    (line,) = lines_of(told)

    assert line.startswith("answers 0.5/s -> too early to tell")


def test_where_nothing_is_known_nothing_is_said() -> None:
    (told,) = with_effects([mark(NOW_MS)], history={}, now_ms=NOW_MS, answer_s=None)

    assert (told["before"], told["after"], told["steady_in_sec"]) == (None, None, None)
    assert list(lines_of(told)) == []


def test_servers_that_count_no_tokens_have_not_told_that_there_are_none() -> None:
    change = mark(NOW_MS - 4 * MINUTE_MS)
    history = minutes(NOW_MS - 10 * MINUTE_MS, NOW_MS, tokens_per_s=0, running=5, rate=1, each=10)

    effect = effect_of(change, [change], history=history, now_ms=NOW_MS, answer_s=60.0)

    assert effect.before is not None
    assert effect.before.server_tokens_per_sec is None
    assert effect.before.running_per_group == 5


def test_a_standstill_on_a_side_is_a_rate_of_nothing() -> None:
    change = mark(NOW_MS - 10 * MINUTE_MS)
    silent = {NOW_MS // BUCKET_MS - 19: Bucket(ready_ms=BUCKET_MS)}
    history = silent | minutes(
        change.at_ms - 5 * MINUTE_MS, change.at_ms, tokens_per_s=10, running=1, rate=1, each=10
    )

    effect = effect_of(change, [change], history=history, now_ms=NOW_MS, answer_s=None)

    assert effect.after is not None
    assert effect.after.server_tokens_per_sec == 0
    assert effect.after.rate_per_sec == 0


ages_ms = st.integers(0, 8 * 3_600_000)


@given(
    ages=st.lists(st.tuples(ages_ms, st.integers(0, 3_600_000)), min_size=1, max_size=12),
    answer_s=st.none() | st.floats(0, 1e5),
    counts=st.lists(st.integers(0, 10**6), min_size=5, max_size=5),
)
def test_no_window_reaches_over_another_mark_and_no_figure_is_odd(
    ages: list[tuple[int, int]], answer_s: float | None, counts: list[int]
) -> None:
    every = sorted(
        (
            mark(NOW_MS - age, NOW_MS - max(age - lasts, 0), id=f"{number:02d}")
            for number, (age, lasts) in enumerate(ages)
        ),
        key=lambda each: each.at_ms,
    )
    wanted = buckets_of(every, now_ms=NOW_MS, answer_s=answer_s)
    history = {bucket: Bucket(*counts) for bucket in wanted[::2]}

    told = with_effects(every, history=history, now_ms=NOW_MS, answer_s=answer_s)

    # What is asked of Redis is bounded, whatever is marked.
    assert len(wanted) <= COMPARED * 3 * SIDE_MS // BUCKET_MS
    assert len(told) == min(len(every), SHOWN)
    for one in every[-COMPARED:]:
        before, servers, clients = spans_of(one, every, now_ms=NOW_MS, answer_s=answer_s)
        for span in (before, servers, clients):
            assert 0 <= span.ms <= SIDE_MS
        assert servers.first * BUCKET_MS >= one.until_ms + FILL_MS
        # Nothing happened in any of them but at their ends.
        for span in (before, servers, clients):
            for other in every:
                assert (
                    not span.ms
                    or other.until_ms <= span.first * BUCKET_MS
                    or other.at_ms >= span.end * BUCKET_MS
                )
    for each in told:
        steady_s = each["steady_in_sec"]
        assert steady_s is None or 0 <= steady_s <= (answer_s or 0) + (FILL_MS + LEAST_MS) / 500
        for side in (each["before"], each["after"]):
            assert side is None or all(value is None or value >= 0 for value in side.values())
        assert all("nan" not in line and "inf" not in line for line in lines_of(each))


def test_what_redis_holds_of_half_a_minute_is_read_whatever_stands_there() -> None:
    assert Bucket.read(b"1,2,3,4,5") == Bucket(1, 2, 3, 4, 5)
    assert Bucket.read(b"1,2,3,4,5,6") == Bucket(1, 2, 3, 4, 5)
    assert Bucket.read(b"x,-1," + b"9" * 5_000) == Bucket()


# --- What somebody types -------------------------------------------------------------------------

HERE = datetime(2026, 11, 30, 14, 30, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        (None, HERE),
        ("14:02", HERE.replace(minute=2)),
        ("14:02:05", HERE.replace(minute=2, second=5)),
        # Just after midnight people mark what was before.
        ("23:50", HERE.replace(hour=23, minute=50) - timedelta(days=1)),
        ("10m", HERE - timedelta(minutes=10)),
        ("-10 min", HERE - timedelta(minutes=10)),
        ("1.5h ago", HERE - timedelta(hours=1.5)),
        ("2026-11-30T14:02:05+01:00", datetime(2026, 11, 30, 13, 2, 5, tzinfo=UTC)),
        ("2026-11-29 10:00", datetime(2026, 11, 29, 10, 0, tzinfo=UTC)),
    ],
)
def test_an_instant_is_read_as_people_write_it(text: str | None, at: datetime) -> None:
    assert instant_ms(text, HERE) == round(at.timestamp() * 1000)


@pytest.mark.parametrize("text", ["", "soon", "25:00", "2026-13-01", "2026-11-30T15:02", "1e9d"])
def test_what_is_no_instant_or_has_not_come_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--at"):
        instant_ms(text, HERE)


@given(st.text(max_size=40))
def test_any_text_is_an_instant_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert instant_ms(text, HERE) >= 0


def test_a_text_is_kept_on_one_line_and_a_long_one_refused() -> None:
    assert checked_text("  no_buffer\n on ") == "no_buffer on"
    for odd in ("", " \n", "x" * 201):
        with pytest.raises(UsageError, match="1 to 200"):
            checked_text(odd)
