"""`--notify`: real commands, a real address, a real Redis that remembers what was told."""

import http.server
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from typing_extensions import override

from common import snapshot
from common.errors import UsageError
from common.hooks import Hook
from common.news import GONE_S, HOLD_S
from common.notify import Notifier
from common.queue.sinkview import complain
from common.store.directory import DirectoryStore
from tests.support.producer_cli import producer
from tests.support.redis_server import RedisServer
from tests.support.run_world import RUN, World
from tests.support.server_process import wait_until
from tests.support.sink_process import SinkProcess
from tests.support.sinks import drain, run_sink
from workers.sink.progress import ProgressWriter


@pytest.fixture
def world(redis_client: "redis.Redis", tmp_path: Path) -> World:
    return World(redis_client, DirectoryStore(tmp_path / "out"), prompts=6)


class Address:
    """Takes POSTs, and answers with each status in turn, the last one again and again."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.statuses = [200]
        address = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                address.told.append(json.loads(body))
                at = min(len(address.told), len(address.statuses)) - 1
                self.send_response(address.statuses[at])
                self.end_headers()

            @override
            def log_message(self, *_: object) -> None:
                """Not here."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://user:secret-word@127.0.0.1:{self.server.server_port}/hook/secret-word"


@pytest.fixture
def address() -> Iterator[Address]:
    there = Address()
    thread = threading.Thread(target=there.server.serve_forever, args=[0.01])
    thread.start()
    yield there
    there.server.shutdown()
    there.server.server_close()
    thread.join()


class Clock:
    """Goes on when told."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Looking:
    """A process that looks at the world's run now and then."""

    def __init__(self, world: World, target: str) -> None:
        self.world = world
        self.clock = Clock()
        self.notifier = Notifier(world.client, target, clock=self.clock)

    def look(self, *, passed_s: float = HOLD_S, **own: Any) -> None:
        self.clock.now_s += passed_s
        read = snapshot.read(self.world.client, RUN)
        assert read is not None
        self.notifier.note({**read.figures(), **own})

    def close(self) -> None:
        self.notifier.close(10)


def test_only_who_begins_to_look_takes_an_end_for_an_old_one(
    world: World, address: Address
) -> None:
    world.finish(range(6))
    drain(run_sink(world))
    old, late = Looking(world, address.url), Looking(world, f"{address.url}?late")
    old.look(passed_s=1)
    old.look(passed_s=60)
    late.look(passed_s=60)
    old.close()
    late.close()

    assert [told["event"] for told in address.told] == ["completed"]


def later(minutes: int) -> str:
    return f"2026-01-01T00:{minutes:02}:00+00:00"


def test_trouble_is_told_once_for_all_processes_and_their_successors(
    world: World, address: Address
) -> None:
    one, two = Looking(world, address.url), Looking(world, address.url)
    for each in (one, two):
        each.look()
        each.look(passed_s=HOLD_S)
    world.runs.pause(RUN, "by hand")
    for _ in range(3):
        one.look()
        two.look()
    one.close()
    two.close()
    successor = Looking(world, address.url)
    successor.look()
    successor.look()
    successor.close()

    [told] = address.told
    assert (told["event"], told["status"], told["run"]) == ("paused", "paused", RUN)
    assert "by hand" in told["text"]
    assert told["total"] == 6


class Meeting(redis.Redis):
    """Reads what was told last, then waits until the other has read it too."""

    both = threading.Barrier(2)

    @override
    def get(self, name: Any) -> Any:
        found = super().get(name)
        self.both.wait(10)
        return found


def test_that_redis_is_gone_is_told_and_that_it_is_back(tmp_path: Path, address: Address) -> None:
    with RedisServer("valkey", appendonly=True) as server:
        world = World(server.client(), DirectoryStore(tmp_path / "out"), prompts=6)
        one = Looking(world, address.url)
        progress = ProgressWriter(
            world.client, tmp_path / "state", lambda: [world], notifier=one.notifier
        )
        progress.write_all()
        server.kill()
        for _ in range(4):
            progress.write_all()
            one.clock.now_s += GONE_S / 2
        server.start()
        for _ in range(2):
            progress.write_all()
        one.close()
        world.close()

    assert [told["event"] for told in address.told] == ["redis_gone", "recovered"]
    assert address.told[0]["runs"] == [RUN]
    assert "cannot be used" in address.told[0]["text"]


def test_of_two_that_see_trouble_at_the_same_instant_one_tells(
    world: World, address: Address
) -> None:
    world.runs.pause(RUN, "by hand")
    both = [Looking(world, address.url) for _ in range(2)]
    for one in both:
        one.look()
        one.notifier._client = Meeting(connection_pool=world.client.connection_pool)
    threads = [threading.Thread(target=one.look) for one in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in both:
        one.close()

    assert [told["event"] for told in address.told] == ["paused"]


def test_what_passes_within_seconds_is_not_told(world: World, address: Address) -> None:
    one = Looking(world, address.url)
    one.look()
    one.look()
    world.runs.pause(RUN, "by hand")
    one.look(passed_s=HOLD_S - 1)
    world.runs.resume(RUN)
    one.look(passed_s=1)
    one.look()
    one.close()

    assert address.told == []


def test_a_server_that_comes_back_is_told_too(world: World, address: Address) -> None:
    one = Looking(world, address.url)
    away = {"group": "gpu1@h", "state": "down", "unready_s": GONE_S, "detail": "refused"}
    one.look(updated_at=later(0))
    one.look(updated_at=later(1))
    for minute in (2, 3, 4):
        one.look(updated_at=later(minute), worker_groups=[away])
    for minute in (5, 6, 7):
        one.look(updated_at=later(minute))
    one.close()

    assert [told["event"] for told in address.told] == ["server_gone", "recovered"]
    assert "gpu1@h: refused" in address.told[0]["text"]


def test_an_address_that_fails_is_tried_again_and_nothing_secret_is_logged(
    world: World, address: Address, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    address.statuses = [500, 200]
    one = Looking(world, address.url)
    gone = Looking(world, "http://127.0.0.1:1/secret-word")
    world.runs.pause(RUN, "by hand")
    for each in (one, gone):
        each.look()
        each.look()
    one.close()
    gone.notifier.close(0.1)

    assert [told["event"] for told in address.told] == ["paused", "paused"]
    assert "told 127.0.0.1/…" in caplog.text
    headrace = [each.getMessage() for each in caplog.records if each.name.startswith("common")]
    assert "secret-word" not in "".join(headrace)


def test_a_full_redis_is_told_though_it_cannot_be_noted(world: World, address: Address) -> None:
    one = Looking(world, address.url)
    one.look()
    one.look()
    world.client.config_set("maxmemory", "1")
    for _ in range(3):
        one.look()
    one.close()

    assert [told["event"] for told in address.told] == ["redis_full"]


def test_a_command_that_fails_or_cannot_end_harms_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("common.hooks.COMMAND_S", 0.2)
    told = {"event": "paused", "run": "r", "status": "paused", "text": "t"}

    assert Hook("cat >/dev/null; exit 3").send(told) == "exit code 3"
    assert Hook("exit 0").send(told) == ""
    assert Hook("no-such-command-here 2>/dev/null").send(told) == "exit code 127"
    assert "not done" in Hook("sleep 60").send(told)


@pytest.mark.parametrize("target", ["", " ", "ftp://x/y", "slack://hook"])
def test_another_target_is_refused(target: str) -> None:
    with pytest.raises(UsageError):
        Hook(target)


def test_a_sink_tells_of_the_end_and_two_of_them_tell_it_once(
    world: World, valkey: RedisServer, tmp_path: Path
) -> None:
    told = tmp_path / "told.jsonl"
    command = f'cat >> {told}; echo >> {told}; test "$HEADRACE_NOTIFY_EVENT" = completed'
    quick = ("--first-batch-seconds", "0.1", "--until-done")
    env = {"HEADRACE_NOTIFY": command}

    with (
        SinkProcess(valkey.url, tmp_path, RUN, *quick, env=env, crash_at="") as one,
        SinkProcess(valkey.url, tmp_path / "out", RUN, *quick, env=env) as two,
    ):
        wait_until(lambda: "serving run" in one.text() + two.text(), "a sink to be there")
        world.finish(range(6))
        codes = one.wait(), two.wait()
        logs = one.text() + two.text()

    lines = [json.loads(line) for line in told.read_text().splitlines() if line]
    assert codes == (0, 0)
    assert [(each["event"], each["completed"]) for each in lines] == [("completed", 6)]
    assert logs.count("notify: told the command that run demo is completed") == 1
    assert str(told) not in logs


def test_an_output_that_cannot_even_be_opened_is_told_of(
    world: World, address: Address, tmp_path: Path
) -> None:
    one = Looking(world, address.url)
    progress = ProgressWriter(world.client, tmp_path, list, notifier=one.notifier)
    complain(world.client, world.record, "no such bucket")
    for _ in range(3):
        progress.look(RUN)
        one.clock.now_s += HOLD_S
    progress.look("nobody")
    one.close()

    [told] = address.told
    assert told["event"] == "s3_error"
    assert "no such bucket" in told["text"]


def test_watch_tells_of_an_end_that_came_before_it(
    world: World, valkey: RedisServer, tmp_path: Path, address: Address
) -> None:
    world.finish(range(5))
    world.finish([5], "failed")
    drain(run_sink(world))

    ended = producer(
        *("watch", RUN, "--notify", address.url),
        cwd=tmp_path,
        env={"HEADRACE_REDIS": valkey.tcp_url},
    )

    assert ended.code == 1, ended.err
    assert [told["event"] for told in address.told] == ["completed_with_failures"]
    assert "secret-word" not in ended.out + ended.err
