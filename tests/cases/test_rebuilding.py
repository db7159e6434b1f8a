"""Cases of a run that Redis has lost, or that is nearly done: the store gives it back, soon."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common import manifests, names, object_names
from common.ids import fingerprint_of, key_of
from common.models import Entry, Params, Prompt, RunRecord, Seal
from common.store import ObjectStore, open_store
from common.store.directory import DirectoryStore
from common.store.frames import compress, digest_name
from tests.support import measured
from tests.support.producer_cli import environment, producer
from tests.support.redis_server import RedisServer
from tests.support.run_world import RUN as WORLD_RUN
from tests.support.run_world import World
from tests.support.s3 import CREDENTIALS, S3Server
from tests.support.sinks import drain, run_sink
from workers.sink.batch import Place, build

pytestmark = pytest.mark.timeout(600)

RUN = "job"
FULL_ROWS = 1_000_000
ROWS = int(os.environ.get("HEADRACE_CASES_ROWS") or FULL_ROWS // 20)
"""Rows of B55; with HEADRACE_CASES_ROWS=1000000 it runs at its own size."""
OBJECT_ROWS = 20_000
WHEN = "2026-01-01T00:00:00+00:00"


def test_b55_a_run_of_which_nearly_all_is_done_is_ready_soon(
    tmp_path: Path, server: RedisServer
) -> None:
    """Redis is empty as well, so that all is read from the store first."""
    left = ROWS // 1000
    make_store(DirectoryStore(tmp_path / "out"), rows=ROWS, done=ROWS - left)
    file = tmp_path / f"{RUN}.jsonl"
    with file.open("wb") as lines:
        lines.writelines(b'{"id":%d,"prompt":"say %d"}\n' % (n, n) for n in range(ROWS))
    flags = ["--output", "out", "--max-tokens", "8", "--json", "--redis", server.url]

    lost, cost = cost_of(server, "enqueue", file, *flags, cwd=tmp_path)
    again, cost_again = cost_of(server, "enqueue", file, *flags, cwd=tmp_path)

    assert (lost["enqueued"], lost["already_done"]) == (left, ROWS - left)
    assert (again["already_queued"], again["already_done"]) == (left, ROWS - left)
    for each in (cost, cost_again):
        # Processor time: the case allows two minutes of one core for a million.
        assert each.cpu_s < 5 + 120 * ROWS / FULL_ROWS
        assert each.rss_bytes < 500 * 2**20
    assert cost_again.round_trips < 100 + 2000 * ROWS / FULL_ROWS
    assert cost.round_trips < 200 + 3000 * ROWS / FULL_ROWS


class Cost(msgspec.Struct):
    """What a command cost: processor time, its own and Redis's; its memory; answers of Redis."""

    cpu_s: float
    rss_bytes: int
    round_trips: int


def cost_of(server: RedisServer, *arguments: str | Path, cwd: Path) -> tuple[dict[str, Any], Cost]:
    """Run a producer command; give its JSON and its cost."""
    client = server.client()
    before, cpu = client.info("stats"), client.info("cpu")
    command = [sys.executable, "-m", "producer", *map(str, arguments)]
    done = measured.run(command, cwd=cwd, env=environment())
    after, cpu_after = client.info("stats"), client.info("cpu")
    client.close()
    spent_s = sum(cpu_after[name] - cpu[name] for name in ("used_cpu_user", "used_cpu_sys"))
    cost = Cost(
        cpu_s=done.cpu_s + spent_s,
        rss_bytes=done.peak_bytes,
        round_trips=after["total_writes_processed"] - before["total_writes_processed"],
    )
    return json.loads(done.out), cost


def make_store(store: ObjectStore, *, rows: int, done: int) -> None:
    """Write what a run leaves that has come so far."""
    store.probe()
    uid = "a" * 32
    record = RunRecord(
        run=RUN, uid=uid, params=Params(max_tokens=8), output=store.url, created_at=WHEN
    )
    store.put_if_absent(names.RUN_JSON, msgspec.json.encode(record))
    for seq, first in enumerate(range(0, rows, OBJECT_ROWS), 1):
        numbers = range(first, min(first + OBJECT_ROWS, rows))
        entries = [entry_of(n) for n in numbers]
        lines = b"".join(
            b'{"key":"%b","fp":"%b","prompt":%b}\n'
            % (each.key.hex().encode(), each.fingerprint.hex().encode(), prompt_of(n))
            for each, n in zip(entries, numbers, strict=True)
        )
        sha256, digest = digest_name(lines)
        store.put_if_absent(
            object_names.inputs_object(seq, digest), compress(lines), rows_sha256=sha256
        )
        ended = entries[: max(done - first, 0)]
        batch = build(ended, Place(uid=uid, partition=0, seq=seq), written_at=WHEN)
        for part in batch.parts:
            store.put_if_absent(part.file.name, part.data, rows_sha256=part.file.sha256)
        manifests.write(store, batch.manifest)
    seal = msgspec.json.encode(Seal(sealed=True, source="x", rows=rows, ended_at=WHEN))
    last = -(-rows // OBJECT_ROWS) + 1
    store.put_if_absent(object_names.seal_object(last, digest_name(seal)[1]), seal)


def body_of(number: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"say {number}"}]}


def entry_of(number: int) -> Entry:
    return Entry(
        entry_id=f"1-{number}",
        key=key_of(RUN, b"%d" % number),
        fingerprint=fingerprint_of("chat", body_of(number)),
        try_=1,
        outcome="completed",
        row=b"{}",
        input_tokens=1,
        output_tokens=1,
    )


def prompt_of(number: int) -> bytes:
    prompt = Prompt(
        id=msgspec.Raw(b"%d" % number),
        line=number + 1,
        endpoint="chat",
        body=body_of(number),
        source="job.jsonl",
    )
    return msgspec.json.encode(prompt)


# --- B57 -----------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as running_server:
        yield running_server


@pytest.fixture
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ObjectStore, list[str]]]:
    """An output, and the flags that name it."""
    if request.param == "directory":
        yield DirectoryStore(tmp_path / "out"), ["--output", str(tmp_path / "out")]
        return
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with S3Server("moto") as s3:
        url = f"s3://{s3.new_bucket()}/run"
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.url)
        yield open_store(url), ["--output", url]


@pytest.mark.parametrize(
    ("command", "loss", "place"),
    [
        ("enqueue", "flushed", "directory"),
        ("resume", "flushed", "directory"),
        ("both", "gone", "directory"),
        ("enqueue", "gone", "s3"),
        ("resume", "flushed", "s3"),
    ],
    indirect=["place"],
)
def test_b57_a_run_that_redis_lost_goes_on_from_its_store(
    server: RedisServer,
    place: tuple[ObjectStore, list[str]],
    tmp_path: Path,
    command: str,
    loss: str,
) -> None:
    store, flags = place
    world = World(server.client(), store, prompts=1000)
    world.finish(range(600))
    sink = run_sink(world, rows=600)
    sink.step()
    sink.release()
    assert world.waiting() == 0
    if loss == "flushed":
        world.client.flushall()
    else:
        server.wipe()
        world.use(server.client())
    file = tmp_path / "p.jsonl"
    rows = ({"id": n, "prompt": f"prompt {n}"} for n in range(1000))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    env = {"HEADRACE_REDIS": server.url}
    if command != "enqueue":
        resumed = producer("resume", WORLD_RUN, *flags, "--json", cwd=tmp_path, env=env)
        assert resumed.code == 0, resumed.err
    if command != "resume":
        enqueued = producer(
            "enqueue", file, "--run", WORLD_RUN, *flags, "--json", cwd=tmp_path, env=env
        )
        assert enqueued.code == 0, enqueued.err
        new = "enqueued" if command == "enqueue" else "already_queued"
        assert (enqueued.told[new], enqueued.told["already_done"]) == (400, 600)

    counts = world.runs.counts(WORLD_RUN)
    assert (counts.total, counts.completed, counts.queued) == (1000, 600, 400)
    world.finish(range(600, 1000))
    drain(run_sink(world, rows=200))
    world.check_store()
    world.check_counts()
    assert len(world.current()) == 1000
    world.close()
