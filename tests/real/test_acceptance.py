"""A run against a real SGLang server with a hybrid model (`no_buffer`), on the CPU: `make real`.

Worker groups and servers are killed and frozen under it. The server's journal tells which requests
it had and what it answered. Its weights are random, so the answers are broken text, and must come
through as they came.
"""

import json
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.real.conftest import ServerWith
from tests.real.pipeline import Pipeline, Row, as_chat, as_completions, as_text, human_eval, say
from tests.real.server import Death, RealServer, Seen, by_group, most_open
from tests.support.server_process import wait_until

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

BOUND = 35
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


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
        code, verdict = run.verify()
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
    assert code == 0, verdict
    assert failed == []
    assert Counter(row["id"] for row in completed) == Counter(
        row.get("id") or row["custom_id"] for row in rows
    )
    assert counts.duplicates_dropped == counts.retries == 0
    assert {row["attempts"] for row in completed} == {1}
    # Three deaths, each with at most the bound in flight: nothing else is asked twice.
    assert len(rows) < len(seen) <= len(rows) + 3 * BOUND
    assert max(most.values()) <= BOUND
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
        wait_until(lambda: run.said() == ("down", 0), "a worker group that says so", 10)
        # Those that the server closes its books on without a word had been aborted before.
        deaths = [Death(time.time())]
        if then == "thawed":
            scheduler.send_signal(signal.SIGCONT)
        else:
            server.kill()
            server.start()
        took_s = run.watch_to_the_end(sink)
        code, verdict = run.verify()
        completed, counts = run.completions(), run.counts()

    seen = server.seen(since_s)
    most = most_open(seen, deaths)
    say(
        f"frozen, {then}",
        given_back=f"{back_s:.0f} s after",
        end=f"{took_s:.0f} s after",
        requests=len(seen),
        most_open=most,
    )
    assert code == 0, verdict
    assert back_s <= 60
    assert len(tasks) < len(seen) <= len(tasks) + BOUND
    assert max(most.values()) <= BOUND
    assert len(completed) == len(tasks)
    assert {row["attempts"] for row in completed} == {1}
    assert counts.failed == counts.retries == counts.duplicates_dropped == 0
