"""Conversations of several turns: written to be generated anew, and judged by what servers saw."""

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from tests.support.fleet import HASH_MARK, Fleet
from workers.simulator.hashing import request_hash


def write_conversations(path: Path, count: int, *, turns: int = 4) -> Path:
    """Write a JSONL of stored conversations c0, c1, … with `turns` old answers each."""
    with path.open("wb") as file:
        for i in range(count):
            spoken = [{"from": "system", "value": "be brief"}]
            for turn in range(turns):
                spoken.append({"from": "human", "value": f"question {turn} of {i}"})
                spoken.append({"from": "gpt", "value": f"old answer {turn} of {i}"})
            file.write(msgspec.json.encode({"id": f"c{i}", "conversations": spoken}) + b"\n")
    return path


def turn_hashes(row: dict[str, Any]) -> list[str]:
    """Hashes of the requests that a row's turns must have been, each on the answers before it."""
    return [
        request_hash(
            {
                **row["params"],
                "messages": row["messages"][: turn["at"]],
                "stream": False,
            }
        )
        for turn in row["turns"]
    ]


def answers_its_own_turns(row: dict[str, Any]) -> bool:
    """Whether each answer holds the hash of the very request of its turn."""
    return all(
        str(row["messages"][turn["at"]]["content"]).startswith(f"{HASH_MARK}{digest} ")
        for turn, digest in zip(row["turns"], turn_hashes(row), strict=True)
    )


def redone_turns(fleet: Fleet, rows: list[dict[str, Any]]) -> int:
    """How many requests repeated a turn; every one must have been a turn of a row."""
    wanted = Counter(digest for row in rows for digest in turn_hashes(row))
    assert set(wanted.values()) == {1}, "no two turns of a test are the same request"
    seen = Counter(
        served.digest for served in fleet.served() if not served.rid.startswith("headrace-probe")
    )
    assert set(seen) == set(wanted), "a request that is no turn of the rows, or a turn never asked"
    return seen.total() - wanted.total()
