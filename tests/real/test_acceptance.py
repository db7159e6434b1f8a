"""A run against a real SGLang server with a hybrid model (`no_buffer`), on the CPU: `make real`.

The server judges: its log says how many ran, its journal which requests it had and what it answered.
Its weights are random, so its answers are broken text: everything must come through as it came.
"""

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.real.conftest import ServerWith
from tests.real.pipeline import (
    CONCURRENCY,
    Pipeline,
    Row,
    as_chat,
    as_completions,
    as_text,
    human_eval,
)
from tests.real.server import Death, RealServer, Seen, by_group, most_open, open_over_time
from tests.support.server_process import wait_until
from workers.loads import ServerIdentity, ServerLoad
from workers.sglang import SGLangClient

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

MAMBA_LIMITED = ("--max-mamba-cache-size", "12")
SMALL_QUEUE = ("--max-queued-requests", "4")
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
WORD = " return"


def say(what: str, **figures: Any) -> None:
    told = ", ".join(f"{name} {value}" for name, value in figures.items())
    print(f"\n  {what}: {told}")


async def _ask(url: str) -> tuple[ServerIdentity, ServerLoad]:
    async with SGLangClient(url, slots=1) as client:
        return await client.identify(), await client.load()


def asked(server: RealServer) -> tuple[ServerIdentity, ServerLoad]:
    """What the product's own client reads from the server now."""
    return asyncio.run(_ask(server.url))


# --- the bound, and the server's own figures ------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "cap", "bound"),
    [((*MAMBA_LIMITED, *SMALL_QUEUE), 4, 6), ((), 32, 35)],
    ids=["mamba-limited", "default"],
)
def test_asked_above_the_cap_the_server_is_full_and_never_holds_more_than_the_bound(
    server_with: ServerWith, tmp_path: Path, flags: tuple[str, ...], cap: int, bound: int
) -> None:
    server = server_with(*flags)
    since, since_s = server.mark(), time.time()
    with Pipeline(tmp_path, server.url) as run:
        run.enqueue(as_chat(human_eval()), 64)
        run.start_workers()
        sink = run.start_sink()
        run.watch_until(lambda _: server.most_running(since) >= cap, "a full server")
        identity, load = asked(server)
        took_s = run.watch_to_the_end(sink)
        code, told = run.verify()
        figures = [each for each in run.figures if each.in_flight]

    seen = server.seen(since_s)
    most = most_open(seen)
    full = full_share(seen, cap)
    say(
        f"cap {cap}",
        asked=CONCURRENCY,
        requests=len(seen),
        most_open=most,
        most_running=server.most_running(since),
        full_share=f"{full:.3f}",
        mamba=load.mamba_usage,
        seconds=f"{took_s:.0f}",
    )
    assert (code, len(seen)) == (0, 164), told
    assert list(most.values()) == [bound]
    assert server.most_running(since) == server.logged_cap() == cap
    assert full >= 0.95
    assert (identity.cap, load.cap) == (cap, cap)
    assert identity.strategy == "no_buffer"
    assert identity.version == server.ask("/server_info")["version"]
    assert load.mamba_usage is not None
    assert any(abs(load.mamba_usage - told) < 0.006 for told in server.mamba_usages(since))
    assert {(f.cap, f.bound, f.strategy, f.server_version) for f in figures} == {
        (cap, bound, "no_buffer", identity.version)
    }
    assert max(f.in_flight for f in figures) == bound


def full_share(seen: Sequence[Seen], cap: int) -> float:
    """How full the server's slots were, from when they first were until the last request came."""
    steps = open_over_time(seen)
    first = next(i for i, (_, now) in enumerate(steps) if now >= cap)
    last_s = max(each.begun_s for each in seen)
    held = 0.0
    for (at_s, now), (next_s, _) in zip(steps[first:], steps[first + 1 :], strict=False):
        held += min(now, cap) * max(0.0, min(next_s, last_s) - at_s)
    return held / (cap * (last_s - steps[first][0]))


# --- deaths ---------------------------------------------------------------------------------------


def test_with_the_worker_group_and_the_server_killed_every_prompt_is_answered_once(
    server_with: ServerWith, tmp_path: Path
) -> None:
    server = server_with()
    tasks = human_eval()
    rows = [
        *as_chat(tasks),
        *as_text(tasks[:60], temperature=1),
        *as_completions(tasks[60:100]),
        *broken_text_rows(server),
    ]
    since_s = time.time()
    with Pipeline(tmp_path, server.url) as run:
        run.enqueue(rows, 160)
        workers, sink = run.start_workers(), run.start_sink()
        run.watch_until(lambda counts: counts.completed >= 50, "50 answers")
        workers.kill()
        deaths = [Death(time.time(), first_group(server.seen(since_s)))]
        run.start_workers()
        run.watch_until(lambda counts: counts.completed >= 100, "100 answers")
        server.kill()
        run.watch_until(lambda counts: counts.in_flight == 0, "everything given back", 15)
        restart_s = [server.start()]
        run.watch_until(lambda counts: counts.completed >= 150, "150 answers")
        server.kill_scheduler()
        server.wait_gone()
        restart_s.append(server.start())
        took_s = run.watch_to_the_end(sink)
        code, told = run.verify()
        completed, failed, counts = run.completions(), run.failures(), run.counts()

    seen = server.seen(since_s)
    deaths += [each for each in server.deaths if each.at_s > since_s]
    most = most_open(seen, deaths)
    say(
        "deaths",
        prompts=len(rows),
        requests=len(seen),
        most_open=most,
        restarts=[f"{s:.0f} s" for s in restart_s],
        end=f"{took_s:.0f} s after the last",
        tries=Counter(row["attempts"] for row in completed),
    )
    assert code == 0, told
    assert failed == []
    assert Counter(row["id"] for row in completed) == Counter(
        row.get("id") or row["custom_id"] for row in rows
    )
    assert counts.duplicates_dropped == counts.retries == 0
    assert {row["attempts"] for row in completed} == {1}
    # Three deaths, each with at most the bound in flight: nothing else is asked twice.
    assert len(rows) < len(seen) <= len(rows) + 3 * 35
    assert max(most.values()) <= 35
    assert_as_answered(completed, seen)
    assert_broken_text(completed)


def first_group(seen: Sequence[Seen]) -> str:
    [group] = by_group(seen)
    return group


def broken_text_rows(server: RealServer) -> list[Row]:
    """Prompts whose every token is forced to be one byte: NUL, and one that is no UTF-8."""
    vocabulary = json.loads((server.model / "tokenizer.json").read_text())["model"]["vocab"]
    rows: list[Row] = []
    # The tokenizer writes bytes that do not print as letters from U+0100 on.
    for name, letter in (("nul", "\u0100"), ("no-utf-8", "\u00ff")):
        bias = {str(vocabulary[letter]): 100}
        ask = f"byte {name}"
        sampling = {"logit_bias": bias, "max_new_tokens": 9}
        rows.append({"id": f"{name}-chat", "prompt": ask, "logit_bias": bias, "max_tokens": 9})
        rows.append({"id": f"{name}-text", "text": ask, "sampling_params": sampling})
    return rows


def assert_broken_text(completed: Sequence[Row]) -> None:
    content = {row["id"]: row["choices"][0]["content"] for row in completed}
    for kind in ("chat", "text"):
        assert content[f"nul-{kind}"] == "\0" * 9
        assert set(content[f"no-utf-8-{kind}"]) == {"\ufffd"}


def assert_as_answered(completed: Sequence[Row], seen: Sequence[Seen]) -> None:
    """Each row holds an answer that the server gave to this very prompt, to the letter."""
    given = {(e.text, e.answer, e.output_tokens, e.finish) for e in seen if e.answer is not None}
    for row in completed:
        [choice] = row["choices"]
        if row["endpoint"] == "chat":
            text = CHAT.format(row["messages"][0]["content"])
            assert row["messages"][1] == {"role": "assistant", "content": choice["content"]}
        else:
            text = row["prompt"]
        tokens = row["usage"]["completion_tokens"]
        assert (text, choice["content"], tokens, choice["finish_reason"]) in given, row["id"]


# --- answers that are errors ----------------------------------------------------------------------


def test_prompts_beyond_the_context_fail_at_once_and_the_others_do_not(
    server_with: ServerWith, tmp_path: Path
) -> None:
    server = server_with(*MAMBA_LIMITED, *SMALL_QUEUE)
    since_s = time.time()
    long = [("long", WORD * 3000)]
    rows = [*as_chat(long), *as_text(long), *as_completions(long), *as_chat(human_eval()[:5])]
    with Pipeline(tmp_path, server.url) as run:
        run.enqueue(rows, 16)
        run.start_workers()
        run.watch_to_the_end(run.start_sink())
        code, told = run.verify()
        completed, failed = run.completions(), run.failures()

    say("too long", failed=[(row["id"], row["status"], row["message"][:60]) for row in failed])
    assert code == 0, told
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
    server = server_with(*MAMBA_LIMITED, *SMALL_QUEUE)
    since_s = time.time()
    filling = [("filling", WORD * 1500)]
    rows = [*as_chat(filling), *as_text(filling), *as_completions(filling)]
    rows += as_chat([("long", WORD * 3000)])
    with Pipeline(tmp_path, server.url) as run:
        run.enqueue(rows, "context")
        run.start_workers()
        run.watch_to_the_end(run.start_sink())
        code, told = run.verify()
        completed, failed = run.completions(), run.failures()

    seen = server.seen(since_s)
    say(
        "context",
        requests=len(seen),
        left=[(row["id"], row["params"], row["usage"]) for row in completed],
    )
    assert code == 0, told
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
    server = server_with(*MAMBA_LIMITED, *SMALL_QUEUE)
    rows = [*as_chat(human_eval()[:12]), *as_text(human_eval()[:6])]
    with Pipeline(tmp_path, server.url) as run:
        run.enqueue(rows, 16)
        with full_queue(server, 20):
            since = server.mark()
            run.start_workers()
            sink = run.start_sink()
            run.watch_until(
                lambda _: refused(server, since, "/v1/chat/completions") > 0, "a 503", 60
            )
        took_s = run.watch_to_the_end(sink)
        code, told = run.verify()
        completed, counts = run.completions(), run.counts()

    say("full queue", statuses=dict(server.statuses(since)), end=f"{took_s:.0f} s")
    assert code == 0, told
    assert len(completed) == len(rows)
    assert {row["attempts"] for row in completed} == {1}
    assert counts.retries == counts.failed == 0


def refused(server: RealServer, since: int, path: str) -> int:
    return server.statuses(since)[path, 503]


# --- a hang ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["thawed", "killed"])
def test_a_frozen_scheduler_is_seen_within_a_minute_and_the_prompts_go_back(
    server_with: ServerWith, tmp_path: Path, then: str
) -> None:
    server = server_with()
    tasks = human_eval()[:80]
    since_s = time.time()
    with Pipeline(tmp_path, server.url) as run:
        run.enqueue(as_chat(tasks), 100)
        run.start_workers()
        sink = run.start_sink()
        run.watch_until(lambda counts: counts.completed >= 10, "10 answers")
        scheduler = server.scheduler()
        scheduler.send_signal(signal.SIGSTOP)
        back_s = run.watch_until(lambda counts: counts.in_flight == 0, "prompts that go back", 75)
        said = run.group()
        if then == "thawed":
            scheduler.send_signal(signal.SIGCONT)
        else:
            server.kill()
            server.start()
        took_s = run.watch_to_the_end(sink)
        code, told = run.verify()
        completed, counts = run.completions(), run.counts()

    most = most_open(server.seen(since_s), [Death(since_s + 1e9)])
    say(
        f"frozen, {then}",
        given_back=f"{back_s:.0f} s after",
        end=f"{took_s:.0f} s after",
        requests=len(server.seen(since_s)),
        most_open=most,
    )
    assert code == 0, told
    assert back_s <= 60
    assert said is not None
    assert (said.state, said.in_flight) == ("down", 0)
    assert len(completed) == len(tasks)
    assert {row["attempts"] for row in completed} == {1}
    assert counts.failed == counts.retries == counts.duplicates_dropped == 0
