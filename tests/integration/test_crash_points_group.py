"""A worker group killed between any two of its durable steps: what stands then, and the end."""

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import msgspec
import pytest
from typing_extensions import override

from common import crashpoints, names
from common.models import Prompt
from common.queue import Jobs
from common.store import open_store
from tests.support.queue_world import take
from tests.support.redis_server import RedisServer
from tests.support.run_world import RUN, World
from tests.support.server_process import ServerProcess, wait_until
from tests.support.sinks import drain, run_sink
from workers.simulator.launch import SimulatorProcess
from workers.sink.run_sink import Standing

BOUND = 3
PROMPTS = 8
LIMIT_S = 150.0
QUICK = {
    "slots_every_s": 0.3,
    "leases_every_s": 0.2,
    "reap_every_s": 0.1,
    "lease_s": 60.0,
}


@pytest.fixture(scope="module")
def servers() -> Iterator[SimulatorProcess]:
    with SimulatorProcess(servers=1, latency="fixed:0.15", cap=16) as simulator:
        yield simulator


class Group:
    """A run, and worker groups that serve it one after the other.

    Args:
        world: The run.
        url: Of its Redis.
        servers: A simulated server.
        folder: For logs.
    """

    def __init__(self, world: World, url: str, servers: SimulatorProcess, folder: Path) -> None:
        self.world = world
        self.client = world.client
        self.servers = servers
        self._url = url
        self._folder = folder
        self._lives = 0
        self._before = len(servers.account().served)
        self.server = f"{socket.gethostname()}:{servers.ports[0]}"

    def start(self, crash_at: str = "", *arguments: str, **timing: float) -> ServerProcess:
        self._lives += 1
        fixed = ["--gpu", "0", "--server", self.servers.urls[0], "--ramp", "10000"]
        return ServerProcess(
            [
                sys.executable,
                "-m",
                "workers",
                "start",
                *fixed,
                "--concurrency",
                str(BOUND),
                *arguments,
            ],
            log=self._folder / f"group-{self._lives}.log",
            env={
                **os.environ,
                "HEADRACE_REDIS": self._url,
                "HEADRACE_TIMING": json.dumps({**QUICK, **timing}),
                crashpoints.VARIABLE: crash_at,
            },
        )

    def killed(self, crash_at: str, *arguments: str, **timing: float) -> None:
        """Start a worker group and see it die at the point."""
        with self.start(crash_at, *arguments, **timing) as child:
            assert child.wait() == -signal.SIGKILL, child.tail()

    def asked(self) -> int:
        """How many requests for prompts have reached the server in this test."""
        served = self.servers.account().served[self._before :]
        return sum(not each.rid.startswith("headrace-probe") for each in served)

    def held(self) -> int:
        return self.world.runs.counts(RUN).in_flight

    def holders(self) -> dict[str, int]:
        """Slots by epoch, of all servers: there is one."""
        [*keys] = self.client.scan_iter(names.slots("*"))
        fields = cast("dict[bytes, bytes]", self.client.hgetall(keys[0])) if keys else {}
        return {
            epoch.decode(): json.loads(value)["slots"]
            for epoch, value in fields.items()
            if value.startswith(b"{")
        }

    def listed(self) -> int:
        return int(self.client.llen(names.rq_queue(RUN)))

    def jobs(self, member: str) -> list[int]:
        """That member of each job that is there, 0 where it has none."""
        keys = [self.world.key(n).hex() for n in range(self.world.accepted)]
        found = [self.client.hget(names.rq_job(key), member) for key in keys]
        return sorted(int(value or 0) for value in found)

    def end(self) -> None:
        """Let another worker group and a sink end the run: each prompt once, all there."""
        with self.start() as child:
            wait_until(
                lambda: self._over() or not child.alive(),
                f"the run's end ({child.tail()})",
                LIMIT_S,
            )
            child.send(signal.SIGTERM)
            assert child.wait() == 128 + signal.SIGTERM, child.tail()
        assert drain(run_sink(self.world)) is Standing.COMPLETED
        counts = self.world.runs.counts(RUN)
        assert (counts.completed, counts.total) == (self.world.accepted,) * 2
        assert counts.duplicates_dropped == 0
        self.world.check_store()
        self.world.check_counts()

    def _over(self) -> bool:
        counts = self.world.runs.counts(RUN)
        return counts.completed + counts.failed + counts.cancelled == counts.total


@pytest.fixture
def group(valkey: RedisServer, servers: SimulatorProcess, tmp_path: Path) -> Iterator[Group]:
    servers.clear()
    world = World(valkey.client(), open_store(str(tmp_path / "out")), prompts=PROMPTS)
    yield Group(world, valkey.url, servers, tmp_path)
    servers.clear()
    world.close()


# --- What one process does -----------------------------------------------------------------------


def only_pinned(group: Group) -> None:
    state = group.world.runs.state(RUN)
    assert state is not None
    assert state.pinned is not None
    assert (group.held(), group.listed(), group.asked()) == (0, PROMPTS, 0)


def only_slots(group: Group) -> None:
    assert list(group.holders().values()) == [BOUND]
    assert (group.held(), group.listed(), group.asked()) == (0, PROMPTS, 0)


def leased_and_not_asked(group: Group) -> None:
    assert group.held() > 0
    assert group.held() + group.listed() == PROMPTS
    assert (group.asked(), group.world.waiting()) == (0, 0)


def answered_and_not_recorded(group: Group) -> None:
    assert group.asked() > 0
    assert group.held() >= 1
    assert group.world.waiting() == 0
    assert group.world.runs.counts(RUN).completed == 0


def recorded(group: Group) -> None:
    counts = group.world.runs.counts(RUN)
    assert counts.completed == group.world.waiting() >= 1
    assert counts.in_flight + counts.queued + counts.completed == PROMPTS


def leased_again(group: Group) -> None:
    assert group.held() > 0
    now_ms = int(group.client.time()[0]) * 1000
    assert group.client.zcount(names.leases(RUN), "-inf", now_ms) == 0


@pytest.mark.parametrize(
    ("point", "stands"),
    [
        ("run.pinned", only_pinned),
        ("slots.taken", only_slots),
        ("claim.leased", leased_and_not_asked),
        ("serve.answered", answered_and_not_recorded),
        ("finish.recorded", recorded),
        ("lease.renewed", leased_again),
    ],
)
def test_killed_at_work_it_leaves_what_was_durable_and_the_next_one_goes_on(
    group: Group, point: str, stands: Callable[[Group], None]
) -> None:
    group.killed(point)

    stands(group)
    held = group.held()
    group.end()
    # What was in flight at the kill is asked again, and nothing else.
    assert PROMPTS <= group.asked() <= PROMPTS + held


def test_killed_after_a_charge_the_attempt_counts(group: Group) -> None:
    group.servers.control("nan", count=1, match="prompt ")

    group.killed("charge.counted")

    assert group.jobs("attempts") == [0] * (PROMPTS - 1) + [1]
    assert group.world.runs.counts(RUN).retries == 1
    assert group.held() > 0
    group.end()
    assert group.world.runs.counts(RUN).retries == 1


def test_killed_in_a_stop_jobs_are_back_before_their_slots(group: Group) -> None:
    group.servers.control("no_answer", match="prompt ")
    with group.start("return.given", "--grace", "0.1") as child:
        wait_until(lambda: group.asked() >= BOUND, f"open requests ({child.tail()})", LIMIT_S)
        before = group.held()
        child.send(signal.SIGTERM)
        assert child.wait() == -signal.SIGKILL, child.tail()

    assert group.held() < before
    assert group.listed() == PROMPTS - group.held()
    assert list(group.holders().values()) == [BOUND]
    assert group.jobs("deaths") == group.jobs("attempts") == [0] * PROMPTS
    group.servers.clear()
    group.end()


def test_killed_when_its_slots_are_given_up_nothing_is_held(group: Group) -> None:
    group.servers.control("no_answer", match="prompt ")
    with group.start("slots.released", "--grace", "0.1") as child:
        wait_until(lambda: group.asked() >= BOUND, f"open requests ({child.tail()})", LIMIT_S)
        child.send(signal.SIGTERM)
        assert child.wait() == -signal.SIGKILL, child.tail()

    assert (group.held(), group.listed(), group.holders()) == (0, PROMPTS, {})
    group.servers.clear()
    group.end()


# --- What a process does for others that are gone ------------------------------------------------


@pytest.mark.parametrize(
    ("point", "leases", "slots"),
    [
        ("takeover.aborted", True, True),
        ("takeover.reaped", False, True),
        ("takeover.settled", False, False),
    ],
)
def test_killed_in_a_takeover_the_next_one_takes_over_both(
    group: Group, point: str, *, leases: bool, slots: bool
) -> None:
    group.killed("claim.leased")
    held, dead = group.held(), set(group.holders())
    assert held
    assert len(dead) == 1

    group.killed(point)

    assert (group.held() == held) is leases
    assert group.held() + group.listed() == PROMPTS
    assert (set(group.holders()) == dead) is slots
    group.end()
    assert group.world.runs.counts(RUN).retries == 0


def test_killed_before_expired_slots_are_settled_they_are_still_their_holders(
    group: Group,
) -> None:
    group.killed("slots.taken")
    [(epoch, _)] = group.holders().items()
    [key] = list(group.client.scan_iter(names.slots("*")))
    holder = json.loads(cast("bytes", group.client.hget(key, epoch)))
    # As of another machine, so that nobody can know that it is dead before its time is over.
    about = {**json.loads(holder["about"]), "host": "elsewhere"}
    expired = {**holder, "deadline_ms": 1, "about": json.dumps(about)}
    group.client.hset(key, epoch, json.dumps(expired))

    group.killed("slots.aborted")

    assert set(group.holders()) == {epoch}
    assert group.held() == 0
    group.end()


def test_killed_after_reaping_what_was_lost_is_listed_and_counted(group: Group) -> None:
    dead = Jobs(group.client, epoch="dead", group="gpu9@elsewhere", server="http://other:1")
    assert take(dead, 4, bound=4, quiet=True).what == "granted"
    claims = dead.claim(2, stream_mark_bytes=1 << 40).claims
    assert len(claims) == 2
    group.client.delete(names.slots(dead.server))
    hexes = [claim.key.hex() for claim in claims]
    group.client.zadd(names.leases(RUN), dict.fromkeys(hexes, 1))

    group.killed("reap.ended", lease_s=1.0)

    # Back in the list, or claimed from there already; counted once, and no attempt.
    lost = [int(group.client.hget(names.rq_job(hex_), "lost") or 0) for hex_ in hexes]
    assert lost == [1, 1]
    assert group.client.zscore(names.leases(RUN), hexes[0]) != 1
    assert group.jobs("attempts") == [0] * len(group.jobs("attempts"))
    group.end()


# --- Conversations -------------------------------------------------------------------------------


class Talks(World):
    """Every prompt is a conversation with two answers to generate."""

    @override
    def body(self, number: int) -> dict[str, object]:
        spoken = [f"question {turn} of {number}" for turn in range(2)]
        messages: list[object] = []
        for text in spoken:
            messages += [{"role": "user", "content": text}, None]
        return {"messages": messages}

    @override
    def prompt(self, number: int) -> bytes:
        return msgspec.json.encode(
            Prompt(
                id=msgspec.Raw(b"%d" % number),
                line=number + 1,
                endpoint="chat",
                body=self.body(number),
                source="prompts.jsonl",
                turns=2,
            )
        )


@pytest.fixture
def talks(valkey: RedisServer, servers: SimulatorProcess, tmp_path: Path) -> Iterator[Group]:
    servers.clear()
    world = Talks(valkey.client(), open_store(str(tmp_path / "out")), prompts=4)
    yield Group(world, valkey.url, servers, tmp_path)
    world.close()


def test_killed_after_a_turn_it_is_not_generated_again(talks: Group) -> None:
    talks.killed("turn.kept")

    keys = [talks.world.key(n).hex() for n in range(4)]
    kept = [talks.client.hget(names.rq_job(key), "turns") for key in keys]
    done = sum(value is not None for value in kept)
    assert done >= 1
    assert (talks.held() > 0, talks.world.waiting()) == (True, 0)
    held = talks.held()
    talks.end()
    # The first turn of those is not asked again; of the others in flight one request each.
    assert 8 <= talks.asked() <= 8 + held - done


def test_killed_when_a_sample_is_kept_nothing_hangs_on_it(group: Group) -> None:
    group.killed("sample.kept", sample_every_s=0.2)

    [key] = group.client.scan_iter(names.telemetry("*"))
    assert group.client.xlen(key) == 1
    group.end()
