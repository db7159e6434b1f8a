"""`producer enqueue` with a real Redis: what is queued, counted, refused, and said."""

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import redis
from rq import Queue

from common import names
from common.ids import key_of
from common.models import InputRow, Outcome, Prompt, Result, RunRecord
from common.queue import Jobs, Ledger, Runs
from common.store import open_store
from common.store.directory import DirectoryStore
from common.store.frames import decompress
from tests.support.producer_cli import Ended, producer
from tests.support.redis_server import RedisServer
from tests.support.run_world import World
from tests.support.s3 import S3Server
from tests.support.server_process import wait_until
from tests.support.sinks import run_sink

Enqueue = Callable[..., Ended]


def rows(*pairs: tuple[Any, str]) -> str:
    return "".join(
        json.dumps({"prompt": text} if name is None else {"id": name, "prompt": text}) + "\n"
        for name, text in pairs
    )


def numbered(*numbers: int) -> str:
    return rows(*((number, f"count to {number}") for number in numbers))


@pytest.fixture
def enqueue(tmp_path: Path, valkey: RedisServer) -> Enqueue:
    """Write `text` to `name` and enqueue it to run r with output `out`."""

    def call(text: str, *flags: str, name: str = "p.jsonl", **settings: Any) -> Ended:
        (tmp_path / name).write_text(text)
        if "--max-tokens" not in flags:
            flags = ("--max-tokens", "64", *flags)
        return producer(
            *("enqueue", name, "--run", "r", "--output", "out", "--json"),
            *("--redis", valkey.url, *flags),
            cwd=tmp_path,
            **settings,
        )

    return call


@pytest.fixture
def runs(redis_client: "redis.Redis") -> Runs:
    return Runs(redis_client)


def input_rows(folder: Path) -> Iterator[InputRow]:
    for path in sorted((folder / "inputs").glob("*.zst")):
        for line in decompress(path.read_bytes()).splitlines():
            yield msgspec.json.decode(line, type=InputRow)


def seals(folder: Path) -> list[bool]:
    return [
        json.loads(path.read_bytes())["sealed"]
        for path in sorted((folder / "inputs").glob("*-seal-*"))
    ]


def finish(
    client: "redis.Redis", record: RunRecord, ids: Sequence[int], outcome: Outcome = "completed"
) -> None:
    """End prompts as a worker group does."""
    keys = [key_of(record.run, b"%d" % number) for number in ids]
    entries = Ledger(client, record).lookup(keys)
    results = [
        Result(
            run=record.run,
            uid=record.uid,
            key=key,
            fingerprint=entry.fingerprint if entry else b"",
            try_=entry.try_ if entry else 1,
            outcome=outcome,
            row=b"{}",
        )
        for key, entry in zip(keys, entries, strict=True)
    ]
    worker = Jobs(client, epoch="e1", group="gpu0@host", server="http://127.0.0.1:1")
    assert set(worker.finish(results)) == {"ok"}


def record_of(runs: Runs) -> RunRecord:
    record = runs.get("r")
    assert record is not None
    return record


def test_every_prompt_is_a_job_and_an_accepted_input(
    enqueue: Enqueue, runs: Runs, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    ended = enqueue(numbered(1, 2, 3))

    assert ended.code == 0
    assert (ended.told["enqueued"], ended.told["total"]) == (3, 3)
    keys = [key_of("r", b"%d" % number).hex() for number in (1, 2, 3)]
    assert Queue("r", connection=redis_client).job_ids == keys
    inputs = list(input_rows(tmp_path / "out"))
    assert [row.key for row in inputs] == keys
    assert [bytes(msgspec.json.decode(row.prompt, type=Prompt).id) for row in inputs] == [
        b"1",
        b"2",
        b"3",
    ]
    assert seals(tmp_path / "out") == [True]
    stored = msgspec.json.decode((tmp_path / "out" / "run.json").read_bytes(), type=RunRecord)
    assert stored == record_of(runs)
    assert stored.params.max_tokens == 64
    state = runs.state("r")
    assert state is not None
    assert state.sealed


def test_the_same_call_again_changes_nothing(enqueue: Enqueue, runs: Runs, tmp_path: Path) -> None:
    enqueue(numbered(1, 2, 3))
    before = sorted(path.name for path in (tmp_path / "out").rglob("*"))

    ended = enqueue(numbered(1, 2, 3))

    assert ended.code == 0
    assert (ended.told["enqueued"], ended.told["already_queued"]) == (0, 3)
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == before
    assert runs.counts("r").total == 3


def test_what_is_done_is_not_asked_again(
    enqueue: Enqueue, runs: Runs, redis_client: "redis.Redis"
) -> None:
    enqueue(numbered(1, 2, 3))
    finish(redis_client, record_of(runs), [1, 2])

    ended = enqueue(numbered(1, 2, 3))

    assert (ended.told["enqueued"], ended.told["already_done"]) == (0, 2)
    counts = runs.counts("r")
    assert (counts.completed, counts.queued) == (2, 1)


def test_a_run_is_the_union_of_its_files_and_an_addition_takes_success_away(
    enqueue: Enqueue, runs: Runs, tmp_path: Path
) -> None:
    enqueue(numbered(1, 2))
    success = tmp_path / "out" / names.SUCCESS
    success.write_bytes(b"{}")
    enqueue(numbered(1, 2))
    kept = success.exists()

    ended = enqueue(numbered(2, 3))

    assert kept
    assert not success.exists()
    assert (ended.told["enqueued"], ended.told["total"]) == (1, 3)
    assert runs.counts("r").total == 3


def test_an_inserted_row_without_id_is_one_new_request(enqueue: Enqueue, tmp_path: Path) -> None:
    folder = Path(__file__).parents[1] / "data" / "inputs"
    enqueue((folder / "B15_noid_v1.jsonl").read_text())

    ended = enqueue((folder / "B15_noid_v2.jsonl").read_text())

    assert (ended.told["enqueued"], ended.told["already_queued"]) == (1, 3)
    texts = [
        msgspec.json.decode(row.prompt, type=Prompt).body["messages"][0]["content"]
        for row in input_rows(tmp_path / "out")
    ]
    assert texts == ["Alpha?", "Beta?", "Gamma?", "Inserted first?"]


# --- another text for an id ---


def test_a_changed_prompt_is_a_conflict_and_nothing_is_queued(
    enqueue: Enqueue, runs: Runs, tmp_path: Path
) -> None:
    enqueue(numbered(1, 2))
    before = sorted(path.name for path in (tmp_path / "out").rglob("*"))

    ended = enqueue(rows((9, "new"), (2, "CHANGED")))

    assert ended.code == 5
    assert "id 2" in ended.err
    assert "line 2" in ended.err
    assert "CHANGED" not in ended.err
    assert runs.counts("r").total == 2
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == before


def test_accepted_changes_replace_what_is_not_done(
    enqueue: Enqueue, runs: Runs, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    enqueue(numbered(1, 2, 3))
    finish(redis_client, record_of(runs), [1])

    ended = enqueue(rows((1, "NEW"), (2, "NEW"), (3, "count to 3")), "--accept-changes")

    assert ended.code == 0
    assert (ended.told["replaced"], ended.told["unchanged"]) == (1, 1)
    assert "new run: id 1, p.jsonl line 1 (completed)" in ended.err
    key = key_of("r", b"2").hex()
    assert b"NEW" in cast("bytes", redis_client.hget(names.rq_job(key), "request"))
    assert [row.key for row in input_rows(tmp_path / "out")].count(key) == 2
    counts = runs.counts("r")
    assert (counts.total, counts.completed, counts.queued) == (3, 1, 2)


def test_accepted_changes_of_what_is_done_change_nothing_at_all(
    enqueue: Enqueue, runs: Runs, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    enqueue(numbered(1))
    finish(redis_client, record_of(runs), [1])
    (tmp_path / "out" / names.SUCCESS).write_bytes(b"{}")
    before = sorted(path.name for path in (tmp_path / "out").rglob("*"))

    ended = enqueue(rows((1, "NEW")), "--accept-changes")

    assert ended.told["unchanged"] == 1
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == before


def test_other_parameters_are_a_conflict_with_both_values_and_none_are_inherited(
    enqueue: Enqueue, tmp_path: Path, valkey: RedisServer
) -> None:
    enqueue(numbered(1), "--temperature", "0.5")

    other = enqueue(numbered(1), "--temperature", "0.7")
    none = producer(
        "enqueue", "p.jsonl", "--run", "r", "--redis", valkey.url, "--json", cwd=tmp_path
    )

    assert other.code == 5
    assert all(word in other.err for word in ("temperature", "0.5", "0.7"))
    assert none.code == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-tokens", "65"], ["max_tokens", "64", "65"]),
        (["--model", "m"], ["model", "not set", '"m"']),
        (["--partitions", "2"], ["partitions", "1", "2"]),
        (["--output", "elsewhere"], ["output", "/out", "elsewhere"]),
        (["--attempts", "5"], ["attempts", "3", "5"]),
        (["--param", "top_a=1"], ["top_a", "not set", "1"]),
        (["--keep-token-ids"], ["keep_token_ids", "false", "true"]),
    ],
)
def test_what_a_run_was_created_with_stays(
    enqueue: Enqueue, tmp_path: Path, flags: list[str], words: list[str]
) -> None:
    enqueue(numbered(1))

    ended = enqueue(numbered(1), *flags)

    assert ended.code == 5
    assert all(word in ended.err for word in words)
    assert not (tmp_path / "elsewhere").exists()


def test_a_run_that_keeps_token_ids_need_not_be_told_again(enqueue: Enqueue, runs: Runs) -> None:
    first = enqueue(numbered(1), "--keep-token-ids")

    again = enqueue(numbered(2))

    assert (first.code, again.code) == (0, 0), again.err
    record = runs.get("r")
    assert record is not None
    assert record.params.keep_token_ids


def test_the_output_of_another_run_is_refused(enqueue: Enqueue, runs: Runs) -> None:
    enqueue(numbered(1))

    ended = enqueue(numbered(1), "--run", "other")

    assert ended.code == 5
    assert "'r'" in ended.err
    assert runs.names() == ["r"]


def test_a_new_run_needs_an_output(tmp_path: Path, valkey: RedisServer) -> None:
    (tmp_path / "p.jsonl").write_text(numbered(1))

    ended = producer(
        "enqueue", "p.jsonl", "--redis", valkey.url, "--max-tokens", "5", cwd=tmp_path
    )

    assert ended.code == 2
    assert "--output" in ended.err


def test_a_cancelled_run_takes_no_prompts(enqueue: Enqueue, redis_client: "redis.Redis") -> None:
    enqueue(numbered(1))
    redis_client.hset(names.run("r"), "cancelled", "1")

    ended = enqueue(numbered(1, 2))

    assert ended.code == 5
    assert "cancelled" in ended.err


# --- bad rows ---


def test_a_bad_row_queues_nothing_and_makes_nothing(
    enqueue: Enqueue, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    ended = enqueue(numbered(1, 2) + "broken\n")

    assert ended.code == 3
    assert "line 3" in ended.err
    assert redis_client.keys() == []
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == []


def test_skipped_rows_are_written_beside_the_file_with_their_reasons(
    enqueue: Enqueue, tmp_path: Path
) -> None:
    text = rows((1, "a"), (2, "left")) + "broken\n" + rows((2, "RIGHT"), (3, "c"))

    ended = enqueue(text, "--skip-invalid")

    assert ended.code == 0
    assert (ended.told["enqueued"], ended.told["rejected"]) == (3, 2)
    lines = (tmp_path / "p.rejected.jsonl").read_text().splitlines()
    rejected = sorted((json.loads(line) for line in lines), key=lambda row: row["line"])
    assert [(row["line"], row["reason"]) for row in rejected] == [
        (3, "bad_json"),
        (4, "dup_id_conflict"),
    ]
    assert rejected[0]["row"] == "broken"


def test_a_file_refused_whole_queues_nothing_even_where_rows_may_be_skipped(
    enqueue: Enqueue, redis_client: "redis.Redis"
) -> None:
    ended = enqueue('[\n{"prompt":"a"}\n]\n', "--skip-invalid")

    assert ended.code == 3
    assert redis_client.keys() == []


# --- failures, later calls ---


def test_failed_prompts_are_tried_again_only_on_request(
    enqueue: Enqueue, runs: Runs, redis_client: "redis.Redis"
) -> None:
    enqueue(numbered(1, 2, 3))
    finish(redis_client, record_of(runs), [1])
    finish(redis_client, record_of(runs), [2, 3], "failed")

    without = enqueue(numbered(1, 2, 3))
    counted = runs.counts("r")
    again = enqueue(numbered(1, 2, 3), "--retry-failed")

    assert without.code == 1
    assert "--retry-failed" in without.err
    assert (counted.failed, counted.queued) == (2, 0)
    assert again.code == 0
    assert (again.told["retried"], again.told["already_done"]) == (2, 1)
    counts = runs.counts("r")
    assert (counts.completed, counts.failed, counts.queued) == (1, 0, 2)


def test_a_run_stays_open_until_a_call_says_that_no_more_will_come(
    enqueue: Enqueue, runs: Runs, tmp_path: Path
) -> None:
    enqueue(numbered(1), "--keep-open")
    opened = runs.state("r")
    enqueue(numbered(2))
    sealed = runs.state("r")

    assert opened is not None
    assert sealed is not None
    assert (opened.sealed, sealed.sealed) == (False, True)
    assert seals(tmp_path / "out") == [False, True]


def test_a_pilot_is_part_of_the_run_that_follows(enqueue: Enqueue) -> None:
    pilot = enqueue(numbered(*range(20)), "--limit", "5")
    rest = enqueue(numbered(*range(20)))

    assert (pilot.told["enqueued"], pilot.told["total"]) == (5, 5)
    assert (rest.told["enqueued"], rest.told["already_queued"], rest.told["total"]) == (15, 5, 20)


def test_a_removed_job_is_put_back(enqueue: Enqueue, redis_client: "redis.Redis") -> None:
    enqueue(numbered(1, 2, 3))
    Queue("r", connection=redis_client).empty()  # type: ignore[no-untyped-call]

    ended = enqueue(numbered(1, 2, 3))

    assert (ended.told["restored"], ended.told["already_queued"]) == (3, 3)
    assert Queue("r", connection=redis_client).count == 3


def test_a_redis_that_lost_everything_gets_the_run_back_from_the_store(
    enqueue: Enqueue, runs: Runs, redis_client: "redis.Redis"
) -> None:
    enqueue(numbered(1, 2, 3))
    uid = record_of(runs).uid
    redis_client.flushall()

    # Also what stood in files that this call does not name.
    ended = enqueue(numbered(3, 4))

    assert ended.code == 0
    assert (ended.told["enqueued"], ended.told["total"]) == (2, 4)
    assert record_of(runs).uid == uid
    assert Queue("r", connection=redis_client).count == 4


def test_a_cancellation_outlives_a_redis_that_lost_everything(
    enqueue: Enqueue, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    enqueue(numbered(1))
    (tmp_path / "out" / names.CANCELLED).write_bytes(b"{}")
    redis_client.flushall()

    ended = enqueue(numbered(1, 2))

    assert ended.code == 5
    assert "cancelled" in ended.err


def test_what_the_store_has_is_not_asked_again_after_redis_lost_everything(
    tmp_path: Path, valkey: RedisServer, redis_client: "redis.Redis"
) -> None:
    world = World(redis_client, DirectoryStore(tmp_path / "out"), prompts=10)
    world.finish(range(6))
    sink = run_sink(world, rows=6)
    wait_until(lambda: bool(sink.step()) and world.waiting() == 0, "all is in the store")
    redis_client.flushall()
    (tmp_path / "p.jsonl").write_text(rows(*((n, f"prompt {n}") for n in range(10))))

    ended = producer(
        *("enqueue", "p.jsonl", "--run", world.record.run, "--output", "out", "--json"),
        *("--redis", valkey.url),
        cwd=tmp_path,
    )

    assert ended.code == 0, ended.err
    assert (ended.told["enqueued"], ended.told["already_done"]) == (4, 6)
    world.check_counts()


# --- Redis as it should not be ---


def test_a_redis_that_evicts_is_refused(enqueue: Enqueue, redis_client: "redis.Redis") -> None:
    redis_client.config_set("maxmemory-policy", "allkeys-lru")

    ended = enqueue(numbered(1))

    assert ended.code == 4
    assert "noeviction" in ended.err


def test_a_redis_that_is_away_is_told_without_its_password(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(numbered(1))

    ended = producer(
        *("enqueue", "p.jsonl", "--output", "out", "--max-tokens", "5"),
        *("--redis", "redis://user:secret-word@127.0.0.1:1/0"),
        cwd=tmp_path,
    )

    assert ended.code == 4
    assert "127.0.0.1:1" in ended.err
    assert "secret-word" not in ended.err + ended.out


@pytest.mark.parametrize("way", ["flag", "HEADRACE_REDIS", "RQ_REDIS_URL"])
def test_the_next_lines_never_hold_the_password(
    tmp_path: Path, valkey: RedisServer, redis_client: "redis.Redis", way: str
) -> None:
    (tmp_path / "p.jsonl").write_text(numbered(1))
    redis_client.acl_setuser(
        "guest", enabled=True, passwords=["+secret-word"], keys=["*"], commands=["+@all"]
    )
    url = f"redis://guest:secret-word@127.0.0.1:{valkey.port}/0"

    ended = producer(
        *("enqueue", "p.jsonl", "--output", "out", "--max-tokens", "5"),
        *(("--redis", url) if way == "flag" else ()),
        cwd=tmp_path,
        env={} if way == "flag" else {way: url},
    )

    redis_client.acl_deluser("guest")
    assert ended.code == 0
    assert "secret-word" not in ended.err + ended.out
    variable = "HEADRACE_REDIS" if way == "flag" else way
    assert f'rq info -u "${variable}" p' in ended.err
    assert ("export HEADRACE_REDIS=" in ended.err) is (way == "flag")


def test_the_next_lines_can_be_typed_as_they_stand(enqueue: Enqueue, valkey: RedisServer) -> None:
    ended = enqueue(numbered(1))

    assert f"rq info -u '{valkey.url}' r" in ended.err
    assert "workers up --attach 30000 --redis" in ended.err


def test_ten_thousand_prompts_take_few_round_trips(
    enqueue: Enqueue, redis_client: "redis.Redis"
) -> None:
    redis_client.config_resetstat()

    enqueue(numbered(*range(10_000)))

    stats = redis_client.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] < 25


def test_the_store_can_be_an_s3_prefix(enqueue: Enqueue, moto: S3Server, runs: Runs) -> None:
    bucket = moto.new_bucket()
    output = f"s3://{bucket}/a/b"

    ended = enqueue(numbered(1, 2), "--output", output, "--endpoint-url", moto.url)

    assert ended.code == 0, ended.err
    record = record_of(runs)
    assert (record.output, record.endpoint_url) == (output, moto.url)
    store = open_store(record.output, record.endpoint_url)
    assert [item.name.partition("-")[0] for item in store.list("inputs/")] == [
        "inputs/00000001",
        "inputs/00000002",
    ]


def test_after_a_pilot_the_next_lines_look_at_it_and_go_on(
    enqueue: Enqueue, valkey: RedisServer, tmp_path: Path
) -> None:
    pilot = enqueue(numbered(*range(20)), "--limit", "5")
    typed = producer(
        *("enqueue", "p.jsonl", "--run", "r", "--output", "out", "--max-tokens", "64"),
        *("--limit=7", f"-u{valkey.url}"),
        cwd=tmp_path,
    )

    assert f"producer peek r --redis '{valkey.url}'" in pilot.err
    said = [line.strip() for line in typed.err.splitlines()]
    [line] = [line for line in said if line.startswith("producer enqueue p.jsonl --run r ")]
    words = shlex.split(line, comments=True)
    assert words[3:] == [
        *("--run", "r", "--output", "out", "--max-tokens", "64", "--redis", valkey.url)
    ]
    rest = producer(*words[1:], "--json", cwd=tmp_path)
    assert (rest.told["already_queued"], rest.told["total"]) == (7, 20)
    assert "producer peek" not in rest.err


def test_a_pilot_whose_limit_is_a_setting_says_which_setting_to_take_out(
    tmp_path: Path, valkey: RedisServer
) -> None:
    (tmp_path / "p.jsonl").write_text(numbered(1, 2))
    (tmp_path / "headrace.toml").write_text("[producer.enqueue]\nlimit = 1\n")
    arguments = ("enqueue", "p.jsonl", "--output", "out", "--max-tokens", "5")

    by_file = producer(*arguments, "--redis", valkey.url, cwd=tmp_path)
    by_variable = producer(
        *arguments, "--redis", valkey.url, cwd=tmp_path, env={"HEADRACE_LIMIT": "1"}
    )

    place = "headrace.toml, [producer.enqueue] limit"
    assert f"# without {place} the rest: nothing is asked twice" in by_file.err
    assert "# without HEADRACE_LIMIT the rest: nothing is asked twice" in by_variable.err


def test_the_line_that_goes_on_after_a_pilot_holds_no_password(
    tmp_path: Path, valkey: RedisServer, redis_client: "redis.Redis"
) -> None:
    (tmp_path / "p.jsonl").write_text(numbered(1, 2))
    redis_client.acl_setuser(
        "guest", enabled=True, passwords=["+secret-word"], keys=["*"], commands=["+@all"]
    )
    url = f"redis://guest:secret-word@127.0.0.1:{valkey.port}/0"

    for address in (("--redis", url), (f"--url={url}",), ("-u", url), (f"-u{url}",)):
        ended = producer(
            *("enqueue", "p.jsonl", "--output", "out", "--max-tokens", "5", "--limit", "1"),
            *address,
            cwd=tmp_path,
        )
        assert ended.code == 0
        assert "nothing is asked twice" in ended.err
        assert "secret-word" not in ended.err + ended.out

    redis_client.acl_deluser("guest")
