"""Conversations generated turn by turn, while worker group, server and Redis are killed.

A turn that is finished is not generated again: judged by what the servers saw.
"""

import os
import signal
from pathlib import Path
from typing import Any, cast

import pytest

from common import names
from tests.support.conversations import answers_its_own_turns, redone_turns, write_conversations
from tests.support.fleet import Fleet
from tests.support.server_process import wait_until

RUN = "chats"
TURNS = 4
BOUND = 8


def kept_turns(fleet: Fleet) -> int:
    """Turns that Redis keeps of unfinished conversations."""
    leased = cast("list[bytes]", fleet.client.zrange(names.leases(RUN), 0, -1))
    listed = cast("list[bytes]", fleet.client.lrange(names.rq_queue(RUN), 0, -1))
    with fleet.client.pipeline() as pipe:
        for job_id in {*leased, *listed}:
            pipe.hget(names.rq_job(job_id.decode()), "turns")
        return sum((turns or b"").count(b"\n") for turns in pipe.execute())


def finished_turns(fleet: Fleet) -> int:
    return fleet.counts(RUN).completed * TURNS + kept_turns(fleet)


def asked_turns(fleet: Fleet) -> int:
    """Turns that the servers were asked for, each counted once: finished, open, or not yet kept.

    With the worker group frozen, these less the finished ones are what its kill costs. They may be
    more than its slots: a slot goes on while the result of its last prompt is under way to Redis.
    """
    for _ in range(3):
        fleet.simulator.states()  # what was sent before it has been read, and its line written
    served = fleet.served()
    return len({each.digest for each in served if not each.rid.startswith("headrace-probe")})


def start(fleet: Fleet, conversations: int, *flags: str) -> None:
    file = write_conversations(fleet.folder / f"{RUN}.jsonl", conversations, turns=TURNS)
    fleet.enqueue(file, "--turns", "all", *flags)
    fleet.start_sink("sink", "--batch-seconds", "1", "--first-batch-seconds", "1")
    fleet.start_group(0, "--concurrency", str(BOUND))


def judged(fleet: Fleet, conversations: int) -> int:
    """Wait for the end and judge all but the redone turns, which are given back."""
    fleet.wait(lambda: fleet.has_ended(RUN), "the run to end", 120)
    counts = fleet.counts(RUN)
    assert (counts.total, counts.completed, counts.failed) == (conversations, conversations, 0)
    fleet.verify(RUN, "--input", str(fleet.folder / f"{RUN}.jsonl"), "--turns", "all")
    rows = cast("list[dict[str, Any]]", fleet.rows())
    assert sorted(str(row["id"]) for row in rows) == sorted(f"c{i}" for i in range(conversations))
    assert all(len(row["turns"]) == TURNS for row in rows)
    assert all(answers_its_own_turns(row) for row in rows)
    assert fleet.max_open() <= BOUND + 1, "a probe beside a full server is the only one more"
    return redone_turns(fleet, rows)


def test_every_turn_is_generated_once_on_those_before_it(tmp_path: Path) -> None:
    with Fleet(tmp_path, latency="0.01", cap=BOUND) as fleet:
        start(fleet, 30)

        assert judged(fleet, 30) == 0

        rows = cast("list[dict[str, Any]]", fleet.rows())
        assert not any("old answer" in str(row["messages"]) for row in rows)
        assert all(row["usage"]["completion_tokens"] == tokens(row) for row in rows)
        assert fleet.counts(RUN).output_tokens == sum(tokens(row) for row in rows)
        exported = tmp_path / "chats.out.jsonl"
        fleet.producer("export", RUN, "--to", str(exported))
        assert len(exported.read_text().splitlines()) == 30


def tokens(row: dict[str, Any]) -> int:
    return sum(int(turn["usage"]["completion_tokens"]) for turn in row["turns"])


@pytest.mark.timeout(400)
def test_kills_of_the_worker_group_cost_the_turns_that_were_open(tmp_path: Path) -> None:
    with Fleet(tmp_path, latency="lognormal:0.08:0.8", cap=BOUND) as fleet:
        start(fleet, 80)
        at_risk = 0
        for kill in range(1, 7):
            fleet.wait(lambda: finished_turns(fleet) >= 40 * kill, f"turns before kill {kill}")  # noqa: B023
            group = fleet.processes["gpu0"]
            group.send(signal.SIGSTOP)
            at_risk += asked_turns(fleet) - finished_turns(fleet)
            group.kill()
            fleet.start_group(0, "--concurrency", str(BOUND))

        redone = judged(fleet, 80)

        assert 0 < redone <= at_risk


@pytest.mark.timeout(400)
def test_a_kill_in_the_fourth_turn_repeats_that_turn_alone(tmp_path: Path) -> None:
    with Fleet(tmp_path, latency="fixed:0.4", cap=1) as fleet:
        start(fleet, 1)
        fleet.wait(lambda: kept_turns(fleet) == 3, "three turns to be kept")
        fleet.wait(lambda: len(fleet.served()) - fleet.probes() == 4, "the fourth to be open")
        fleet.processes["gpu0"].kill()
        fleet.start_group(0, "--concurrency", str(BOUND))

        assert judged(fleet, 1) == 1


@pytest.mark.timeout(400)
def test_a_server_that_dies_costs_the_turns_that_were_open(tmp_path: Path) -> None:
    with Fleet(tmp_path, latency="lognormal:0.08:0.8", cap=BOUND) as fleet:
        start(fleet, 60)
        for death in (1, 2):
            fleet.wait(lambda: finished_turns(fleet) >= 60 * death, f"turns before death {death}")  # noqa: B023
            fleet.simulator.kill()
            fleet.simulator.restart()

        redone = judged(fleet, 60)

        assert 0 < redone <= 2 * BOUND
        assert fleet.counts(RUN).retries == 0, "a server's death costs no prompt an attempt"


@pytest.mark.timeout(400)
def test_a_stop_ends_the_open_turns_and_no_conversation(tmp_path: Path) -> None:
    with Fleet(tmp_path, latency="fixed:0.3", cap=BOUND) as fleet:
        start(fleet, 40)
        for stop in (1, 2):
            fleet.wait(lambda: finished_turns(fleet) >= 40 * stop, f"turns before stop {stop}")  # noqa: B023
            group = fleet.processes.pop("gpu0")
            os.kill(group.pid, signal.SIGTERM)
            wait_until(lambda: not group.alive(), "the worker group to stop", 20)  # noqa: B023
            assert fleet.in_flight(RUN) == 0
            assert kept_turns(fleet) > 0, "conversations went back between two turns"
            fleet.start_group(0, "--concurrency", str(BOUND))

        assert judged(fleet, 40) == 0


@pytest.mark.timeout(400)
def test_a_redis_that_is_killed_and_comes_back_costs_no_turn(tmp_path: Path) -> None:
    with Fleet(tmp_path, latency="fixed:0.1", cap=BOUND) as fleet:
        start(fleet, 60)
        fleet.wait(lambda: kept_turns(fleet) >= BOUND, "the first turns to be kept")
        seen = len(fleet.served())
        fleet.redis.kill()
        # Two more turns of each begin and end meanwhile, and wait in the worker group.
        wait_until(lambda: len(fleet.served()) >= seen + BOUND, "turns without Redis")
        fleet.redis.start()
        fleet.wait(lambda: finished_turns(fleet) >= 100, "turns before the second outage")
        fleet.redis.kill()
        fleet.redis.start()

        assert judged(fleet, 60) == 0


@pytest.mark.timeout(400)
def test_a_conversation_goes_on_at_another_server(tmp_path: Path) -> None:
    with Fleet(tmp_path, servers=2, latency="fixed:0.3", cap=BOUND) as fleet:
        start(fleet, 24)
        fleet.wait(lambda: kept_turns(fleet) >= BOUND, "the first turns to be kept")
        group = fleet.processes.pop("gpu0")
        os.kill(group.pid, signal.SIGTERM)
        wait_until(lambda: not group.alive(), "the worker group to stop", 20)
        fleet.start_group(1, "--concurrency", str(BOUND))

        assert judged(fleet, 24) == 0

        rows = cast("list[dict[str, Any]]", fleet.rows())
        servers = [{turn["server"] for turn in row["turns"]} for row in rows]
        assert set(fleet.simulator.urls) in servers


@pytest.mark.timeout(400)
def test_a_wipe_of_redis_costs_no_more_than_what_was_not_stored(tmp_path: Path) -> None:
    with Fleet(tmp_path, latency="fixed:0.3", cap=BOUND) as fleet:
        start(fleet, 40)
        fleet.wait(lambda: finished_turns(fleet) >= 50, "turns before the wipe")
        group = fleet.processes["gpu0"]
        group.send(signal.SIGSTOP)
        not_stored = finished_turns(fleet) - len(fleet.rows()) * TURNS
        fleet.redis.wipe()
        group.send(signal.SIGCONT)
        fleet.producer("resume", RUN, "--output", fleet.output)

        redone = judged(fleet, 40)

        assert redone <= not_stored + BOUND


@pytest.mark.timeout(400)
def test_each_turn_has_its_token_ids_where_the_run_keeps_them(tmp_path: Path) -> None:
    with Fleet(tmp_path, latency="0.01", cap=BOUND) as fleet:
        start(fleet, 5, "--keep-token-ids")

        assert judged(fleet, 5) == 0

        for row in cast("list[dict[str, Any]]", fleet.rows()):
            for answer, turn in zip(
                [*row["turns"][:-1], *row["choices"]], row["turns"], strict=True
            ):
                asked, made = (
                    turn["usage"][f"{what}_tokens"] for what in ("prompt", "completion")
                )
                assert answer["loss_mask"] == [0] * asked + [1] * made
                assert len(answer["token_ids"]) == asked + made


@pytest.mark.timeout(400)
def test_a_worker_group_that_freezes_leaves_its_conversations_to_another(tmp_path: Path) -> None:
    short = '{"lease_s": 3, "leases_every_s": 0.5, "reap_every_s": 0.5, "slots_every_s": 0.5}'
    env = {"HEADRACE_TIMING": short}
    with Fleet(tmp_path, servers=2, latency="fixed:0.2", cap=BOUND, env=env) as fleet:
        start(fleet, 30)
        fleet.start_group(1, "--concurrency", str(BOUND))
        fleet.wait(lambda: finished_turns(fleet) >= 30, "turns before the frost")
        frozen = fleet.processes["gpu0"]
        frozen.send(signal.SIGSTOP)
        held = fleet.in_flight(RUN)
        fleet.wait(lambda: fleet.in_flight(RUN) <= BOUND + 2, "the other one to take them", 30)
        seen = len(fleet.served())
        fleet.wait(lambda: len(fleet.served()) >= seen + BOUND, "turns of the other one")
        frozen.send(signal.SIGCONT)

        redone = judged(fleet, 30)

        # Each of the frozen one's open turns once more, and perhaps what it opens before it knows.
        assert redone <= held + BOUND
