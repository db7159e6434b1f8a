"""Cases of what is too long: prompts for their context, answers for their time or memory."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from rq import Queue
from rq.registry import clean_registries
from rq.serializers import JSONSerializer

from common import names
from common.models import Params
from common.queue.ledger import request_timeout_s
from tests.support.fleet import Fleet, write_prompts
from tests.support.watching import QUICK_SINK, of_prompts, open_now

pytestmark = pytest.mark.timeout(400)

RUN = "job"
CONTEXT = 4096
POOL = 3600
FITS, OVER_POOL, TOO_LONG = 1320, 3700, 5000
"""Tokens of prompts: with room for an answer, more than the pool holds, more than the context."""

Row = dict[str, Any]


def rows(tokens: int, name: str, **own: Any) -> list[Row]:
    """A prompt of so many tokens, once a route; the simulator counts one token a character."""
    text = f"{name} ".ljust(tokens, "x")
    chat = {"messages": [{"role": "user", "content": text}], **own}
    sampling = {"max_new_tokens": own["max_tokens"]} if own else {}
    return [
        batch_line(f"{name}/chat", "/v1/chat/completions", chat),
        batch_line(f"{name}/completions", "/v1/completions", {"prompt": text, **own}),
        {"id": f"{name}/generate", "text": text, "sampling_params": sampling},
    ]


def batch_line(name: str, url: str, body: Row) -> Row:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def write(path: Path, lines: list[Row]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("version", ["0.5.12.post1", "0.5.23"])
def test_b29_what_exceeds_the_context_is_refused_once_or_made_to_fit_once(
    tmp_path: Path, version: str
) -> None:
    good = [{"id": f"good{i}", "prompt": "x"} for i in range(6)]
    refused = [
        *rows(FITS, "over", max_tokens=3000),
        *rows(FITS, "far over", max_tokens=5000),
        *rows(OVER_POOL, "pool", max_tokens=8),
        *rows(TOO_LONG, "long", max_tokens=8),
    ]
    fixed = write(tmp_path / "fixed.jsonl", [*good, *refused])
    fitted = write(
        tmp_path / "fitted.jsonl", [*good, *rows(FITS, "fits"), *rows(TOO_LONG, "long")]
    )
    simulator: Row = {"context_length": CONTEXT, "kv_tokens": POOL, "sglang_version": version}
    with Fleet(tmp_path, latency="0.01", answer_tokens="fixed:40", tokens_per_char=1, cap=4,
               **simulator) as fleet:  # fmt: skip
        fleet.enqueue(fixed)
        first, fleet.output = fleet.output, str(tmp_path / "fitted")
        fleet.enqueue(fitted, "--max-tokens", "context")
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait_done("fitted")
        fits = fleet.rows()
        too_long = fleet.rows("failures")
        fleet.output = first
        fleet.wait_done("fixed")

        failures = fleet.rows("failures")
        assert {each["id"] for each in failures} == {id_of(each) for each in refused}
        assert {each["reason"] for each in failures} == {"context_overflow"}
        assert {each["attempts"] for each in failures} == {1}
        assert all("tokens" in str(each["message"]) for each in failures)

        clamped: list[Any] = [each for each in fits if "clamped" in each["flags"]]  # type: ignore[operator]
        assert {each["id"] for each in clamped} >= {id_of(each) for each in rows(FITS, "fits")}
        limits = {limit_of(each) for each in clamped if not str(each["id"]).startswith("good")}
        assert len(limits) == 1
        assert limits.pop() <= CONTEXT - FITS - 1
        assert {each["reason"] for each in too_long} == {"context_overflow"}
        # Two requests for each that was made to fit, one for every other.
        ended = len(good) + len(refused) + len(fits) + len(too_long)
        assert fleet.prompt_requests() == ended + len(clamped)


def id_of(line: Row) -> str:
    return str(line.get("custom_id", line.get("id")))


def limit_of(row: Any) -> int:
    params = row["params"]
    sampling = params.get("sampling_params", params)
    return int(sampling.get("max_new_tokens", sampling.get("max_tokens")))


def test_b31_a_share_of_cut_answers_above_a_fifth_is_warned_of(tmp_path: Path) -> None:
    with Fleet(tmp_path, latency="0", answer_tokens="fixed:200", cap=4) as fleet:
        lines = [
            {"id": i, "prompt": f"say {i}", "max_tokens": 20 if i < 3 else 400} for i in range(12)
        ]
        fleet.enqueue(write(tmp_path / f"{RUN}.jsonl", lines))
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait_done(RUN)

        figures = json.loads(fleet.producer("status", RUN, "--json").stdout)
        shown = fleet.producer("status", RUN)
        assert figures["truncated_share"] == 0.25
        assert any("25%" in warning for warning in figures["warnings"])
        assert "25.0% cut off" in shown.stdout + shown.stderr


# --- time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [None, 1, 1_000, 100_000, "context"])
def test_b32_without_a_flag_no_answer_has_less_than_ten_minutes(tokens: Any) -> None:
    limit_s = request_timeout_s(Params(max_tokens=tokens))

    assert limit_s >= 600
    assert limit_s >= (tokens if isinstance(tokens, int) else 0) / 5


def test_b33_a_time_limit_sends_as_many_requests_as_attempts_one_after_another(
    tmp_path: Path,
) -> None:
    """The server answers, each time after one and a half of the limit; the probe as well."""
    with Fleet(tmp_path, latency="fixed:1.5", cap=4) as fleet:
        fleet.enqueue(
            write_prompts(tmp_path / f"{RUN}.jsonl", 3),
            "--request-timeout",
            "1",
            "--attempts",
            "2",
        )
        group = fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)

        counts = fleet.wait_done(RUN)

        assert (counts.completed, counts.failed) == (0, 3)
        assert {(each["reason"], each["attempts"]) for each in fleet.rows("failures")} == {
            ("timeout", 2)
        }
        served = of_prompts(fleet)
        assert len(served) == 6
        assert fleet.max_open() <= 4
        by_prompt: dict[str, list[Any]] = {}
        for each in served:
            by_prompt.setdefault(each.digest, []).append(each)
        for first, second in by_prompt.values():
            assert first.outcome == "abort"
            assert first.end <= second.begin, "the next try began while the first was open"
        fleet.wait(lambda: open_now(fleet) == 0, "all connections to be closed")
        assert group.alive()


def test_b62_rqs_limit_of_a_job_cuts_no_answer(tmp_path: Path) -> None:
    """As if RQ's 180 s had long passed for every job: the field in its hash says one second."""
    with Fleet(tmp_path, latency="fixed:2.5", cap=4) as fleet:
        fleet.enqueue(write_prompts(tmp_path / f"{RUN}.jsonl", 6))
        for key in fleet.client.scan_iter(f"{names.RQ_JOB_STEM}*"):
            fleet.client.hset(key, "timeout", 1)
        fleet.start_group(0, "--concurrency", "3")
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait(lambda: open_now(fleet) == 3, "three open requests")
        queue = Queue(RUN, connection=fleet.client, serializer=JSONSerializer)

        def cleaned_and_three_done() -> bool:
            # What `rq info` and every RQ worker do in passing.
            clean_registries(queue)
            return fleet.counts(RUN).completed >= 3

        fleet.wait(cleaned_and_three_done, "three completions")
        counts = fleet.wait_done(RUN)

        assert (counts.completed, counts.failed, counts.retries) == (6, 0, 0)
        assert fleet.prompt_requests() == 6


# --- size ----------------------------------------------------------------------------------------


def test_b40_long_answers_are_kept_whole_in_bounded_memory(tmp_path: Path) -> None:
    size_bytes, count, at_once = 2 * 1024 * 1024, 120, 4
    with Fleet(tmp_path, latency="0.01", cap=at_once, answer_bytes=size_bytes) as fleet:
        fleet.enqueue(write_prompts(tmp_path / f"{RUN}.jsonl", count))
        group = fleet.start_group(0, "--concurrency", str(at_once))
        fleet.wait(lambda: open_now(fleet) > 0 or fleet.counts(RUN).completed > 0, "the start")
        fleet.start_sink("sink", *QUICK_SINK)
        used_bytes = [0]

        def measured_and_done() -> bool:
            used_bytes.append(psutil.Process(group.pid).memory_info().rss)
            return fleet.has_ended(RUN)

        fleet.wait(measured_and_done, "the run to end")

        contents = [str(row["choices"][0]["content"]) for row in fleet.rows()]  # type: ignore[index]
        assert [len(each.encode()) for each in contents] == [size_bytes] * count
        # An interpreter, and for each open request its body, its text and its row, and some slack.
        assert max(used_bytes) < 100 * 2**20 + at_once * 10 * size_bytes
