"""A real run whose shards are Parquet, exported for each reader."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from producer.formats import FORMATS
from tests.support.fleet import Fleet

RUN = "chats"
TURNS = [
    {"from": "human", "value": "hello \u2028 there"},
    {"from": "gpt", "value": "old answer"},
    {"from": "human", "value": "and?"},
    {"from": "gpt", "value": "asked for again"},
]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


@pytest.mark.parametrize("shards", ["parquet", "jsonl.zst"])
def test_a_run_with_samples_is_exported_in_every_format(tmp_path: Path, shards: str) -> None:
    rows: list[dict[str, Any]] = [{"id": n, "prompt": f"say {n} 😀"} for n in range(10)]
    rows += [{"id": f"c/{n}", "conversations": TURNS} for n in range(10)]
    file = tmp_path / f"{RUN}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Fleet(tmp_path, latency="fixed:0.02") as fleet:
        fleet.enqueue(file, "--format", shards, "--samples", "2")
        fleet.start_group()
        fleet.start_sink("sink", "--poll", "0.1")
        assert fleet.wait_done(RUN).completed == 40
        fleet.verify(RUN, "--input", str(file))

        for form in FORMATS:
            fleet.producer("export", RUN, "--format", form, "--to", f"a-{form}.parquet")

    if shards == "parquet":
        polars = importlib.import_module("polars")
        frame = polars.read_parquet(tmp_path / "out/shards/*.parquet")
        assert sorted(frame["row"]) == sorted(
            (tmp_path / "a-jsonl.parquet").read_text(encoding="utf-8").split("\n")[:-1]
        )
    whole = read(tmp_path / "a-jsonl.parquet")
    answers = [row["messages"][-1]["content"] for row in whole]
    assert [(row["id"], row["sample"]) for row in whole] == [
        (row["id"], sample) for row in rows for sample in range(2)
    ]
    table = importlib.import_module("pyarrow.parquet").read_table(tmp_path / "a-parquet.parquet")
    assert table.column("content").to_pylist() == answers
    for form in ("specforge", "speculators"):
        found = read(tmp_path / f"a-{form}.parquet")
        assert [row["conversations"][-1]["content"] for row in found] == answers
        assert len({row["id"] for row in found}) == 40
    shared = read(tmp_path / "a-sharegpt.parquet")
    assert [row["conversations"][-1]["value"] for row in shared] == answers
    assert shared[-1]["conversations"][:3] == TURNS[:3]
    batch = read(tmp_path / "a-openai.parquet")
    assert [row["custom_id"] for row in batch] == [str(row["id"]) for row in whole]


def test_every_generated_turn_is_in_the_training_file(tmp_path: Path) -> None:
    file = tmp_path / f"{RUN}.jsonl"
    rows = [{"id": f"c/{n}", "conversations": TURNS} for n in range(5)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Fleet(tmp_path, latency="fixed:0.02", answer_tokens="fixed:20") as fleet:
        fleet.enqueue(file, "--turns", "all", "--keep-token-ids", "--format", "parquet")
        fleet.start_group()
        fleet.start_sink("sink", "--poll", "0.1")
        assert fleet.wait_done(RUN).completed == 5
        fleet.verify(RUN)

        fleet.producer("export", RUN, "--to", "all.jsonl")
        fleet.producer("export", RUN, "--format", "specforge", "--to", "tokens.jsonl")
        text = ("--format", "specforge", "--no-token-ids", "--to", "text.jsonl")
        fleet.producer("export", RUN, *text)
        fleet.producer("export", RUN, "--format", "parquet", "--to", "a.parquet")

    whole = read(tmp_path / "all.jsonl")
    tokens = {row["id"]: row for row in read(tmp_path / "tokens.jsonl")}
    assert len(tokens) == 10
    for row in whole:
        first, last = tokens[f"{row['id']}-turn0"], tokens[row["id"]]
        assert (first["input_ids"], first["loss_mask"]) == (
            row["turns"][0]["token_ids"],
            row["turns"][0]["loss_mask"],
        )
        assert last["input_ids"] == row["choices"][0]["token_ids"]
        assert sum(first["loss_mask"]) == sum(last["loss_mask"]) == 20
    talks = read(tmp_path / "text.jsonl")
    assert [[turn["content"] for turn in talk["conversations"]] for talk in talks] == [
        [message["content"] for message in row["messages"]] for row in whole
    ]
    assert all("answer" not in talk["conversations"][1]["content"] for talk in talks)
    table = importlib.import_module("pyarrow.parquet").read_table(tmp_path / "a.parquet")
    more = [json.loads(text) for text in table.column("more").to_pylist()]
    assert [each["turns"] for each in more] == [row["turns"] for row in whole]
    assert table.column("token_ids").to_pylist() == [
        row["choices"][0]["token_ids"] for row in whole
    ]
