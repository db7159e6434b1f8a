"""Two processes of one worker group: started twice, frozen and woken, broken from inside.

Real processes; the bound and who opened what are judged by the simulated server's log.
"""

import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_group import most_at_once
from tests.faults.test_group_parent import children, start_all, two_servers
from tests.support.fleet import Fleet, write_prompts
from tests.support.server_process import wait_until
from tests.support.watching import QUICK_SINK, members, of_prompts, open_now, timed

pytestmark = pytest.mark.timeout(400)

RUN = "job"
BOUND = 8
SHORT_SLOTS = {**timed(slots_every_s=0.5), "HEADRACE_LEASES": '{"slots_ms": 3000}'}
# Answers take long, and the server notices no client that goes away; only aborts end them.
SLOW: dict[str, Any] = {"known_rids_only": True, "disconnect_poll": 100, "latency": "fixed:4"}


def epochs(fleet: Fleet) -> list[str]:
    """The processes whose requests reached the server, in their order."""
    return list(dict.fromkeys(each.rid.partition("-")[0] for each in of_prompts(fleet)))


def test_a_second_process_of_a_group_waits_and_says_so_and_takes_over(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 40)
    with Fleet(tmp_path, cap=BOUND, latency="0.1", env=SHORT_SLOTS) as fleet:
        fleet.simulator.control("no_answer", match="say ")
        fleet.enqueue(prompts)
        first = fleet.start_group(0, "--concurrency", str(BOUND), "--grace", "0")
        fleet.wait(lambda: open_now(fleet) == BOUND, "a full server")
        url = fleet.simulator.urls[0].replace("127.0.0.1", "LOCALHOST") + "/"
        command = ("workers", "start", "--gpu", "0", "--server", url, "--concurrency", str(BOUND))
        second = fleet.spawn("second", *command, "--ramp", "10000")
        fleet.wait(lambda: "runs more than once" in second.log.read_text(), "it to say so")
        said = second.log.read_text()
        [of_first] = epochs(fleet)

        fleet.simulator.clear()
        first.send(signal.SIGTERM)
        wait_until(lambda: not first.alive(), "the end of the first", 60)
        del fleet.processes["gpu0"]
        fleet.start_sink("sink", *QUICK_SINK)
        counts = fleet.wait_done(RUN)

        assert f"pid {first.pid} on {socket.gethostname()} has {BOUND} slots" in said
        assert f"gpu0@{socket.gethostname()}" in said
        assert (counts.completed, counts.failed, counts.retries) == (40, 0, 0)
        assert epochs(fleet)[0] == of_first
        assert len(epochs(fleet)) == 2
        assert most_at_once(of_prompts(fleet)) == BOUND
        fleet.verify(RUN)


def test_a_frozen_process_whose_slots_were_taken_opens_nothing_when_it_wakes(
    tmp_path: Path,
) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 48)
    with Fleet(tmp_path, cap=BOUND, env=SHORT_SLOTS, **SLOW) as fleet:
        fleet.enqueue(prompts)
        frozen = fleet.start_group(0, "--concurrency", str(BOUND))
        fleet.wait(lambda: open_now(fleet) == BOUND, "a full server")
        [its] = epochs(fleet)
        of_frozen = len(of_prompts(fleet))

        frozen.send(signal.SIGSTOP)
        url = fleet.simulator.urls[0]
        command = ("workers", "start", "--gpu", "0", "--server", url, "--concurrency", str(BOUND))
        heir = fleet.spawn("heir", *command, "--ramp", "10000")
        fleet.wait(lambda: len(of_prompts(fleet)) >= of_frozen + BOUND, "the heir to fill it")
        frozen.send(signal.SIGCONT)
        fleet.wait(lambda: "runs more than once" in frozen.log.read_text(), "it to be awake")
        fleet.start_sink("sink", *QUICK_SINK)
        counts = fleet.wait_done(RUN)

        assert (counts.completed, counts.failed, counts.retries) == (48, 0, 0)
        assert sum(each.rid.startswith(its) for each in of_prompts(fleet)) == of_frozen
        assert most_at_once(of_prompts(fleet)) == BOUND, "the sum over both processes"
        assert counts.duplicates_dropped == 0
        assert heir.alive()
        assert frozen.alive()
        fleet.verify(RUN)


MISHAP = """
import os, sys
if sys.argv[0] == "-m" and "--gpu" in sys.orig_argv and "0-1" not in sys.orig_argv:
    from workers.engine.keeper import Keeper
    inner = Keeper._renew_leases
    async def breaks(self):
        try:
            os.unlink(os.environ["BREAK"])
        except FileNotFoundError:
            return await inner(self)
        raise KeyError(os.environ["WORDS"])
    Keeper._renew_leases = breaks
"""


def test_a_group_that_breaks_inside_gives_back_ends_and_is_started_again(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 200)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(MISHAP)
    mark = tmp_path / "break-one"
    with two_servers(tmp_path, latency="fixed:0.5", cap=4) as fleet:
        fleet.env["PYTHONPATH"] = f"{tmp_path / 'site'}:{fleet.env['PYTHONPATH']}"
        fleet.env |= {
            "BREAK": str(mark),
            "WORDS": "the words of a prompt",
            **timed(leases_every_s=0.3),
        }
        fleet.enqueue(prompts)
        parent = start_all(fleet)
        fleet.wait(lambda: fleet.counts(RUN).completed >= 20, "20 completions")
        before = {process.pid for process in children(parent).values()}

        mark.touch()
        fleet.wait(lambda: "starting it again" in parent.log.read_text(), "the parent to say so")
        lost = members(fleet, "lost")
        fleet.start_sink("sink", *QUICK_SINK)
        counts = fleet.wait_done(RUN)

        said = parent.log.read_text()
        assert "ended with 1" in said
        assert "the task `leases` failed by an error of ours, KeyError" in said
        assert "words of a prompt" not in said
        assert not any(lost), "what it held was given back, not left to its lease"
        assert (counts.completed, counts.failed, counts.retries) == (200, 0, 0)
        assert len(before & {process.pid for process in children(parent).values()}) == 1
        assert most_at_once(of_prompts(fleet)) <= 12
        fleet.verify(RUN)
