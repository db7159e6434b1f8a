"""A whole deployment with a made-up secret in every place, troubled in every way: none gets out.

Looked through at the end: logs, what commands printed, command lines of all processes, every name
and value in Redis, every name and byte of the store, the state directory.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import zstandard
from typing_extensions import override

from common import names
from tests.support import programs
from tests.support.fleet import Fleet
from tests.support.redis_server import RedisServer
from tests.support.telltale import (
    ADMIN_KEY,
    ANSWER,
    API_KEY,
    NOTIFY,
    PROMPT,
    telltale_server,
)
from tests.support.watching import QUICK_SINK, timed

pytestmark = pytest.mark.timeout(400)

RUN = "job"
PASSWORD = "canary-secret-of-redis"
AWS = "canary-secret-of-s3"
TOKEN = "canary-secret-of-the-session"
SECRETS = (PASSWORD, API_KEY, ADMIN_KEY, NOTIFY, AWS, TOKEN)
PROMPTS = 40


class GuardedRedis(RedisServer):
    """A Redis that wants a password."""

    def __init__(self) -> None:
        super().__init__("valkey", appendonly=True, settings={"requirepass": PASSWORD})

    @property
    @override
    def url(self) -> str:
        return f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"


@contextmanager
def command_lines() -> Iterator[set[str]]:
    """Every command line of our processes below this one, as anybody on the host can read them."""
    seen: set[str] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.05):
            for process in psutil.Process().children(recursive=True):
                try:
                    seen.add(" ".join(process.cmdline()))
                except psutil.Error:
                    continue

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def in_redis(client: "redis.Redis") -> Iterator[tuple[str, str]]:
    """Every value in Redis: (key and member, value)."""
    readers: dict[Any, Callable[[bytes], Any]] = {
        b"string": client.get,
        b"hash": client.hgetall,
        b"list": lambda key: client.lrange(key, 0, -1),
        b"set": client.smembers,
        b"zset": lambda key: client.zrange(key, 0, -1, withscores=True),
        b"stream": client.xrange,
    }
    for key in client.scan_iter():
        found = readers[client.type(key)](key)
        if isinstance(found, dict):
            for member, value in found.items():
                yield f"{key.decode()} {member.decode(errors='replace')}", repr(value)
        else:
            yield key.decode(), repr(found)


def in_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Every file: (its path, what it holds, unpacked)."""
    for path in folder.rglob("*"):
        if not path.is_file():
            yield str(path), ""
            continue
        data = path.read_bytes()
        if path.suffix == ".zst":
            data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
        yield str(path), data.decode(errors="replace")


def prompts(folder: Path) -> Path:
    kinds = ["say", "refuse 400", "refuse 500", "break off"]
    rows = [{"id": f"p{n}", "prompt": f"{kinds[n % 4]} {n} {PROMPT}"} for n in range(PROMPTS)]
    path = folder / f"{RUN}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trouble(fleet: Fleet) -> None:
    """Kill what can be killed, while it works."""
    fleet.wait(lambda: fleet.counts(RUN).completed > 0, "the first answer")
    fleet.redis.kill()
    fleet.processes.pop("sink").kill()
    fleet.redis.start()
    fleet.start_sink("sink", *QUICK_SINK, "--log-level", "DEBUG")


def commands(fleet: Fleet) -> str:
    """What every command prints that is not asked for prompts."""
    said = []
    wrong = {**fleet.env, "HEADRACE_REDIS": fleet.redis.url.replace("redis://:", "redis://x:")}
    for arguments, env in (
        (("status", RUN, "--json"), fleet.env),
        (("config",), fleet.env),
        (("verify", RUN), fleet.env),
        (("status", RUN), wrong),
        (("status", RUN, "--redis", f"redis://:{PASSWORD}@127.0.0.1:1/0"), fleet.env),
        (("enqueue", "absent.jsonl", "--output", f"s3://a:{AWS}@b/c"), fleet.env),
        (("enqueue", f"{RUN}.jsonl", "--run", "x", "--max-tokens", "5", "--output", "s3://b/c",
          "--endpoint-url", f"http://a:{AWS}@127.0.0.1:1"), fleet.env),
    ):  # fmt: skip
        kept, fleet.env = fleet.env, env
        done = fleet.producer(*arguments, check=False)
        fleet.env = kept
        assert "Traceback" not in done.stderr, done.stderr
        said.append(done.stdout + done.stderr)
    return "\n".join(said)


def test_no_secret_and_no_prompt_gets_where_it_does_not_belong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is forked has the command line of what it was forked from.
    monkeypatch.setenv(programs.ALWAYS_EXEC, "1")
    with telltale_server() as url, command_lines() as lines:
        env = {
            **timed(),
            "HEADRACE_API_KEY": API_KEY,
            "HEADRACE_NOTIFY": f"{url}/hook/{NOTIFY}",
            "AWS_ACCESS_KEY_ID": "example",
            "AWS_SECRET_ACCESS_KEY": AWS,
            "AWS_SESSION_TOKEN": TOKEN,
            "HEADRACE_LEASES": json.dumps({"slots_ms": 3_000, "sink_ms": 3_000, "turn_ms": 6_000}),
        }
        guarded = GuardedRedis().start()
        try:
            with Fleet(tmp_path, redis=guarded, env=env) as fleet:
                fleet.enqueue(prompts(tmp_path))
                # Two worker groups, so that a parent passes everything on to children.
                server = f"{url}/gpu{{gpu}}"
                fleet.spawn("groups", "workers", "start", "--gpu", "0-1", "--server", server)
                fleet.start_sink("sink", *QUICK_SINK)
                trouble(fleet)
                counts = fleet.wait_done(RUN)
                assert (counts.completed, counts.failed) == (PROMPTS // 2, PROMPTS // 2)
                said = commands(fleet)
                kept = list(in_redis(fleet.client))
        finally:
            guarded.remove()

    # What a user types is the user's; what we start ourselves is not.
    ours = [line for line in lines if "-m workers" in line]
    assert len(ours) >= 4
    files = list(in_files(tmp_path))
    for where, text in [("command lines", "\n".join(ours)), ("commands", said), *kept, *files]:
        found = [secret for secret in SECRETS if secret in where or secret in text]
        assert not found, (where, found)
    check_prompts(tmp_path, said, kept=kept, files=files)


def check_prompts(
    folder: Path, said: str, *, kept: list[tuple[str, str]], files: list[tuple[str, str]]
) -> None:
    """Prompts and answers are where they belong, and nowhere else."""
    rows = {f"{folder}/out/{part}" for part in (names.INPUTS, names.SHARDS, names.FAILURES)}
    allowed = (*rows, str(folder / f"{RUN}.jsonl"))
    for text in (PROMPT, ANSWER):
        assert text not in said
        for where, value in kept:
            in_job = where.startswith(names.RQ_JOB_STEM) and where.endswith(" request")
            assert text not in where
            assert text not in value or in_job or ":results:" in where, where
        held = [path for path, value in files if text in value]
        assert text not in "".join(path for path, _ in files)
        assert held
        assert all(path.startswith(allowed) for path in held), held
