"""A run whose shards are Parquet: the same rows, byte for byte, and columns to train on."""

import importlib.util
import io
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import redis

from common import catalog, names
from common.errors import StoreDamagedError, UsageError
from common.models import Params
from common.queue.sinklease import new_token
from common.store import open_store
from common.store.parquet import check_pyarrow, from_parquet, to_parquet
from producer.export import Target, export
from producer.meter import Meter
from producer.objects import fault_of, load
from tests.support.run_world import World
from tests.support.sinks import drain, expire_lease, killed_at, partition_sink, run_sink
from tests.support.skips import skip_cannot_run
from workers.sink.run_sink import Standing

PYARROW = importlib.util.find_spec("pyarrow") is not None


@pytest.fixture
def world(redis_client: "redis.Redis", tmp_path: Path) -> World:
    if not PYARROW:
        skip_cannot_run("pyarrow is not installed (the extra `parquet`)")
    made = World(redis_client, open_store(str(tmp_path / "out")))
    made.record = msgspec.structs.replace(made.record, params=Params(format="parquet"))
    return made


def test_rows_come_back_byte_for_byte(world: World) -> None:
    world.finish(range(8))
    with killed_at("sink.shards"):
        partition_sink(world, token=new_token()).store_one()
    expire_lease(world)
    world.finish([8], "failed")
    world.finish([9], text="ä € 𝄞")

    assert drain(run_sink(world)) is Standing.FAILED

    every = catalog.manifests_of(world.store, world.record.uid)
    rows = [row for m in every for row in catalog.rows(world.store, m.shard)]
    expected = [world.result(n).row for n in range(8)] + [world.result(9, text="ä € 𝄞").row]
    assert rows == expected
    assert all(m.shard.name.endswith(".parquet") for m in every if m.shard)
    world.check_store()
    world.check_counts()


def test_verify_and_export_read_it(world: World, tmp_path: Path) -> None:
    world.finish(range(10))
    assert drain(run_sink(world)) is Standing.COMPLETED

    every = catalog.manifests_of(world.store, world.record.uid)
    for part in [manifest.shard for manifest in every if manifest.shard]:
        assert fault_of(part, load(world.store, part.name), rows=part.rows) == ""
    to = tmp_path / "a.jsonl"
    told = export(world.record, world.store, Target(to=str(to)), meter=Meter)
    assert told.whole
    assert to.read_bytes().splitlines() == [world.result(n).row for n in range(10)]


def test_the_columns_are_ready_to_train_on(world: World) -> None:
    world.finish(range(10))
    drain(run_sink(world))
    [shard, *_] = [
        found.name for found in world.store.list(names.SHARDS) if found.name.endswith(".parquet")
    ]

    data = world.store.get(shard)
    assert data is not None
    parquet = importlib.import_module("pyarrow.parquet")
    path = Path(world.store.url) / shard
    [first, *_] = parquet.read_table(path).to_pylist()
    assert [(one["role"], one["content"]) for one in first["messages"]] == [
        ("assistant", "answer")
    ]
    assert first["id"] == "0"
    assert first["completion_tokens"] == 6


def test_messages_in_parts_and_rows_without_choices_are_kept() -> None:
    if not PYARROW:
        skip_cannot_run("pyarrow is not installed (the extra `parquet`)")
    rows = [
        b'{"id":"a","key":"k1","messages":[{"role":"user","content":[{"type":"text"}]}]}',
        b'{"id":7,"key":"k2","messages":null,"choices":[{"content":null}]}',
    ]

    assert from_parquet(to_parquet(rows)) == b"\n".join([*rows, b""])


READ_AND_END = """
import sys
from concurrent.futures import ThreadPoolExecutor
from common.store.parquet import from_parquet
data = sys.stdin.buffer.read()
pool = ThreadPoolExecutor(2)
for reading in [pool.submit(from_parquet, data) for _ in range(3)]:
    reading.result()
"""


def test_a_process_that_read_parquet_in_threads_ends_well(world: World) -> None:
    """Arrow's own threads took one in ten down, after all was done."""
    data = to_parquet([world.result(n).row for n in range(40)])
    # No lucky number: with the fault, 15 of them pass in one of five tries.
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", READ_AND_END], stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(15)
    ]
    ended = [process.communicate(data) for process in processes]

    assert [process.returncode for process in processes] == [0] * 15, ended


def test_damage_is_told_as_such() -> None:
    if not PYARROW:
        skip_cannot_run("pyarrow is not installed (the extra `parquet`)")
    with pytest.raises(StoreDamagedError):
        from_parquet(b"PAR1 and nothing more")


@pytest.mark.skipif(PYARROW, reason="cannot run here: pyarrow is installed")
def test_without_pyarrow_the_extra_is_named() -> None:
    with pytest.raises(UsageError, match=r"headrace\[parquet\]"):
        check_pyarrow()


def test_a_run_in_jsonl_needs_no_pyarrow(redis_client: "redis.Redis", tmp_path: Path) -> None:
    world = World(redis_client, open_store(str(tmp_path / "out")))
    world.finish(range(10))

    assert drain(run_sink(world)) is Standing.COMPLETED
    assert all(found.name.endswith(".jsonl.zst") for found in world.store.list(names.SHARDS))


def test_token_ids_have_columns_in_a_run_that_keeps_them(world: World) -> None:
    with_ids = msgspec.json.decode(world.result(0).row)
    with_ids["choices"] = [{"token_ids": [5, 6, 151_645], "loss_mask": [0, 0, 1]}]
    plain = world.result(1).row

    read = importlib.import_module("pyarrow.parquet").read_table
    kept = read(io.BytesIO(to_parquet([msgspec.json.encode(with_ids)])))
    assert kept.column("token_ids").to_pylist() == [[5, 6, 151_645]]
    assert kept.column("loss_mask").to_pylist() == [[0, 0, 1]]
    assert read(io.BytesIO(to_parquet([plain]))).column("token_ids").to_pylist() == [None]
