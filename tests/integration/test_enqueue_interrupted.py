"""`producer enqueue` killed, doubled or without room: the same call again is enough."""

import json
import re
import signal
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import pytest
import redis

from common import names
from common.ids import key_of
from common.models import Counts, InputRow
from common.queue import Runs
from common.store.frames import decompress
from tests.support.producer_cli import Ended, producer, running
from tests.support.redis_server import RedisServer
from tests.support.server_process import wait_until

ROWS = 4_500


class Durable(NamedTuple):
    """What a killed call has left: in the store, then in Redis."""

    record: bool = True
    accepted: int = ROWS
    seals: int = 0
    known: bool = True
    queued: int = 0
    open: int = 1
    sealed: bool = False


# A call of the ledger's script takes a thousand; an object of inputs/ holds all of them.
POINTS = {
    "enqueue.recorded": Durable(accepted=0, known=False, open=0),
    "enqueue.created": Durable(accepted=0, open=0),
    "enqueue.opened": Durable(accepted=0),
    "enqueue.revoked": Durable(accepted=0),
    "enqueue.inputs": Durable(),
    "enqueue.queued": Durable(queued=1_000),
    "enqueue.queued:3": Durable(queued=3_000),
    "enqueue.sealed": Durable(queued=ROWS, seals=1),
    "enqueue.closed": Durable(queued=ROWS, seals=1, open=0, sealed=True),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = (json.dumps({"id": number, "prompt": f"count to {number}"}) for number in range(ROWS))
    (tmp_path / "p.jsonl").write_text("".join(line + "\n" for line in lines))
    return tmp_path


@pytest.fixture
def arguments(valkey: RedisServer) -> list[str]:
    return [
        *("enqueue", "p.jsonl", "--output", "out", "--max-tokens", "64", "--json"),
        *("--redis", valkey.url),
    ]


def accepted(folder: Path) -> set[str]:
    return {
        msgspec.json.decode(line, type=InputRow).key
        for path in (folder / "out" / "inputs").glob("*.zst")
        for line in decompress(path.read_bytes()).splitlines()
    }


def queued_jobs(client: "redis.Redis") -> list[str]:
    raw = cast("list[bytes]", client.lrange(names.rq_queue("p"), 0, -1))
    return [key.decode() for key in raw]


def is_whole(folder: Path, client: "redis.Redis") -> None:
    """Every prompt once in the ledger, the queue and `inputs/`, and the run sealed."""
    keys = {key_of("p", b"%d" % number).hex() for number in range(ROWS)}
    runs = Runs(client)
    assert runs.counts("p") == Counts(total=ROWS, queued=ROWS)
    jobs = queued_jobs(client)
    assert set(jobs) == keys
    assert len(jobs) == ROWS
    assert accepted(folder) == keys
    state = runs.state("p")
    assert state is not None
    assert state.sealed
    last = max(path.name for path in (folder / "out" / "inputs").iterdir())
    assert "-seal-" in last


def durable(folder: Path, client: "redis.Redis") -> Durable:
    out = folder / "out"
    state = Runs(client).state("p")
    return Durable(
        record=(out / names.RUN_JSON).exists(),
        accepted=len(accepted(folder)),
        seals=len(list((out / "inputs").glob("*-seal-*"))),
        known=state is not None,
        queued=len(queued_jobs(client)),
        open=len(state.open_producers) if state else 0,
        sealed=state is not None and state.sealed,
    )


@pytest.mark.parametrize(("point", "expected"), POINTS.items())
def test_a_kill_anywhere_costs_nothing_but_the_same_call_again(
    folder: Path,
    arguments: list[str],
    redis_client: "redis.Redis",
    point: str,
    expected: Durable,
) -> None:
    killed = producer(*arguments, cwd=folder, env={"HEADRACE_CRASH_AT": point})
    found = durable(folder, redis_client)
    before = queued_jobs(redis_client)
    # No prompt is queued before it is in the store.
    assert set(before) <= accepted(folder)

    again = producer(*arguments, cwd=folder)

    assert killed.code == -signal.SIGKILL
    # The next call of the script may have been on its way.
    late = 1_000 if point.startswith("enqueue.queued") else 0
    assert found.queued - expected.queued in {0, late}
    assert found._replace(queued=expected.queued) == expected
    assert again.code == 0
    assert again.told["enqueued"] + again.told["already_queued"] == ROWS
    assert again.told["already_queued"] == len(before)
    is_whole(folder, redis_client)


def test_two_producers_of_one_file_at_once_make_one_run(
    folder: Path, arguments: list[str], redis_client: "redis.Redis"
) -> None:
    with running(*arguments, cwd=folder) as one, running(*arguments, cwd=folder) as other:
        ended = [process.communicate(timeout=60) for process in (one, other)]

    assert [one.returncode, other.returncode] == [0, 0], ended
    told = [json.loads(out) for out, _ in ended]
    assert sum(each["enqueued"] for each in told) == ROWS
    assert [each["enqueued"] + each["already_queued"] for each in told] == [ROWS, ROWS]
    is_whole(folder, redis_client)


def fill(client: "redis.Redis", room_bytes: int) -> None:
    """Leave about so much room below maxmemory."""
    # What the last test left is freed in the background, and would be room unlooked for.
    wait_until(
        lambda: client.info("memory")["lazyfree_pending_objects"] == 0, "memory to be freed"
    )
    used = int(client.info("memory")["used_memory"])
    client.config_set("maxmemory", used + room_bytes)


def until_it_says(process: Any, word: bytes) -> bytes:
    seen = b""
    while word not in seen:
        line = process.stderr.readline()
        assert line, seen
        seen += line
    return seen


def test_a_full_redis_is_waited_for_and_nothing_is_lost(
    folder: Path, arguments: list[str], redis_client: "redis.Redis"
) -> None:
    fill(redis_client, 1_000_000)
    with running(*arguments, cwd=folder) as process:
        until_it_says(process, b"Redis is full")
        within = Runs(redis_client).counts("p").total

        redis_client.config_set("maxmemory", 0)
        process.communicate(timeout=240)

    assert within < ROWS
    assert process.returncode == 0
    is_whole(folder, redis_client)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_waiting_for_room_may_be_interrupted_and_gone_on_with(
    folder: Path,
    arguments: list[str],
    redis_client: "redis.Redis",
    number: signal.Signals,
    code: int,
) -> None:
    fill(redis_client, 1_000_000)
    with running(*arguments, cwd=folder) as process:
        until_it_says(process, b"Redis is full")

        process.send_signal(number)
        _, err = process.communicate(timeout=120)
    redis_client.config_set("maxmemory", 0)
    again = producer(*arguments, cwd=folder)

    assert process.returncode == code
    assert b"the same call again goes on" in err
    assert b"Traceback" not in err
    assert again.code == 0
    is_whole(folder, redis_client)


def test_a_producer_that_was_killed_keeps_the_run_open(
    folder: Path, arguments: list[str], redis_client: "redis.Redis"
) -> None:
    producer(*arguments, cwd=folder, env={"HEADRACE_CRASH_AT": "enqueue.queued"})
    (folder / "q.jsonl").write_text('{"id":"other","prompt":"x"}\n')
    other = [*arguments, "--run", "p"]
    other[1] = "q.jsonl"

    ended = producer(*other, cwd=folder)

    state = Runs(redis_client).state("p")
    assert ended.code == 0
    assert state is not None
    assert not state.sealed


def test_a_redis_that_dies_on_the_way_ends_the_call_with_how_far_it_came(
    folder: Path, arguments: list[str], valkey: RedisServer
) -> None:
    client = valkey.client()
    fill(client, 1_000_000)
    with running(*arguments, cwd=folder) as process:
        until_it_says(process, b"Redis is full")
        valkey.kill()

        _, err = process.communicate(timeout=60)
    valkey.start()
    client.config_set("maxmemory", 0)
    again = producer(*arguments, cwd=folder)

    assert process.returncode == 4
    assert f"of {ROWS:,} prompts".encode() in err
    assert again.code == 0
    is_whole(folder, client)
    client.close()


def test_a_terminated_producer_leaves_no_temporary_folder(
    folder: Path, arguments: list[str], redis_client: "redis.Redis", tmp_path_factory: Any
) -> None:
    temporary: Path = tmp_path_factory.mktemp("tmp")
    fill(redis_client, 1_000_000)
    with running(*arguments, cwd=folder, env={"TMPDIR": str(temporary)}) as process:
        until_it_says(process, b"Redis is full")
        wait_until(lambda: any(temporary.iterdir()), "a spool")

        process.terminate()
        process.communicate(timeout=30)
    redis_client.config_set("maxmemory", 0)

    assert list(temporary.iterdir()) == []


def test_help_tells_of_every_flag(tmp_path: Path) -> None:
    ended: Ended = producer("enqueue", "--help", cwd=tmp_path)

    assert ended.code == 0
    for flag in ("--max-tokens", "--skip-invalid", "--accept-changes", "--id-field", "--dry-run"):
        assert flag in ended.out


def test_a_redis_that_stays_full_ends_the_call_which_says_how_far_it_got(
    folder: Path, arguments: list[str], redis_client: "redis.Redis"
) -> None:
    fill(redis_client, 1_000_000)
    with running(*arguments, "--room-wait", "0.5", cwd=folder) as process:
        _, said = process.communicate(timeout=120)

    assert process.returncode == 4
    assert b"--room-wait" in said
    assert re.search(rb"ended before the end: [\d,]+ of [\d,]+ prompts were added", said)
    redis_client.config_set("maxmemory", 0)
    with running(*arguments, cwd=folder) as process:
        process.communicate(timeout=120)
    assert process.returncode == 0
    is_whole(folder, redis_client)
