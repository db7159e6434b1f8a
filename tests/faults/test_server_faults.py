"""What a server does wrong, and what becomes of the prompts: each row of protocol.md §4.

Real processes throughout: enqueue, worker group, sink, and a simulated server told to fail. What
the server had is judged by its own log.
"""

import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
import pytest

from common import names
from common.models import Counts
from tests.support.fleet import Fleet, write_prompts
from tests.support.scripted_server import Reply, answer, scripted_server
from tests.support.server_process import wait_until
from tests.support.watching import (
    QUICK_SINK,
    exit_code,
    figures,
    leased,
    mark_of,
    members,
    of_prompts,
    timed,
    wait_state,
    write_rows,
)
from workers.simulator.log import Served

pytestmark = pytest.mark.timeout(400)

RUN = "job"

# Bad prompts by their mark: the fault that hits them, and what they must end as: reason, status,
# attempts, requests that the server had.
BAD: dict[str, tuple[dict[str, Any], tuple[str, int | None, int, int]]] = {
    "MARK-400": ({"kind": "bad_params"}, ("bad_request", 400, 1, 1)),
    "MARK-413": ({"kind": "status", "status": 413}, ("too_large", 413, 1, 1)),
    "MARK-422": ({"kind": "status", "status": 422}, ("bad_request", 422, 1, 1)),
    "MARK-RAN": ({"kind": "ran"}, ("server_timeout", 503, 3, 3)),
    "MARK-500": ({"kind": "error_500"}, ("server_error", 500, 3, 3)),
    "MARK-OOM": ({"kind": "oom"}, ("server_error", 500, 3, 3)),
    "MARK-ERROR200": ({"kind": "error_200"}, ("bad_response", 200, 3, 3)),
    "MARK-EMPTY200": ({"kind": "empty_200"}, ("bad_response", 200, 3, 3)),
    "MARK-NOCHOICES": ({"kind": "empty_choices"}, ("bad_response", 200, 3, 3)),
    "MARK-HTML": ({"kind": "html_200"}, ("bad_response", 200, 3, 3)),
    "MARK-NAN": ({"kind": "nan"}, ("nan", 200, 3, 3)),
    "MARK-ABORT": ({"kind": "abort"}, ("aborted", 200, 3, 3)),
    "MARK-404": ({"kind": "not_found"}, ("not_found", 404, 3, 3)),
}


def test_each_bad_prompt_fails_by_itself_and_as_often_as_it_may_be_tried(tmp_path: Path) -> None:
    texts = []
    for mark in BAD:
        texts += [f"{mark} say", *(f"good {mark} {i}".replace("MARK", "word") for i in range(6))]
    prompts = write_rows(tmp_path / "job.jsonl", texts)
    with Fleet(tmp_path, latency="0.02", cap=4) as fleet:
        for mark, (fault, _) in BAD.items():
            fleet.simulator.control(**fault, match=mark)
        fleet.enqueue(prompts)
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)

        counts = fleet.wait_done(RUN)

        assert (counts.completed, counts.failed) == (len(texts) - len(BAD), len(BAD))
        failed = {mark_of(row): row for row in fleet.rows("failures")}
        assert failed.keys() == BAD.keys()
        for mark, (_, (reason, status, attempts, _)) in BAD.items():
            row = failed[mark]
            told = (row["reason"], row["status"], row["attempts"])
            assert told == (reason, status, attempts), (mark, row)
        assert "top_p must be in (0, 1]" in str(failed["MARK-400"]["message"])
        per_bad = sum(requests for _, (*_, requests) in BAD.values())
        assert fleet.prompt_requests() == counts.completed + per_bad
        assert success(fleet)["failed"] == len(BAD)


def test_one_refused_row_of_a_hundred_costs_the_others_nothing(tmp_path: Path) -> None:
    # B28.
    texts = [f"say {i}" for i in range(100)]
    texts[49] = "MARK-400 say"
    prompts = write_rows(tmp_path / "job.jsonl", texts)
    with Fleet(tmp_path, latency="0", cap=8) as fleet:
        fleet.simulator.control("bad_params", match="MARK-400")
        fleet.enqueue(prompts)
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)

        counts = fleet.wait_done(RUN)

        assert (counts.completed, counts.failed) == (99, 1)
        [row] = fleet.rows("failures")
        assert (row["id"], row["status"], row["attempts"]) == ("p49", 400, 1)
        assert "top_p must be" in str(row["message"])


def test_a_full_server_is_left_alone_for_as_long_as_it_asks(tmp_path: Path) -> None:
    # B42.
    prompts = write_prompts(tmp_path / "job.jsonl", 60)
    with Fleet(tmp_path, latency="0.01", cap=8) as fleet:
        fleet.simulator.control("queue_full", count=20, retry_after="2", match="say ")
        fleet.enqueue(prompts)
        # Slots are still free when the first refusal comes.
        fleet.start_group(0, "--ramp", "5")
        fleet.start_sink("sink", *QUICK_SINK)

        counts = fleet.wait_done(RUN)

        assert (counts.completed, counts.failed, counts.retries) == (60, 0, 0)
        served = of_prompts(fleet)
        refused = [each for each in served if each.outcome == "queue_full"]
        assert len(refused) == 20
        for one in refused:
            assert one.end is not None
            # What was on its way when the refusal came could not know of it.
            after = [each.begin - one.end for each in served if each.begin > one.end + 0.1]
            assert min(after) >= 2.0


def test_a_refusal_without_a_time_is_waited_for_longer_each_time(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 1)
    with Fleet(tmp_path, latency="0.01", cap=2) as fleet:
        fleet.simulator.control("status", status=429, match="say 0", count=3)
        fleet.enqueue(prompts)
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)

        counts = fleet.wait_done(RUN)

        assert (counts.completed, counts.retries) == (1, 0)
        begins = [each.begin for each in of_prompts(fleet)]
        waits = [later - earlier for earlier, later in pairwise(begins)]
        assert len(waits) == 3
        assert all(least <= wait for least, wait in zip((0.25, 0.5, 1.0), waits, strict=True))


def test_an_answer_that_takes_seven_seconds_is_waited_for(tmp_path: Path) -> None:
    # B32, B62: no hidden limit of a client or of RQ.
    prompts = write_prompts(tmp_path / "job.jsonl", 1)
    with Fleet(tmp_path, latency="fixed:7", cap=2) as fleet:
        fleet.enqueue(prompts)
        group = fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)

        counts = fleet.wait_done(RUN)

        assert (counts.completed, fleet.prompt_requests()) == (1, 1)
        assert "Timeout" not in group.log.read_text()


def test_our_time_limit_costs_exactly_the_attempts_and_each_is_aborted(tmp_path: Path) -> None:
    # B33, B46.
    prompts = write_rows(
        tmp_path / "job.jsonl", ["MARK-SLOW say", *(f"say {i}" for i in range(20))]
    )
    with Fleet(tmp_path, latency="0.05", cap=4, known_rids_only=True) as fleet:
        fleet.simulator.control("no_answer", match="MARK-SLOW")
        fleet.enqueue(prompts, "--request-timeout", "1", "--attempts", "2")
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)

        counts = fleet.wait_done(RUN)

        assert (counts.completed, counts.failed) == (20, 1)
        [row] = fleet.rows("failures")
        assert (row["reason"], row["attempts"], row["status"]) == ("timeout", 2, None)
        assert fleet.prompt_requests() == 22
        assert fleet.simulator.account().outcomes["abort"] == 2
        assert fleet.simulator.state()["open"] == 0


def test_an_answer_of_two_mebibytes_is_kept_whole(tmp_path: Path) -> None:
    # B40.
    prompts = write_prompts(tmp_path / "job.jsonl", 4)
    with Fleet(tmp_path, latency="0.01", cap=4, answer_bytes=2 * 1024 * 1024) as fleet:
        fleet.enqueue(prompts)
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)

        fleet.wait_done(RUN)

        contents = [str(row["choices"][0]["content"]) for row in fleet.rows()]  # type: ignore[index]
        assert [len(content) for content in contents] == [2 * 1024 * 1024] * 4


def test_all_choices_are_kept_and_their_tokens_counted_once(tmp_path: Path) -> None:
    # B49.
    prompts = write_rows(tmp_path / "job.jsonl", ["say it"], n=2)
    with Fleet(tmp_path, latency="0.01", answer_tokens="fixed:40") as fleet:
        fleet.enqueue(prompts)
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)

        counts = fleet.wait_done(RUN)

        [row] = fleet.rows()
        choices: Any = row["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        assert choices[0]["content"] != choices[1]["content"]
        assert counts.output_tokens == row["usage"]["completion_tokens"] == 80  # type: ignore[index]


def test_thinking_that_uses_up_the_budget_is_kept_and_flagged(tmp_path: Path) -> None:
    # B36: the answer never began.
    prompts = write_prompts(tmp_path / "job.jsonl", 1)
    with Fleet(tmp_path, latency="0.01", answer_tokens="fixed:400", reasoning=True) as fleet:
        fleet.enqueue(prompts, "--max-tokens", "20")
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)

        counts = fleet.wait_done(RUN)

        assert (counts.completed, counts.truncated, fleet.prompt_requests()) == (1, 1, 1)
        [row] = fleet.rows()
        assert {"truncated", "reasoning_cut"} <= set(row["flags"])  # type: ignore[call-overload]
        choice: Any = row["choices"][0]  # type: ignore[index]
        assert choice["reasoning_content"]
        assert not choice["content"]


async def test_an_answer_of_no_token_is_never_taken_for_a_good_one(tmp_path: Path) -> None:
    # B30: a server that cuts the prompt to nothing answers 200, empty, `length`, zero tokens.
    prompts = write_rows(tmp_path / "job.jsonl", ["CUT say", *(f"say {i}" for i in range(8))])

    async def step(body: dict[str, Any]) -> Reply:
        if "CUT" in str(body):
            return Reply(body=answer("", finish_reason="length", tokens=0))
        return Reply(body=answer("hi"))

    pages = {"/v1/models": b'{"data":[{"id":"tiny","max_model_len":4096}]}'}
    async with scripted_server(step, pages=pages) as server:
        with Fleet(tmp_path) as fleet:
            counts = await anyio.to_thread.run_sync(run_at, fleet, prompts, server.url)

            assert (counts.completed, counts.failed) == (8, 1)
            [row] = fleet.rows("failures")
            assert (row["reason"], row["status"], row["attempts"]) == ("empty_output", 200, 3)
            assert sum("CUT" in str(body) for body in server.requests) == 3


def run_at(fleet: Fleet, prompts: Path, url: str) -> Counts:
    """Run a file to its end at another server than the fleet's."""
    fleet.enqueue(prompts)
    fleet.spawn("gpu0", "workers", "start", "--gpu", "0", "--server", url)
    fleet.start_sink("sink", *QUICK_SINK)
    return fleet.wait_done(RUN, 30)


def test_twenty_faults_without_a_success_pause_the_run_and_say_why(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 200)
    with Fleet(tmp_path, latency="0", cap=2) as fleet:
        fleet.simulator.control("bad_params", match="say ")
        fleet.enqueue(prompts)
        fleet.start_group()

        fleet.wait(lambda: fleet.runs.state(RUN).paused is not None, "the pause")  # type: ignore[union-attr]
        fleet.wait(lambda: fleet.in_flight(RUN) == 0, "what was in flight to end")

        state = fleet.runs.state(RUN)
        assert state is not None
        assert "faults in a row" in str(state.paused)
        assert "bad_request" in str(state.paused)
        assert 20 <= fleet.counts(RUN).failed <= 40
        assert fleet.counts(RUN).queued >= 160


# --- the server as a whole -----------------------------------------------------------------------


def test_a_server_that_dies_with_everything_in_flight_costs_no_attempt(tmp_path: Path) -> None:
    # B45.
    prompts = write_prompts(tmp_path / "job.jsonl", 120)
    with Fleet(tmp_path, latency="0.4", cap=8) as fleet:
        fleet.enqueue(prompts)
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait(lambda: fleet.counts(RUN).completed >= 24, "24 completions")

        in_flight = fleet.simulator.state()["open"]
        fleet.simulator.control("die", for_s=3, starting_s=1)
        fleet.wait(lambda: fleet.in_flight(RUN) == 0, "what was in flight to go back", 5)
        deaths = [each for each in members(fleet, "deaths") if each]
        counts = fleet.wait_done(RUN)

        assert in_flight > 0
        assert Counter(deaths) == {1: in_flight}
        assert (counts.completed, counts.failed, counts.retries) == (120, 0, 0)
        assert fleet.prompt_requests() == 120 + in_flight
        assert all(row["attempts"] == 1 for row in fleet.rows())


def test_other_servers_go_on_while_one_is_dead(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 400)
    with Fleet(tmp_path, servers=2, latency="0.1", cap=4) as fleet:
        fleet.enqueue(prompts)
        fleet.start_group(0)
        fleet.start_group(1)
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait(lambda: min(served_by(fleet)) >= 5, "5 completions of each")

        fleet.simulator.control("die", 0)
        counts = fleet.wait_done(RUN)

        assert (counts.completed, counts.failed) == (400, 0)
        wait_state(fleet, "down")


def test_a_server_that_hangs_behind_a_good_health_page_is_found(tmp_path: Path) -> None:
    # B43, with the clock of a test: the defaults find it within 59 s.
    timing = {
        "stall_s": 1.5,
        "probe_s": 1.0,
        "load_every_s": 0.3,
        "load_s": 0.5,
        "ask_again_s": 0.2,
    }
    prompts = write_prompts(tmp_path / "job.jsonl", 60)
    with Fleet(tmp_path, latency="0.3", cap=4, env=timed(**timing)) as fleet:
        fleet.enqueue(prompts)
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait(lambda: fleet.counts(RUN).completed >= 8, "8 completions")

        fleet.simulator.control("hang")
        wait_state(fleet, "down", limit_s=6)
        fleet.wait(lambda: fleet.in_flight(RUN) == 0, "what was in flight to go back", 3)
        down = figures(fleet, "gpu0")
        fleet.simulator.control("revive")
        counts = fleet.wait_done(RUN)

        assert "no progress" in down.detail
        assert (counts.completed, counts.failed, counts.retries) == (60, 0, 0)


def test_a_machine_that_vanishes_with_open_connections_is_found(tmp_path: Path) -> None:
    # New connections are refused, the old ones stay open and silent.
    timing = {"stall_s": 1.5, "probe_s": 1.0, "load_every_s": 0.3, "load_s": 0.5}
    prompts = write_prompts(tmp_path / "job.jsonl", 3)
    with Fleet(tmp_path, latency="0.1", cap=8, env=timed(**timing, ask_again_s=0.2)) as fleet:
        fleet.simulator.control("no_answer", match="say ")
        fleet.enqueue(prompts)
        fleet.start_group()
        fleet.wait(lambda: len(of_prompts(fleet)) == 3, "three open requests")

        fleet.simulator.control("die", linger_s=60)
        # One more prompt finds the door closed; that alone says nothing of the three.
        write_prompts(prompts, 4)
        fleet.enqueue(prompts)
        wait_state(fleet, "down")
        fleet.wait(lambda: fleet.in_flight(RUN) == 0, "all to go back", 10)
        fleet.simulator.clear()
        fleet.start_sink("sink", *QUICK_SINK)
        counts = fleet.wait_done(RUN)

        assert (counts.completed, counts.failed, counts.retries) == (4, 0, 0)


def test_a_slow_server_whose_tokens_move_is_left_in_peace(tmp_path: Path) -> None:
    # The limits of the hang are far shorter than an answer here.
    timing = {"stall_s": 0.5, "probe_s": 0.5, "load_every_s": 0.2, "load_s": 0.2}
    prompts = write_prompts(tmp_path / "job.jsonl", 8)
    options: dict[str, Any] = {"rate_max": 400, "rate_half": 8, "answer_tokens": "fixed:100"}
    with Fleet(tmp_path, cap=4, env=timed(**timing), **options) as fleet:
        fleet.enqueue(prompts, "--max-tokens", "200")
        fleet.start_group(0, "--concurrency", "4")
        fleet.start_sink("sink", *QUICK_SINK)

        counts = fleet.wait_done(RUN)

        assert (counts.completed, fleet.prompt_requests()) == (8, 8)


def test_a_health_page_that_says_503_is_not_believed(tmp_path: Path) -> None:
    # B44: `draining` serves on while /health refuses.
    prompts = write_prompts(tmp_path / "job.jsonl", 100)
    with Fleet(tmp_path, latency="0.1", cap=4) as fleet:
        fleet.enqueue(prompts)
        group_process = fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait(lambda: fleet.counts(RUN).completed >= 8, "8 completions")

        fleet.simulator.control("draining")
        counts = fleet.wait_done(RUN)

        assert (counts.completed, fleet.prompt_requests()) == (100, 100)
        assert "no claims" not in group_process.log.read_text()


def test_nothing_is_claimed_before_the_server_gave_a_token(tmp_path: Path) -> None:
    # B41, scaled down: refused, then starting, then there.
    prompts = write_prompts(tmp_path / "job.jsonl", 64)
    timing = {"ask_again_s": 0.1, "say_again_s": 1.0}
    with Fleet(tmp_path, latency="0.05", cap=16, env=timed(**timing)) as fleet:
        fleet.simulator.control("die")
        fleet.enqueue(prompts)
        process = fleet.start_group(0, "--concurrency", "16")
        wait_state(fleet, "waiting")
        began_s = time.monotonic()
        fleet.wait(lambda: time.monotonic() - began_s > 3, "three seconds without a server")
        fleet.simulator.control("revive", starting_s=2)

        most = 0
        while not any(each.outcome for each in fleet.served()):
            most = max(most, fleet.in_flight(RUN))
            assert process.alive()
        fleet.start_sink("sink", *QUICK_SINK)
        counts = fleet.wait_done(RUN)

        assert most == 0
        assert (counts.completed, counts.failed, counts.retries) == (64, 0, 0)
        assert fleet.max_open() <= 16
        said = process.log.read_text().count("waiting for the server")
        assert 2 <= said <= 8


def test_a_server_that_never_comes_ends_the_start_only_when_asked_to(tmp_path: Path) -> None:
    timing = {"ask_again_s": 0.1}
    with Fleet(tmp_path, env=timed(**timing)) as fleet:
        fleet.simulator.control("die")
        waiting = fleet.start_group(0)
        limited = fleet.spawn(
            "limited", "workers", "start", "--gpu", "1", "--server", fleet.simulator.urls[0],
            "--start-limit", "1",
        )  # fmt: skip

        wait_until(lambda: not limited.alive(), "the end of the one with a limit", 15)

        assert exit_code(limited) == 4
        assert "gave no token within 1 s" in limited.tail()
        assert waiting.alive()


@pytest.mark.parametrize("kind", ["unauthorized", "not_found"])
def test_a_server_that_refuses_us_from_the_start_ends_it_with_4(tmp_path: Path, kind: str) -> None:
    extra: dict[str, Any] = {"api_key": "secret-of-the-server"} if kind == "unauthorized" else {}
    with Fleet(tmp_path, **extra) as fleet:
        url = fleet.simulator.urls[0] + ("/no-such-place" if kind == "not_found" else "")
        process = fleet.spawn("gpu0", "workers", "start", "--gpu", "0", "--server", url)

        wait_until(lambda: not process.alive(), "its end", 15)

        assert exit_code(process) == 4
        assert ("HEADRACE_API_KEY" if extra else "SGLang") in process.tail()
        assert "Traceback" not in process.tail()


def test_a_key_that_is_refused_later_stops_the_claims_and_is_asked_again(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 60)
    timing = {"faulty_again_s": 0.5, "first_token_s": 2.0, "probe_s": 1.0}
    with Fleet(tmp_path, latency="0.2", cap=4, env=timed(**timing)) as fleet:
        fleet.enqueue(prompts)
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait(lambda: fleet.counts(RUN).completed >= 4, "4 completions")

        fleet.simulator.control("unauthorized", for_s=4)
        wait_state(fleet, "faulty", "down", limit_s=10)
        fleet.wait(lambda: fleet.in_flight(RUN) == 0, "all to go back", 10)
        counts = fleet.wait_done(RUN)

        assert (counts.completed, counts.failed, counts.retries) == (60, 0, 0)


def test_a_prompt_that_kills_its_server_is_convicted_alone(tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "job.jsonl", [f"say {i}" for i in range(19)] + ["POISON say"])
    timing = {"ask_again_s": 0.1}
    with Fleet(tmp_path, latency="0.3", cap=4, env=timed(**timing)) as fleet:
        fleet.enqueue(prompts)
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)

        deaths = 0
        fleet.simulator.control("poison", match="POISON")
        while not fleet.has_ended(RUN):
            if fleet.simulator.state()["state"] == "dead":
                deaths += 1
                fleet.wait(lambda: fleet.in_flight(RUN) == 0, "all to go back", 10)
                fleet.simulator.control("revive")
            assert deaths < 20, "the prompt is tried for ever"
        counts = fleet.counts(RUN)

        assert (counts.completed, counts.failed, counts.retries) == (19, 1, 0)
        [row] = fleet.rows("failures")
        assert (row["reason"], row["id"], row["attempts"]) == ("poison", "p19", 0)
        # Two in company, then by halves of at most six suspects until it is alone.
        assert 3 <= deaths <= 6
        assert all(each["attempts"] == 1 for each in fleet.rows())


def test_a_prompt_that_hangs_its_server_is_convicted_alone(tmp_path: Path) -> None:
    texts = [f"say {i}" for i in range(10)] + ["HANG say"]
    prompts = write_rows(tmp_path / "job.jsonl", texts)
    timing = {"stall_s": 1.0, "probe_s": 0.5, "load_every_s": 0.2, "load_s": 0.3}
    timing |= {"ask_again_s": 0.1, "first_token_s": 1.0}
    with Fleet(tmp_path, latency="0.1", cap=2, env=timed(**timing)) as fleet:
        fleet.simulator.control("no_answer", match="HANG")
        fleet.enqueue(prompts)
        fleet.start_group(0, "--concurrency", "2")
        fleet.start_sink("sink", *QUICK_SINK)

        # The whole server stands still as soon as that prompt runs in it.
        hangs = 0
        while not fleet.has_ended(RUN):
            running = [each for each in fleet.served() if each.end is None]
            if len(running) > 0 and hang_prompt_runs(fleet, running):
                hangs += 1
                fleet.simulator.control("hang")
                wait_state(fleet, "down", limit_s=10)
                fleet.wait(lambda: fleet.in_flight(RUN) == 0, "all to go back", 10)
                fleet.simulator.control("revive")
            assert hangs < 10
        counts = fleet.counts(RUN)

        assert (counts.completed, counts.failed, counts.retries) == (10, 1, 0)
        [row] = fleet.rows("failures")
        assert (row["reason"], row["attempts"]) == ("poison", 0)


# --- helpers -------------------------------------------------------------------------------------


def success(fleet: Fleet) -> dict[str, Any]:
    """What `_SUCCESS` says."""
    return msgspec.json.decode(
        (Path(fleet.output) / names.SUCCESS).read_bytes(), type=dict[str, Any]
    )


def served_by(fleet: Fleet) -> list[int]:
    """How many answers each server has given to prompts."""
    answered = Counter(each.port for each in of_prompts(fleet) if each.outcome == "stop")
    return [answered[port] for port in fleet.simulator.ports]


def hang_prompt_runs(fleet: Fleet, running: Sequence[Served]) -> bool:
    """Whether the prompt that stands for a hang is among the open requests."""
    for hex_key in leased(fleet, RUN):
        request = fleet.client.hget(names.rq_job(hex_key), "request")
        if request is not None and b"HANG" in request:
            return any(not each.rid.startswith("headrace-probe") for each in running)
    return False
