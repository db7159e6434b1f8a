"""What is told of a run's changes, and what is not."""

from typing import Any

import pytest

from common.news import GONE_S, LEAST_GAP_S, State, message, next_event, state_of

LATER_MS = round(LEAST_GAP_S * 1000)


def group(name: str = "gpu0@h", state: str = "ready", unready_s: float = 0.0) -> dict[str, Any]:
    return {"group": name, "state": state, "unready_s": unready_s, "detail": f"{name} is {state}"}


def figures(status: str = "running", *groups: dict[str, Any], **own: Any) -> dict[str, Any]:
    values = {
        **dict.fromkeys(("total", "completed", "failed", "cancelled", "in_flight", "queued"), 5),
        "run": "r",
        "output": "out",
        "updated_at": "2026-01-01T00:00:00+00:00",
        "rate_per_sec": 1.0,
        "eta_hours": None,
        "warnings": ["first warning", "second"],
    }
    return {**values, "status": status, "worker_groups": list(groups), **own}


@pytest.mark.parametrize(
    "status",
    [
        *("stalled", "paused", "redis_full", "s3_error", "wrong_model", "state_lost"),
        *("completed", "completed_with_failures", "failed", "cancelled"),
    ],
)
def test_what_somebody_must_know_is_an_event(status: str) -> None:
    assert state_of(figures(status)).event == status


@pytest.mark.parametrize("status", ["open", "queued", "ramping", "running", "waiting_for_server"])
def test_what_goes_by_itself_is_none(status: str) -> None:
    waiting = group(state="waiting", unready_s=900)  # a server that loads its model
    assert state_of(figures(status, waiting)) == State()


def test_a_server_that_is_gone_is_named_though_others_go_on() -> None:
    groups = [
        group("gpu2@h", "down", GONE_S),
        group("gpu1@h", "faulty", GONE_S + 1),
        group("gpu3@h", "down", GONE_S - 1),
        group("gpu0@h"),
    ]

    now = state_of(figures("running", *groups))
    told = message("server_gone", now, figures("running", *groups))

    assert now == State(event="server_gone", groups=("gpu1@h", "gpu2@h"))
    assert told["groups"] == ["gpu1@h", "gpu2@h"]
    assert "gpu1@h is faulty; " in told["text"] or "gpu2@h is down; " in told["text"]


def test_workers_that_are_missing_are_news_once_there_were_some() -> None:
    before = figures("waiting_for_workers", completed=0, failed=0)

    assert state_of(before) == State()
    assert state_of(figures("waiting_for_workers")).event == "waiting_for_workers"


def told(event: str, *groups: str, at_ms: int = 0) -> State:
    return State(event=event, groups=groups, at_ms=at_ms)


@pytest.mark.parametrize(
    ("before", "now", "event"),
    [
        (None, told(""), ""),
        (None, told("stalled"), "stalled"),
        (told(""), told(""), None),
        (told(""), told("paused"), "paused"),
        (told("paused"), told("paused"), None),
        (told("paused"), told("stalled"), "stalled"),
        (told("paused"), told(""), "recovered"),
        (told("completed"), told(""), ""),
        (told("completed"), told("completed"), None),
        (told(""), told("completed"), "completed"),
        (told("server_gone", "a", "b"), told("server_gone", "a"), None),
        (told("server_gone", "a"), told("server_gone", "a", "b"), "server_gone"),
    ],
)
def test_a_change_is_told_once(before: State | None, now: State, event: str | None) -> None:
    assert next_event(before, now, first_look=False, now_ms=LATER_MS) == event


def test_what_changes_to_and_fro_is_told_once_a_minute_and_an_end_at_once() -> None:
    before = told("paused", at_ms=1)

    assert next_event(before, told(""), first_look=False, now_ms=LATER_MS) is None
    assert next_event(before, told(""), first_look=False, now_ms=LATER_MS + 1) == "recovered"
    assert next_event(before, told("failed"), first_look=False, now_ms=2) == "failed"


def test_who_begins_to_look_at_a_run_that_was_over_does_not_tell_of_it() -> None:
    assert next_event(None, told("completed"), first_look=True, now_ms=1) == ""
    assert next_event(None, told("completed"), first_look=False, now_ms=1) == "completed"


def test_a_message_says_what_how_far_and_why() -> None:
    text = message("stalled", told("stalled"), figures("stalled"))["text"]

    assert text == "run r: stalled, 5 of 5 completed, 5 failed: first warning"
