"""Answers of a real server that are errors: beyond the context, and a full queue."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.real.conftest import ServerWith
from tests.real.pipeline import (
    MAMBA_LIMITED,
    Pipeline,
    as_chat,
    as_completions,
    as_text,
    human_eval,
    say,
)
from tests.real.server import RealServer
from tests.support.server_process import wait_until

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

WORD = " return"


def test_prompts_beyond_the_context_fail_at_once_and_the_others_do_not(
    server_with: ServerWith, tmp_path: Path
) -> None:
    server = server_with(*MAMBA_LIMITED)
    since_s = time.time()
    long = [("long", WORD * 3000)]
    rows = [*as_chat(long), *as_text(long), *as_completions(long), *as_chat(human_eval()[:5])]
    with Pipeline(tmp_path, server.url) as run:
        run.enqueue(rows, 16)
        run.start_workers()
        run.watch_to_the_end(run.start_sink())
        code, verdict = run.verify()
        completed, failed = run.completions(), run.failures()

    say("too long", failed=[(row["id"], row["status"], row["message"][:60]) for row in failed])
    assert (code, verdict["proven"]) == (1, True), verdict
    assert len(completed) == 5
    assert {row["id"] for row in failed} == {"long", "text:long", "completions:long"}
    assert {(row["reason"], row["status"], row["attempts"]) for row in failed} == {
        ("context_overflow", 400, 1)
    }
    assert all("2048" in row["message"] for row in failed)
    assert len(server.seen(since_s)) == len(rows)


def test_what_the_context_leaves_is_asked_for_in_one_second_request(
    server_with: ServerWith, tmp_path: Path
) -> None:
    server = server_with(*MAMBA_LIMITED)
    since_s = time.time()
    filling = [("filling", WORD * 1500)]
    rows = [*as_chat(filling), *as_text(filling), *as_completions(filling)]
    rows += as_chat([("long", WORD * 3000)])
    with Pipeline(tmp_path, server.url) as run:
        run.enqueue(rows, "context")
        run.start_workers()
        run.watch_to_the_end(run.start_sink())
        code, verdict = run.verify()
        completed, failed = run.completions(), run.failures()

    seen = server.seen(since_s)
    say(
        "context",
        requests=len(seen),
        left=[(row["id"], row["params"], row["usage"]) for row in completed],
    )
    assert (code, verdict["proven"]) == (1, True), verdict
    assert [(row["id"], row["reason"], row["attempts"]) for row in failed] == [
        ("long", "context_overflow", 1)
    ]
    for row in completed:
        sampling = row["params"].get("sampling_params", {})
        limit = row["params"].get("max_tokens") or sampling["max_new_tokens"]
        assert limit == 2048 - row["usage"]["prompt_tokens"] - 1
        assert ("clamped" in row["flags"], row["attempts"]) == (True, 1)
    # Two for each that fits, one for the one that does not.
    assert len(seen) == 2 * 3 + 1


@contextmanager
def full_queue(server: RealServer, seconds: float) -> Iterator[None]:
    """Keep the server's slots and its queue taken by somebody else, for so long at least."""
    end_s = time.monotonic() + seconds
    sampling = {"max_new_tokens": 300, "ignore_eos": True}
    ask = {"text": "somebody else", "sampling_params": sampling}

    def keep(number: int) -> None:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            while time.monotonic() < end_s:
                client.post("/generate", json={**ask, "rid": f"test-{number}"})

    with ThreadPoolExecutor(max_workers=9) as others:
        kept = [others.submit(keep, number) for number in range(9)]
        load = "/v1/loads"
        wait_until(
            lambda: server.ask(load)["loads"][0]["num_waiting_reqs"] >= 4, "a full queue", 30
        )
        yield
        for each in kept:
            each.result()


def test_a_full_queue_costs_waiting_and_no_attempt(
    server_with: ServerWith, tmp_path: Path
) -> None:
    server = server_with(*MAMBA_LIMITED)
    rows = [*as_chat(human_eval()[:12]), *as_text(human_eval()[:6])]
    with Pipeline(tmp_path, server.url) as run:
        run.enqueue(rows, 16)
        # Longer than a worker group waits at a new Redis for others to declare their slots.
        with full_queue(server, 40):
            since = server.mark()
            run.start_workers()
            sink = run.start_sink()
            run.watch_until(
                lambda _: refused(server, since, "/v1/chat/completions") > 0, "a 503", 60
            )
        took_s = run.watch_to_the_end(sink)
        code, verdict = run.verify()
        completed, counts = run.completions(), run.counts()

    say("full queue", statuses=dict(server.statuses(since)), end=f"{took_s:.0f} s")
    assert code == 0, verdict
    assert len(completed) == len(rows)
    assert {row["attempts"] for row in completed} == {1}
    assert counts.retries == counts.failed == 0


def refused(server: RealServer, since: int, path: str) -> int:
    return server.statuses(since)[path, 503]
