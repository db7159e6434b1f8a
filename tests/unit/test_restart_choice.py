"""Which servers a restart touches, what it refuses, and what it finds done already."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from common.errors import BackendError, UsageError
from workers.lives import process_start
from workers.node.restart.choice import (
    Asked,
    Outcome,
    choose,
    has_already,
    is_ordered,
    refuse_impossible,
)
from workers.node.restart.rolling import roll
from workers.node.restart.view import summary
from workers.supervisor.records import Process, ServerRecord, Wanted

HERE = Process(os.getpid(), process_start(os.getpid()))


def server(gpu: int = 0, **fields: Any) -> ServerRecord:
    fields = {
        "gpus": (gpu,),
        "supervisor": HERE,
        "state": "ready",
        "strategy": "extra_buffer",
        "version": "0.5.23",
        "cap": 32,
        "flags": "f",
        **fields,
    }
    return ServerRecord(name=f"gpu{gpu}@a", url=f"http://127.0.0.1:{gpu}", port=gpu, **fields)


def order(**fields: Any) -> Wanted:
    return Wanted(**{"serial": 1, "asked_at": 0.0, "over": "f", **fields})


# --- which, and whether it can be ----------------------------------------------------------------


def test_all_servers_here_are_meant_or_those_of_the_gpus() -> None:
    records = [server(0), server(1), server(2, gpus=(2, 3))]

    assert choose(records, None) == records
    assert [each.name for each in choose(records, [1, 3])] == ["gpu1@a", "gpu2@a"]


@pytest.mark.parametrize(
    ("records", "gpus", "says"),
    [
        ([], None, "workers serve"),
        ([], [0], "attached are restarted by whoever runs them"),
        ([server(0)], [0, 7], r"no server of ours runs on GPU 7 .* there are gpu0@a"),
    ],
)
def test_what_is_not_ours_is_said(records: list[Any], gpus: list[int] | None, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        choose(records, gpus)


@pytest.mark.parametrize(
    ("fields", "strategy", "says"),
    [
        ({"version": "0.5.12.post1"}, "extra_buffer_lazy", "SGLang 0.5.12.post1 of gpu0@a does"),
        ({"strategy": ""}, "no_buffer", "the model of gpu0@a has none"),
    ],
)
def test_a_strategy_that_cannot_be_is_refused_before_anything_is_touched(
    fields: dict[str, Any], strategy: str, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        refuse_impossible([server(**fields)], Asked(strategy=strategy))


@pytest.mark.parametrize("strategy", [None, "best", "auto", "no_buffer", "no_radix"])
def test_a_strategy_that_can_be_is_not(strategy: str | None) -> None:
    refuse_impossible([server(version="0.5.12.post1")], Asked(strategy=strategy))


def test_no_radix_is_for_every_model() -> None:
    refuse_impossible([server(strategy="")], Asked(strategy="no_radix"))


def test_a_server_that_nobody_watches_is_told() -> None:
    dead = Process(HERE.pid, "long ago")

    with pytest.raises(BackendError, match=r"gpu1@a: its supervisor .* is gone"):
        refuse_impossible([server(0), server(1, supervisor=dead)], Asked())


# --- done, or on its way -------------------------------------------------------------------------

NO_BUFFER = Asked(strategy="no_buffer")


@pytest.mark.parametrize(
    ("record", "standing", "asked", "done"),
    [
        (server(strategy="no_buffer"), None, NO_BUFFER, True),
        (server(strategy="extra_buffer"), None, NO_BUFFER, False),
        (server(strategy="no_buffer"), None, Asked(strategy="no_buffer", force=True), False),
        (server(strategy="no_buffer"), None, Asked(), False),
        (server(strategy="no_buffer", state="starting"), None, NO_BUFFER, False),
        # `best` came to something else by name, and was carried out.
        (server(serial=1), order(strategy="best"), Asked(strategy="best"), True),
        (server(serial=1), order(strategy="best", over="other"), Asked(strategy="best"), False),
        # An order that has not been looked at, or was refused.
        (server(strategy="no_buffer"), order(strategy="extra_buffer"), NO_BUFFER, False),
        (server(serial=1, refused="no"), order(strategy="best"), Asked(strategy="best"), False),
        # Flags.
        (server(serial=1), order(arguments=("--a",)), Asked(arguments=("--a",)), True),
        (server(serial=1), order(arguments=("--a",)), Asked(arguments=("--b",)), False),
        (server(serial=1), None, Asked(arguments=("--a",)), False),
        (
            server(serial=1),
            order(arguments=("--a",)),
            Asked(strategy="no_buffer", arguments=("--a",)),
            False,
        ),
    ],
)
def test_what_runs_by_it_already_is_left_alone(
    record: ServerRecord, standing: Wanted | None, asked: Asked, *, done: bool
) -> None:
    assert has_already(record, standing, asked) is done


@pytest.mark.parametrize(
    ("record", "standing", "ordered"),
    [
        (server(serial=0), order(strategy="no_buffer"), True),
        (server(serial=1, state="starting"), order(strategy="no_buffer"), True),
        (server(serial=1), order(strategy="no_buffer"), False),
        (server(serial=1, state="starting", refused="no"), order(strategy="no_buffer"), False),
        (server(serial=0), order(strategy="extra_buffer"), False),
        (server(serial=0), order(strategy="no_buffer", over="other"), False),
        (server(serial=0), None, False),
    ],
)
def test_an_order_that_is_on_its_way_is_not_given_again(
    record: ServerRecord, standing: Wanted | None, *, ordered: bool
) -> None:
    assert is_ordered(record, standing, NO_BUFFER) is ordered


# --- one after the other -------------------------------------------------------------------------


def outcome(record: ServerRecord, state: Any = "restarted") -> Outcome:
    return Outcome(name=record.name, state=state, detail=f"{record.name} {state}")


def rolled(
    records: list[ServerRecord], restart: Callable[[ServerRecord], Outcome], at_once: int = 1
) -> list[Outcome]:
    return roll(records, restart, at_once=at_once, stop=threading.Event(), look=lambda: None)


@pytest.mark.parametrize("at_once", [1, 3])
def test_so_many_are_away_at_a_time_and_no_more(at_once: int) -> None:
    lock, away, most = threading.Lock(), 0, 0

    def restart(record: ServerRecord) -> Outcome:
        nonlocal away, most
        with lock:
            away += 1
            most = max(most, away)
        deadline_s = time.monotonic() + 60
        while most < at_once and time.monotonic() < deadline_s:
            time.sleep(0.001)
        with lock:
            away -= 1
        return outcome(record)

    done = rolled([server(gpu) for gpu in range(6)], restart, at_once)

    assert most == at_once
    assert [each.name for each in done] == [f"gpu{gpu}@a" for gpu in range(6)]


def test_when_one_has_gone_wrong_no_other_is_begun() -> None:
    begun: list[str] = []

    def restart(record: ServerRecord) -> Outcome:
        begun.append(record.name)
        return outcome(record, "failed" if record.name == "gpu1@a" else "restarted")

    done = rolled([server(gpu) for gpu in range(4)], restart)

    assert begun == ["gpu0@a", "gpu1@a"]
    assert [each.state for each in done] == ["restarted", "failed", "not begun", "not begun"]
    assert summary(done)[-1] == "gpu1@a failed"
    assert "left as they are: gpu2@a, gpu3@a" in summary(done)


def test_an_interruption_reaches_those_that_are_at_work() -> None:
    stop, at_work = threading.Event(), threading.Event()

    def restart(record: ServerRecord) -> Outcome:
        at_work.set()
        assert stop.wait(60)
        return outcome(record, "stopped")

    def look() -> None:
        if at_work.is_set():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        roll([server()], restart, at_once=1, stop=stop, look=look)
    assert stop.is_set()
