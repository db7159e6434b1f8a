"""Answers that are odd, from a server that gives them: flagged, counted, warned of at once."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.answering import answering, prompt_of
from tests.support.fleet import Fleet, write_prompts
from tests.support.scripted_server import Reply, answer
from tests.support.watching import QUICK_SINK

pytestmark = pytest.mark.timeout(400)

RUN = "odd"
SAME = "All prompts get this answer, word for word, and it is a long one. " * 4

ODD: dict[str, bytes] = {
    "unparsed_reasoning": answer("so it is\n</think>\n\n42"),
    "repeating": answer("Well. " + "I am sorry. " * 60),
    "same_answer": answer(SAME),
    "reasoning_cut": answer("", finish_reason="length", reasoning_content="so far"),
    "empty": answer(""),
}
PROMPTS = 260
EACH = PROMPTS // (len(ODD) + 1)


def respond(body: dict[str, Any]) -> Reply:
    """One in six prompts gets each kind of odd answer, the others a good one of their own."""
    number = int(prompt_of(body).split()[-1])
    kind = [*ODD, "good"][number % (len(ODD) + 1)]
    return Reply(body=ODD.get(kind) or answer(f"answer {number}"))


def test_a_server_that_cuts_prompts_is_named_at_once_and_what_it_cut_is_flagged(
    tmp_path: Path,
) -> None:
    cuts = "allow_auto_truncate=true"
    with Fleet(tmp_path, info=cuts, context_length=64, latency="0.05") as fleet:
        prompts = tmp_path / f"{RUN}.jsonl"
        rows = [{"id": 1, "prompt": "x" * 4 * 57}, {"id": 2, "prompt": "short"}]
        prompts.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        fleet.enqueue(prompts, "--max-tokens", "4")
        worker = fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        counts = fleet.wait_done(RUN)
        told = json.loads(fleet.producer("status", RUN, "--json").stdout)
        flags = {row["id"]: row["flags"] for row in fleet.rows()}
        logged = worker.log.read_text()
    assert (counts.completed, counts.prompt_cut) == (2, 1)
    assert "prompt_cut" in flags[1]  # type: ignore[operator]
    assert "prompt_cut" not in flags[2]  # type: ignore[operator]
    assert "without --allow-auto-truncate" in logged
    assert any("--flag prompt_cut`" in warning for warning in told["warnings"])


def test_odd_answers_are_flagged_counted_and_warned_of_before_the_run_ends(
    tmp_path: Path,
) -> None:
    with answering(respond) as server, Fleet(tmp_path) as fleet:
        fleet.enqueue(write_prompts(fleet.folder / f"{RUN}.jsonl", PROMPTS), "--keep-open")
        worker = fleet.spawn(
            *("gpu0", "workers", "start", "--gpu", "0", "--server", server.url),
            *("--concurrency", "4", "--ramp", "10000"),
        )
        sink = fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait(lambda: fleet.counts(RUN).completed == PROMPTS, "all answers")
        fleet.wait(
            lambda: "word for word" in sink.log.read_text(), "the sink to say what is odd", 30
        )
        told = json.loads(fleet.producer("status", RUN, "--json", check=False).stdout)
        peeked = json.loads(
            fleet.producer("peek", RUN, "--json", "--flag", "repeating", "-n", "2").stdout
        )
        logged, stored = worker.log.read_text(), sink.log.read_text()
    for flag in ODD:
        assert told[flag] >= EACH - (flag == "same_answer"), flag
        [warning] = [each for each in told["warnings"] if f"--flag {flag}`" in each]
        assert "of the answers" in warning
        assert stored.count(f"--flag {flag}`") == 1, "said once in the sink's log"
        assert logged.count(f"--flag {flag}`") == 1, "said once in the worker group's log"
    # These loops are all the same, which is odd too.
    flags = [each["row"]["flags"] for each in peeked["rows"]]
    assert flags == [["repeating", "same_answer"]] * 2
    assert "I am sorry" not in logged + stored
