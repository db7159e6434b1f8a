"""Another program on one Redis, with keys and an RQ queue, beside two runs (case B96)."""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common import names
from common.ids import key_of
from tests.acceptance.test_main_job import answers_its_own_request
from tests.support.fleet import Fleet, read_rows, write_prompts
from tests.support.redis_contents import contents
from tests.support.rq_tools import RqTools

QUICK = ("--batch-seconds", "1", "--first-batch-seconds", "1")
COUNT = 60
RUNS = ("one", "two")

KEYLESS = {
    *("auth", "client", "discard", "evalsha", "exec", "hello", "info", "multi", "ping", "publish"),
    *("script", "select", "subscribe", "time", "unsubscribe"),
}
"""Commands whose first argument is no key; everything else is taken to name one."""
SEVERAL = {"del", "exists", "unlink"}
"""Commands of which every argument is a key."""
CALLED = re.compile(rb'^\S+ \[0 [^\]]*\] "([^"]+)"(.*)$')
ARGUMENT = re.compile(rb'"((?:[^"\\]|\\.)*)"')

OF_A_RUN = re.compile(
    r"headrace:(?:run|tombstone|forgetting):(?:one|two)(?::[\w:]+)?"
    r"|rq:(?:queue|wip|failed|canceled|finished|deferred|scheduled|ready|workers"
    r"|clean_registries):(?:one|two)"
)
SHARED = re.compile(
    r"headrace:(?:runs|runs:none|worker_groups|present|telemetry(?::gpu0@[\w.-]+)?|renewed:\w+"
    r"|(?:slots|drain):http://[\w.-]+:\d+)"
    r"|rq:(?:queues|workers|suspended|worker:gpu0@[\w.@-]+(?::\w+)?)"
)


class Heard:
    """What Redis was asked while it was listened to: command by command, keys by name."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    @property
    def commands(self) -> set[str]:
        return {match[1].decode().lower() for match in self._matches()}

    def keys(self) -> set[str]:
        """Every key that any of the commands named."""
        found = set()
        for match in self._matches():
            command = match[1].decode().lower()
            if command in KEYLESS:
                continue
            arguments = ARGUMENT.findall(match[2])
            found |= set(arguments if command in SEVERAL else arguments[:1])
        return {key.decode() for key in found}

    def _matches(self) -> Iterator[re.Match[bytes]]:
        for line in self.lines:
            match = CALLED.match(line)
            if match is not None:
                yield match


@contextmanager
def listening(path: Path) -> Iterator[Heard]:
    """Read all that MONITOR tells, on a connection of its own; whole when the block is left."""
    heard, end = Heard(), b"the last that is heard"
    with socket.socket(socket.AF_UNIX) as wire:
        wire.settimeout(60)
        wire.connect(str(path))
        wire.sendall(b"MONITOR\r\n")
        stream = wire.makefile("rb")
        assert stream.readline() == b"+OK\r\n"

        def read() -> None:
            for line in stream:
                if end in line:
                    return
                heard.lines.append(line[1:].strip())

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield heard
        finally:
            with socket.socket(socket.AF_UNIX) as last:
                last.connect(str(path))
                last.sendall(b'ECHO "%b"\r\n' % end)
                last.recv(100)
            reader.join(60)
    assert not reader.is_alive()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path, latency="lognormal:0.05:1", cap=16) as made:
        yield made


def their_keys(fleet: Fleet) -> dict[bytes, object]:
    """Every key of the other program, with its value."""
    return {
        key: value
        for key, value in contents(fleet.client).items()
        if not key.startswith(b"headrace:") and not is_ours(key.decode())
    }


def is_ours(key: str) -> bool:
    """Whether a key may be one of Headrace's, by the two runs that there are."""
    job = re.fullmatch(r"rq:(?:job|results|executions):(\w+)", key)
    if job is not None:
        return job[1] in JOBS
    return bool(OF_A_RUN.fullmatch(key) or SHARED.fullmatch(key))


JOBS = {key_of(run, b'"p%d"' % number).hex() for run in RUNS for number in range(COUNT)}


def whole_life(fleet: Fleet, out: dict[str, Path]) -> None:
    """Everything that a run goes through, with two runs of the same ids side by side."""
    for name in RUNS:
        file = write_prompts(fleet.folder / f"{name}.jsonl", COUNT, text=f"{name} {{i}}")
        fleet.producer("enqueue", str(file), "--output", str(out[name]), "--max-tokens", "32")
    fleet.simulator.control("bad_params", match="two 7")
    fleet.producer("pause", "one")
    fleet.start_group()
    fleet.start_sink("sink", *QUICK)
    fleet.wait(ended(fleet, "two"), "all prompts of the second run to end")
    assert 0 < fleet.counts("two").failed < COUNT
    fleet.simulator.clear()
    fleet.producer("retry", "two")
    fleet.producer("status", "two", "--json")
    fleet.producer("cancel", "one", "--yes")
    fleet.wait((out["two"] / "_SUCCESS").exists, "the second run's end")
    fleet.wait(lambda: stored(fleet, "one"), "the cancelled run to be stored")
    fleet.producer("forget", "two", "--yes")
    fleet.producer("resume", "two", "--output", str(out["two"]))
    fleet.producer("runs", "--json")


def ended(fleet: Fleet, run: str) -> Callable[[], bool]:
    def look() -> bool:
        counts = fleet.counts(run)
        return counts.completed + counts.failed == counts.total > 0

    return look


def stored(fleet: Fleet, run: str) -> bool:
    counts = fleet.counts(run)
    return counts.cancelled == counts.total and not counts.stream_entries


@pytest.mark.timeout(400)
def test_b96_another_program_and_two_runs_with_equal_ids_keep_to_their_own(fleet: Fleet) -> None:
    out = {name: fleet.folder / f"out_{name}" for name in RUNS}
    theirs = RqTools("3", fleet.redis.tcp_url)
    fleet.client.set("foo", "bar")
    fleet.client.zadd("rq:failed:theirs", {"f" * 32: 1})
    theirs.python("Queue('theirs', connection=redis).enqueue('math.factorial', 5, job_id='j1')")
    before = their_keys(fleet)
    assert {b"foo", b"rq:job:j1", b"rq:queue:theirs", b"rq:failed:theirs"} <= set(before)

    with listening(fleet.redis.socket) as heard:
        whole_life(fleet, out)

    assert their_keys(fleet) == before
    forbidden = {"flushdb", "flushall", "keys", "scan", "swapdb", "config", "shutdown", "debug"}
    assert {"evalsha", "hgetall", "xadd", "unlink"} <= heard.commands
    assert not forbidden & heard.commands
    foreign = [key for key in sorted(heard.keys()) if not is_ours(key)]
    assert not foreign, "\n".join(foreign)
    # Their own worker, beside our worker group, takes their job and nothing else.
    theirs.rq("worker", "--burst", "theirs")
    said = theirs.python("print(Job.fetch('j1', connection=redis).return_value())")
    assert said.strip() == "120"

    fleet.wait(lambda: fleet.counts("two").completed == COUNT, "the second run, brought back")
    assert fleet.producer("verify", "two").returncode == 0
    rows = read_rows(out["two"], ("shards",))
    assert sorted(str(row["id"]) for row in rows) == sorted(f"p{i}" for i in range(COUNT))
    assert all(answers_its_own_request(row) and "two " in str(row["messages"]) for row in rows)
    assert len(read_rows(out["one"], ("failures",))) == COUNT
    assert fleet.client.get("foo") == b"bar"
    assert fleet.client.exists(names.run("one"))
