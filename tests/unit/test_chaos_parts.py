"""The chaos runner: its schedule is the seed's alone, its account finds what is planted."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from common.crashpoints import POINTS
from tests.chaos import judging, points, report
from tests.chaos.schedule import KINDS, steps
from tests.chaos.serverlog import ServerLog
from workers.simulator.hashing import request_hash
from workers.simulator.log import Served


def served(digest: str, begin: float, end: float | None, *, epoch: str = "a") -> Served:
    return Served(30000, f"{epoch}-00001-0", digest, begin, end)


def test_a_seed_gives_the_same_schedule_for_ever() -> None:
    first, again, other = (list(itertools.islice(steps(seed), 300)) for seed in (7, 7, 8))

    assert first == again != other
    actions = [action for step in first for action in step.actions]
    assert {action.kind for action in actions} == set(KINDS)
    assert any(action.arm is not None for action in actions)
    assert len({action.how for action in actions}) == 7


def test_a_calm_schedule_kills_the_kinds_in_turn() -> None:
    calm = list(itertools.islice(steps(7, kills_only=True), 10))

    assert [step.actions[0].kind for step in calm] == [*KINDS, *KINDS]
    assert {(len(step.actions), step.actions[0].how) for step in calm} == {(1, "kill")}


def test_every_crash_point_that_a_kind_may_come_to_is_picked() -> None:
    assert {"sink.intent", "sink.shards", "sink.manifest"} <= set(points.points_of("sink"))
    assert {"enqueue.inputs", "enqueue.sealed"} <= set(points.points_of("producer"))
    assert {"claim.leased", "finish.recorded"} <= set(points.points_of("group"))
    assert "sink.intent" not in points.points_of("group")
    assert points.points_of("server") == points.points_of("redis") == ()
    # Of commands that a round does not call.
    left = {"retry", "pause", "priority", "resume", "cancel", "forget", "mark"}
    left |= {"server", "drain", "restart"}
    known = {
        word
        for words in (points.OWN, points.NOW_AND_THEN)
        for own in words.values()
        for word in own
    }
    assert {point.partition(".")[0] for point in POINTS} <= known | left


def test_a_request_that_no_death_explains_is_found() -> None:
    seen = [served("x", 1, 2), served("x", 3, 4), served("y", 1, 2), served("y", 3, 4)]
    keys = {"k1": "x", "k2": "y"}

    explained = judging.count_redone(
        seen, [(frozenset({"k1"}), frozenset()), (frozenset(), frozenset({"y"}))], keys
    )
    half = judging.count_redone(seen, [(frozenset({"k1"}), frozenset())] * 5, keys)

    assert (explained.requests, explained.at_risk, explained.unexplained) == (2, 2, {})
    # One prompt's risks do not pay for another's.
    assert half.unexplained == {"y": 1}


def test_requests_of_a_dead_process_are_not_held_open_by_anybody() -> None:
    seen = [served("x", 1, 9), served("y", 4, 6, epoch="b"), served("z", 5, None, epoch="b")]

    assert judging.most_open(seen, {}) == 3
    assert judging.most_open(seen, {"a": 3.0}) == 2
    assert judging.most_open([served("x", 1, 2), served("y", 2, 3)], {}) == 1


def row(number: int, *, answer_of: int | None = None) -> dict[str, Any]:
    asked = [{"role": "user", "content": f"say {number}"}]
    of = number if answer_of is None else answer_of
    body = {"messages": [{"role": "user", "content": f"say {of}"}], "stream": False}
    said = {"role": "assistant", "content": f"sim:{request_hash(body)} said"}
    return {"id": f"p{number}", "key": f"k{number}", "params": {}, "messages": [*asked, said]}


def test_lost_doubled_and_swapped_rows_are_found() -> None:
    good = [row(1), row(2)]

    assert judging.wrong_rows(good, {"p1", "p2"}) == []
    assert judging.wrong_rows(good, {"p1", "p2", "p3"}) == ["id p3 has no completion"]
    assert judging.wrong_rows(good, {"p1"}) == ["id p2 was never asked for"]
    assert judging.wrong_rows([*good, row(2)], {"p1", "p2"}) == ["key k2 has 2 completions"]
    assert judging.wrong_rows([row(1), row(2, answer_of=1)], {"p1", "p2"}) == [
        "id p2 has the answer of another prompt"
    ]


@pytest.mark.parametrize("cut", [0, 20])
def test_a_server_log_is_read_while_it_is_written(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "log"
    log = ServerLog(path)
    log.read()
    begin = b'{"e":"begin","port":1,"rid":"a-1","hash":"%s","n":%d,"t":1.5,"open":1}\n'
    text = b'{"e":"start","port":1,"pid":7,"t":1.0,"cap":4}\n' + begin % (b"x", 1)
    text += begin.replace(b"a-1", b"headrace-probe-1") % (b"p", 2) + begin % (b"y", 3)
    text += b'{"e":"end","port":1,"rid":"a-1","hash":"x","n":1,"t":2.5,"outcome":"stop"}\n'
    path.write_bytes(text[: len(text) - cut])
    log.read()
    with path.open("ab") as file:
        file.write(text[len(text) - cut :])

    assert log.at_risk(3.0) == {"y"}
    assert log.at_risk(2.0) == {"x", "y"}
    with path.open("ab") as file:
        file.write(b'{"e":"start","port":1,"pid":8,"t":4.0,"cap":4}\n')
    assert log.at_risk(5.0) == frozenset()
    assert [(each.digest, each.end) for each in log.served] == [("x", 2.5), ("y", 4.0)]


def test_campaigns_add_up(tmp_path: Path) -> None:
    kills = [
        report.Kill("sink", "random", "sink.intent", 3),
        report.Kill("redis", "random", "r", 1),
    ]
    good = report.Round(
        seed=1, command="c", fsync="always", store="s3", prompts=5, kills=kills, verified=True
    )
    bad = report.Round(
        seed=2, command="c", fsync="always", store="s3", prompts=5, kills=kills, wrong=["no"]
    )
    report.write(tmp_path / "r.json", [good])
    report.write(tmp_path / "r.json", [*report.read(tmp_path / "r.json"), bad])

    text = report.text_of(report.read(tmp_path / "r.json"))

    assert "| sink | sink.intent | 6 | 0 |" in text
    assert "| **redis** | **2** | **2** | **0** |" in text
    assert "8 kills in 2 rounds of 10 prompts together; 1 rounds verified" in text
