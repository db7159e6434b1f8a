"""What the case folder's files ask reaches a server as it stands in them, and nothing else."""

import gzip
import importlib
import json
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from tests.conftest import REPOSITORY
from tests.support.fleet import Fleet, read_rows
from tests.support.watching import QUICK_SINK, of_prompts
from workers.simulator.hashing import request_hash

INPUTS = REPOSITORY / "tests" / "data" / "inputs"
MANIFEST: dict[str, dict[str, Any]] = json.loads((INPUTS / "MANIFEST.json").read_text())
FILES = sorted(
    name for name, case in MANIFEST.items() if not case.get("not_an_input") and case["ok"]
)

Body = dict[str, Any]

SPEAKERS = {"human": "user", "gpt": "assistant"}


def lines_of(name: str) -> list[Any]:
    """The file's lines by other means than ours; one that is no JSON gives None."""
    raw = (INPUTS / name).read_bytes()
    if raw.startswith(b"PAR1"):
        table: Any = importlib.import_module("pyarrow.parquet").read_table(INPUTS / name)
        return [without_nulls(row) for row in table.to_pylist()]
    if raw.startswith(b"\x1f\x8b"):
        raw = gzip.decompress(raw)
    if raw.startswith(b"\x28\xb5\x2f\xfd"):
        raw = zstandard.ZstdDecompressor().decompressobj().decompress(raw)
    return [json_of(line.removeprefix(b"\xef\xbb\xbf")) for line in raw.split(b"\n")]


def json_of(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def asked(row: Body) -> Body:
    """The request of a row that is accepted, written down by the words of the cases."""
    if "body" in row:
        body = dict(row["body"])
    elif "text" in row:
        return {"text": row["text"], "sampling_params": {"max_new_tokens": 64}, "stream": False}
    elif "prompt" in row:
        body = {"messages": [{"role": "user", "content": row["prompt"]}]}
    elif "messages" in row:
        own = {name: row[name] for name in ("tools", "n") if name in row}
        body = {"messages": row["messages"], **own}
    else:
        body = {"messages": conversation(row)}
    return {"max_tokens": 64, **body, "stream": False}


def conversation(row: Body) -> list[Body]:
    turns = [
        {"role": SPEAKERS.get(turn["from"], turn["from"]), "content": turn["value"]}
        if "from" in turn
        else turn
        for turn in row["conversations"]
    ]
    while turns[-1]["role"] == "assistant":
        turns.pop()
    side = [{"role": "system", "content": row["system"]}] if "system" in row else []
    return side + turns


def expected(name: str) -> list[Body]:
    """The requests of a file: its accepted lines by the manifest."""
    verdicts = MANIFEST[name]["verdicts"]
    lines = lines_of(name)
    return [asked(line) for line, verdict in zip(lines, verdicts, strict=False) if verdict == "ok"]


def test_every_accepted_row_of_every_case_is_asked_once_and_as_it_stands(tmp_path: Path) -> None:
    with Fleet(tmp_path, latency="0.01", model="m", answer_tokens="fixed:2") as fleet:

        def enqueue(number: int) -> None:
            # A copy, since rejected rows are written beside it.
            file = shutil.copy(INPUTS / FILES[number], tmp_path)
            fleet.producer(
                *("enqueue", str(file), "--run", f"run{number}"),
                *("--output", str(tmp_path / f"out{number}"), "--max-tokens", "64"),
                *("--model", "m", "--skip-invalid"),
            )

        with ThreadPoolExecutor(4) as several:
            list(several.map(enqueue, range(len(FILES))))
        fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        done = [tmp_path / f"out{number}" / "_SUCCESS" for number in range(len(FILES))]
        fleet.wait(lambda: all(path.exists() for path in done), "all runs to end", 90)

        seen = Counter(each.digest for each in of_prompts(fleet))
        assert seen == Counter(request_hash(body) for name in FILES for body in expected(name))
        for number, name in enumerate(FILES):
            rows = list(read_rows(tmp_path / f"out{number}", ["shards"]))
            assert len(rows) == MANIFEST[name]["ok"], name
            if name in {"B14_id_chars.jsonl", "B25.parquet"}:
                fleet.producer("verify", f"run{number}", "--input", str(INPUTS / name))
        control = list(read_rows(tmp_path / f"out{FILES.index('B09_control.jsonl')}", ["shards"]))
        assert "nul \0 escaped" in json.dumps(control, ensure_ascii=False).replace("\\u0000", "\0")


def test_images_and_tool_calls_are_sent_untouched_up_to_megabytes(tmp_path: Path) -> None:
    image = "data:image/png;base64," + "iVBORw0KGgo/" * (5 * 2**20 // 12)
    content = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": image, "detail": "low"}},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
    ]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1.50 }'}}
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "[]"},
    ]
    rows = [{"id": "v", "messages": messages}, {"id": "file", "messages": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}
    ]}]  # fmt: skip
    path = tmp_path / "images.jsonl"
    path.write_bytes(b"\n".join(msgspec.json.encode(row) for row in rows))
    with Fleet(tmp_path, latency="0.01") as fleet:
        told = fleet.enqueue(path, "--skip-invalid", "--json")
        group = fleet.start_group()
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait_done("images")

        assert [each["reason"] for each in json.loads(told.stdout)["rejects"]] == ["url_scheme"]
        body = {"messages": messages, "max_tokens": 64, "stream": False}
        assert [each.digest for each in of_prompts(fleet)] == [request_hash(body)]
        [row] = fleet.rows()
        assert row["messages"][:-1] == messages  # type: ignore[index]
        written = told.stderr + group.tail()
        assert max(map(len, written.splitlines()), default=0) < 4096
        assert "iVBORw0KGgo" not in written
