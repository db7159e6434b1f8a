"""`--samples N`: each row is N prompts, and a larger N later adds the further ones only."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from common.store.frames import decompress
from tests.support.fleet import Fleet
from tests.support.producer_cli import Ended, producer
from tests.support.redis_server import RedisServer
from tests.support.watching import QUICK_SINK, of_prompts
from workers.simulator.hashing import request_hash

ROWS: list[dict[str, Any]] = [
    {"id": 1, "prompt": "one"},
    {"id": "1", "prompt": "one", "seed": 7},
    {"id": 1, "prompt": "one"},
    {"prompt": "nameless"},
    {"prompt": "nameless"},
    {"id": 1, "prompt": "another"},
]


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "p.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def enqueue(folder: Path, server: RedisServer, *flags: str) -> Ended:
    return producer(
        *("enqueue", write(folder, ROWS), "--output", "out", "--max-tokens", "64", "--json"),
        *("--skip-invalid", "--redis", server.url, *flags),
        cwd=folder,
    )


def accepted(folder: Path) -> list[tuple[Any, int]]:
    """Id and sample of every accepted prompt, in order."""
    return [
        (prompt["id"], prompt.get("sample", 0))
        for path in sorted((folder / "out" / "inputs").glob("*.zst"))
        for line in decompress(path.read_bytes()).splitlines()
        for prompt in [json.loads(line)["prompt"]]
    ]


def test_rows_are_counted_once_and_their_samples_as_prompts(
    tmp_path: Path, valkey: RedisServer
) -> None:
    ended = enqueue(tmp_path, valkey, "--samples", "3")

    told = ended.told
    assert ended.code == 0
    assert (told["lines_read"], told["ok"], told["duplicates"], told["rejected"]) == (6, 4, 1, 1)
    assert (told["samples"], told["prompts"], told["enqueued"], told["total"]) == (3, 12, 12, 12)
    assert "3 samples of each make 12 requests" in ended.err
    [first, *_] = accepted(tmp_path)
    assert first == (1, 0)
    assert Counter(sample for _, sample in accepted(tmp_path)) == {0: 4, 1: 4, 2: 4}
    assert len(set(accepted(tmp_path))) == 12


def test_more_samples_later_add_the_further_ones_only(tmp_path: Path, valkey: RedisServer) -> None:
    calls = [enqueue(tmp_path, valkey, *flags).told for flags in (
        (), ("--samples", "3"), ("--samples", "3"), ("--samples", "2"), ("--samples", "4"),
    )]  # fmt: skip

    assert [told["enqueued"] for told in calls] == [4, 8, 0, 0, 4]
    assert [told["already_queued"] for told in calls] == [0, 4, 12, 8, 12]
    assert [told["total"] for told in calls] == [4, 12, 12, 12, 16]
    assert [prompt for prompt in accepted(tmp_path) if prompt[0] == 1] == [
        (1, sample) for sample in range(4)
    ]


def test_the_limit_counts_rows(tmp_path: Path, valkey: RedisServer) -> None:
    told = enqueue(tmp_path, valkey, "--samples", "3", "--limit", "2").told

    assert (told["ok"], told["prompts"], told["total"]) == (2, 6, 6)


@pytest.mark.parametrize("count", ["0", "-1", "x"])
def test_a_number_of_samples_that_is_none_is_told(
    tmp_path: Path, valkey: RedisServer, count: str
) -> None:
    ended = enqueue(tmp_path, valkey, "--samples", count)

    assert ended.code == 2
    assert "--samples" in ended.err


def test_each_sample_is_asked_with_its_seed_and_comes_back_with_its_number(
    tmp_path: Path,
) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "chat", "prompt": "one", "seed": 7},
        {"id": "text", "text": "two"},
        {"id": "line", "body": {"messages": [{"role": "user", "content": "three"}]}},
    ]
    with Fleet(tmp_path, latency="0.01") as fleet:
        file = write(tmp_path, rows)
        fleet.enqueue(file, "--samples", "2", "--seed", "100")
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait_done("p")
        # The run was at its end; now it grows.
        fleet.enqueue(file, "--samples", "3", "--seed", "100")
        counts = fleet.wait_done("p")
        assert (counts.total, counts.completed) == (9, 9)

        got = {(str(row["id"]), row["sample"]): row["params"] for row in fleet.rows()}
        assert {prompt: seed_of(params) for prompt, params in got.items()} == {
            (name, sample): seed + sample
            for name, seed in (("chat", 7), ("text", 100), ("line", 100))
            for sample in range(3)
        }
        asked = Counter(each.digest for each in of_prompts(fleet))
        assert asked == Counter(
            request_hash({**body, "max_tokens": 64, "seed": seed + sample, "stream": False})
            for body, seed in (
                ({"messages": [{"role": "user", "content": "one"}]}, 7),
                ({"messages": [{"role": "user", "content": "three"}]}, 100),
            )
            for sample in range(3)
        ) + Counter(
            request_hash(
                {"text": "two", "stream": False,
                 "sampling_params": {"max_new_tokens": 64, "sampling_seed": 100 + sample}}
            )
            for sample in range(3)
        )  # fmt: skip

        fleet.verify("p", "--input", str(file), "--samples", "3")
        lacking = fleet.producer(
            "verify", "p", "--input", str(file), "--samples", "4", check=False
        )
        assert lacking.returncode == 1
        assert "3 prompts of the file" in lacking.stdout
        fleet.producer("export", "p", "--to", "answers.jsonl")
        exported = [
            json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()
        ]
        assert Counter((row["id"], row["sample"]) for row in exported) == Counter(got.keys())
        status = json.loads(fleet.producer("status", "p", "--json").stdout)
        assert (status["total"], status["completed"]) == (9, 9)


def seed_of(params: Any) -> int:
    return int(params["seed"] if "seed" in params else params["sampling_params"]["sampling_seed"])
