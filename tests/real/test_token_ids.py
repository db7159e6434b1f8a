"""Token ids and masks of a run at a real server, judged by the model's own tokenizer.

The tokenizer is asked in a process of SGLang's environment, not through the server: what the rows
hold must be what anyone gets who trains on them.
"""

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.real.conftest import ServerWith, found_place
from tests.real.pipeline import Pipeline, Row, as_chat, as_completions, as_text, human_eval, say
from tests.support.skips import skip_cannot_run

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

PROMPTS = 12
SPLIT = "<think>[a-z]{4}</think>[a-z]{6}"
ASK_TOKENIZER = """
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
for line in sys.stdin:
    ask = json.loads(line)
    if "messages" in ask:
        said = tokenizer.apply_chat_template(
            ask["messages"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
    elif "text" in ask:
        said = tokenizer.encode(ask["text"])
    else:
        said = tokenizer.decode(ask["ids"], skip_special_tokens=True)
    print(json.dumps(said))
"""


def ask_tokenizer(model: Path, asks: Sequence[dict[str, Any]]) -> list[Any]:
    place = found_place()
    done = subprocess.run(
        [str(place.venv / "bin/python"), "-c", ASK_TOKENIZER, str(model)],
        input="".join(json.dumps(ask) + "\n" for ask in asks),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def asked_of(row: Row) -> dict[str, Any]:
    if row["endpoint"] == "chat":
        return {"messages": row["messages"][:-1]}
    return {"text": row["prompt"]}


def rows_of() -> list[Row]:
    tasks = human_eval()[:PROMPTS]
    system = {"role": "system", "content": "Write Python."}
    return [
        *as_chat(tasks),
        *as_text(tasks, temperature=1),
        *as_completions(tasks),
        {"id": "two", "messages": [system, {"role": "user", "content": "Twice."}], "n": 2},
        {"id": "ids", "input_ids": [5, 6, 7]},
        # Ends by a text that the answer does not show, and by an end token.
        {"id": "stop", "prompt": "Stop.", "stop": ["e", "a", "i", "o"]},
        {"id": "end", "prompt": "End.", "logit_bias": {"2": 100}},
        # A grammar holds from the first token only where no thinking is asked for.
        {
            "id": "split",
            "prompt": "Think.",
            "regex": SPLIT,
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ]


@pytest.mark.parametrize("flags", [(), ("--reasoning-parser", "qwen3")])
def test_what_a_row_holds_is_what_the_tokenizer_makes_of_it(
    server_with: ServerWith, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    if lacks_chat_ids():
        skip_cannot_run(f"SGLang {installed_version()} gives no token ids of a chat")
    server = server_with(*flags)
    rows = rows_of()
    with Pipeline(tmp_path, server.url, run="tokens") as run:
        run.enqueue(rows, 40, "--keep-token-ids")
        run.start_workers()
        run.watch_to_the_end(run.start_sink())
        code, verdict = run.verify()
        completed, counts = run.completions(), run.counts()

    assert code == 0, verdict
    assert (counts.completed, counts.retries) == (len(rows), 0)
    choices = [(row, choice) for row in completed for choice in row["choices"]]
    prompts = ask_tokenizer(
        server.model, [asked_of(row) if row["id"] != "ids" else {"text": ""} for row, _ in choices]
    )
    generated = [
        [token for token, made in zip(each["token_ids"], each["loss_mask"], strict=True) if made]
        for _, each in choices
    ]
    texts = ask_tokenizer(server.model, [{"ids": ids} for ids in generated])
    for (row, choice), prompt, ids, text in zip(choices, prompts, generated, texts, strict=True):
        expected = [5, 6, 7] if row["id"] == "ids" else prompt
        assert choice["token_ids"] == expected + ids, row["id"]
        assert choice["loss_mask"] == [0] * len(expected) + [1] * len(ids), row["id"]
        assert_decoded(row, choice, text)
    usage = {row["id"]: row["usage"] for row in completed}
    assert usage["two"]["completion_tokens"] == sum(
        len(ids) for (row, _), ids in zip(choices, generated, strict=True) if row["id"] == "two"
    )
    thinking = [bool(choice.get("reasoning_content")) for _, choice in choices]
    say("token ids", choices=len(choices), tokens=sum(map(len, generated)),
        with_reasoning=sum(thinking))  # fmt: skip
    assert any(thinking) is bool(flags)
    assert all(
        choice.get("reasoning_content") for row, choice in choices if row["id"] == "split"
    ) is (bool(flags))


def test_a_server_too_old_gets_no_chat_of_such_a_run_and_prompts_of_ids_all_the_same(
    server_with: ServerWith, tmp_path: Path
) -> None:
    if not lacks_chat_ids():
        skip_cannot_run(f"SGLang {installed_version()} gives all token ids")
    server = server_with()
    since_s = time.time()
    (tmp_path / "chat").mkdir()
    with Pipeline(tmp_path / "chat", server.url, run="chat") as run:
        run.enqueue(as_chat(human_eval()[:3]), 8, "--keep-token-ids")
        run.start_workers()
        run.watch_until(lambda _: run.said()[0] == "wrong_model", "the server to be refused", 60)
        group, counts = run.group(), run.counts()
    assert group is not None
    assert f"SGLang {installed_version()} gives none at /v1/chat/completions" in group.detail
    assert (server.seen(since_s), counts.queued) == ([], 3)

    rows = [{"id": n, "input_ids": [5 + n, 6, 7]} for n in range(3)]
    (tmp_path / "ids").mkdir()
    with Pipeline(tmp_path / "ids", server.url, run="ids") as run:
        run.enqueue(rows, 20, "--keep-token-ids")
        run.start_workers()
        run.watch_to_the_end(run.start_sink())
        code, verdict = run.verify()
        choices = {row["id"]: row["choices"][0] for row in run.completions()}

    assert code == 0, verdict
    generated = [choices[n]["token_ids"][3:] for n in range(3)]
    texts = ask_tokenizer(server.model, [{"ids": ids} for ids in generated])
    for n in range(3):
        assert choices[n]["token_ids"][:3] == [5 + n, 6, 7]
        assert choices[n]["loss_mask"] == [0] * 3 + [1] * len(generated[n])
        assert choices[n]["content"] == texts[n]


def installed_version() -> str:
    """SGLang's, without starting it: an old one with a parser does not take the tiny model."""
    place = found_place()
    [found] = place.venv.glob("lib/python*/site-packages/sglang-*.dist-info")
    return found.name.removesuffix(".dist-info").partition("-")[2]


def lacks_chat_ids() -> bool:
    major, minor, patch = installed_version().split(".")[:3]
    return (int(major), int(minor), int(patch)) < (0, 5, 17)


def assert_decoded(row: Row, choice: Row, text: str) -> None:
    """The generated ids are the text that came: thinking, answer, and what ended it."""
    thought, said = choice.get("reasoning_content") or "", choice["content"]
    if choice["finish_reason"] == "stop" and isinstance(choice.get("matched_stop"), str):
        at = text.index(choice["matched_stop"], len(thought + said))
        text = text[:at]
    if row["id"] == "split" and thought:
        assert (len(thought), len(said)) == (4, 6)
        assert f"<think>{thought}</think>{said}" == text
    else:
        # A parser strips the blanks around what it takes apart.
        assert (thought + said).strip() == text.strip(), row["id"]
