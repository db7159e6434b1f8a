"""Sink processes on S3 that expires, slows down, denies and loses: the run ends once, complete."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from typing_extensions import override

from common import catalog, names, snapshot
from common.models import Choice, Claim, Outcome, Result, Usage
from tests.support import s3_proxy as fault
from tests.support.aws_login import login
from tests.support.finished_run import ORIGIN, WHEN
from tests.support.memory_store import MemoryStore
from tests.support.producer_cli import Ended, producer
from tests.support.redis_server import RedisServer
from tests.support.run_world import RUN, World
from tests.support.s3 import S3Server
from tests.support.s3_proxy import Fault, FaultProxy, Request
from tests.support.server_process import wait_until
from tests.support.sink_process import SinkProcess
from workers.client.answers import Answer
from workers.client.requests import build_request, read_prompt
from workers.client.rows import Completion, completion_row

PREFIX = "team/run"
LIMIT_S = 120.0
SOON = ("--until-done", "--batch-seconds", "0.2", "--batch-rows", "20", RUN)


class AnsweredWorld(World):
    """Its completions are rows as a worker group writes them, which verify can prove."""

    @override
    def result(
        self, number: int, outcome: Outcome = "completed", *, try_: int = 1, text: str = "answer"
    ) -> Result:
        result = super().result(number, outcome, try_=try_, text=text)
        prompt = self.prompt(number)
        claim = Claim(
            run=RUN,
            uid=self.record.uid,
            key=result.key,
            fingerprint=result.fingerprint,
            try_=try_,
            attempts=0,
            deaths=0,
            lost=0,
            prompt=prompt,
        )
        raw = read_prompt(prompt)
        usage = Usage(prompt_tokens=result.input_tokens, completion_tokens=result.output_tokens)
        done = Completion(
            request=build_request(
                raw, self.record.params, model="m", rid="e-1", context_length=None
            ),
            answer=Answer(
                choices=[Choice(index=0, content=f"{text} {number}", finish_reason="stop")],
                usage=usage,
                empty=False,
                truncated=False,
                reasoning_cut=False,
            ),
            origin=ORIGIN,
            flags=(),
            latency_s=1.0,
            completed_at=WHEN,
        )
        return msgspec.structs.replace(result, row=completion_row(claim, raw, done))


@pytest.fixture
def bucket(moto: S3Server) -> str:
    return moto.new_bucket()


@pytest.fixture
def output(bucket: str) -> MemoryStore:
    """Only the address of the output: for runs whose sink is to be refused at its start."""
    store = MemoryStore()
    store.url = f"s3://{bucket}/{PREFIX}"
    return store


@pytest.fixture
def new_world(
    redis_client: "redis.Redis", moto: S3Server, bucket: str
) -> Iterator[Callable[..., World]]:
    """Make a run on S3; commands reach it through the proxy, the test itself does not."""
    made: list[World] = []

    def new(**options: Any) -> World:
        store = moto.store(bucket, PREFIX)
        store.probe()
        made.append(AnsweredWorld(redis_client, store, **options))
        return made[-1]

    yield new
    for world in made:
        world.close()


@pytest.fixture(autouse=True)
def _through_the_proxy(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lead every command that a test starts to the proxy."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)


def command(valkey: RedisServer, folder: Path, *arguments: str) -> Ended:
    return producer(*arguments, cwd=folder, env={"HEADRACE_REDIS": valkey.url})


def figures(valkey: RedisServer, folder: Path) -> dict[str, Any]:
    return command(valkey, folder, "status", RUN, "--json").told


def ended_well(world: World, valkey: RedisServer, folder: Path, proxy: FaultProxy) -> None:
    """Redis, the store and the proxy's book agree: each prompt has one result, written once."""
    proxy.plan = fault.never
    read = snapshot.read(world.client, RUN)
    assert read is not None
    told = read.figures()
    assert (told["status"], told["completed"]) == ("completed", world.accepted)
    assert told["s3_uploaded"] == world.accepted
    assert told["duplicates_dropped"] == told["failed"] == 0
    assert world.client.hget(names.sink(RUN, 0), "error") is None
    verified = command(valkey, folder, "verify", RUN, "--output", world.store.url, "--json")
    assert verified.code == 0, verified.out + verified.err
    assert sorted(world.current()) == list(range(world.accepted))
    assert len(world.records()) == world.accepted
    world.check_store()
    world.check_counts()
    written_once(proxy)


def of_batches(proxy: FaultProxy) -> list[Request]:
    """The PUTs of what belongs to a batch."""
    folders = tuple(f"/{folder}/" for folder in ("shards", "failures", "keys", "manifest"))
    return [
        request
        for request in proxy.requests
        if request.method == "PUT" and any(folder in request.path for folder in folders)
    ]


def written_once(proxy: FaultProxy) -> None:
    """No name of a batch was accepted twice, or ever sent with two contents."""
    sent = defaultdict[str, set[bytes]](set)
    accepted = [request.path for request in of_batches(proxy) if request.status == 200]
    for request in of_batches(proxy):
        # A body that was cut off on its way is not kept; a manifest says when it was written.
        if request.body and "/manifest/" not in request.path:
            sent[request.path].add(request.body)
    assert accepted
    assert len(accepted) == len(set(accepted))
    assert [path for path, bodies in sent.items() if len(bodies) > 1] == []


def expired_for(key: str) -> fault.Plan:
    def plan(request: Request) -> Fault | None:
        old = f"Credential={key}/" in request.headers.get("authorization", "")
        return fault.EXPIRED_TOKEN if old else None

    return plan


# --- B80: credentials that run out --------------------------------------------------------------


@pytest.mark.timeout(400)
def test_b80_credentials_that_run_out_in_a_run_are_read_anew(
    new_world: Callable[..., World],
    valkey: RedisServer,
    proxy: FaultProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = new_world(prompts=40)
    with login("file", tmp_path, monkeypatch) as given:
        given.hand_out("old-example")
        with SinkProcess(valkey.url, tmp_path, *SOON) as sink:
            world.finish(range(10))
            wait_until(lambda: world.waiting() == 0, "the first shard", LIMIT_S)
            given.hand_out("new-example")
            proxy.plan = expired_for("old-example")
            world.finish(range(10, 40))

            assert sink.wait(LIMIT_S) == 0
            assert "waits" not in sink.text()
        assert [r for r in proxy.requests if r.status == 400]
        ended_well(world, valkey, tmp_path, proxy)


@pytest.mark.timeout(400)
def test_b80_without_new_credentials_nothing_is_lost_and_with_them_the_run_goes_on(
    new_world: Callable[..., World],
    valkey: RedisServer,
    proxy: FaultProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = new_world(prompts=40)
    with login("file", tmp_path, monkeypatch) as given:
        given.hand_out("old-example")
        with SinkProcess(valkey.url, tmp_path, *SOON) as sink:
            world.finish(range(10))
            wait_until(lambda: world.waiting() == 0, "the first shard", LIMIT_S)
            proxy.plan = expired_for("old-example")
            world.finish(range(10, 40))
            wait_until(
                lambda: bool(world.client.hget(names.sink(RUN, 0), "error")), "its word", LIMIT_S
            )
            told = figures(valkey, tmp_path)
            assert (told["status"], world.waiting()) == ("s3_error", 30)
            assert sink.process.poll() is None
            assert "have run out; renew them" in sink.text()

            given.hand_out("new-example")
            assert sink.wait(LIMIT_S) == 0
        ended_well(world, valkey, tmp_path, proxy)


# --- B81: SlowDown ------------------------------------------------------------------------------


@pytest.mark.timeout(400)
def test_b81_a_slow_down_that_outlasts_a_call_ends_with_the_same_batch_and_names(
    new_world: Callable[..., World], valkey: RedisServer, proxy: FaultProxy, tmp_path: Path
) -> None:
    world = new_world(prompts=40)
    with SinkProcess(valkey.url, tmp_path, *SOON) as sink:
        wait_until(lambda: "serving" in sink.text(), "a sink at work", LIMIT_S)
        proxy.plan = fault.always(fault.SLOW_DOWN, method="PUT")
        world.finish(range(40))
        wait_until(
            lambda: bool(world.client.hget(names.sink(RUN, 0), "error")), "its word", LIMIT_S
        )
        assert figures(valkey, tmp_path)["status"] == "s3_error"
        wait_until(lambda: len(of_batches(proxy)) > 5, "more tries than boto3 has", LIMIT_S)
        assert world.waiting() == 40
        assert sink.process.poll() is None
        refused = {request.path for request in of_batches(proxy)}
        bodies = {request.body for request in of_batches(proxy)}
        assert len(refused) == len(bodies) == 1

        proxy.plan = fault.never
        assert sink.wait(LIMIT_S) == 0
        assert sink.text().count("nothing is lost") < 8

    assert refused < {request.path for request in of_batches(proxy) if request.status == 200}
    ended_well(world, valkey, tmp_path, proxy)


# --- B82: rights --------------------------------------------------------------------------------


def test_b82_a_denied_write_ends_the_start_and_is_named(
    redis_client: "redis.Redis",
    valkey: RedisServer,
    output: MemoryStore,
    proxy: FaultProxy,
    tmp_path: Path,
) -> None:
    world = World(redis_client, output)
    world.finish(range(10))
    proxy.plan = fault.always(fault.ACCESS_DENIED, method="PUT")

    with SinkProcess(valkey.url, tmp_path, RUN) as sink:
        assert sink.wait(LIMIT_S) == 4
        said = " ".join(sink.text().split())

    assert f"PutObject on {output.url}" in said
    assert "s3:PutObject" in said
    assert "Traceback" not in said
    assert world.waiting() == 10


@pytest.mark.timeout(400)
def test_b82_rights_that_are_not_needed_may_be_denied_over_the_whole_run(
    new_world: Callable[..., World], valkey: RedisServer, proxy: FaultProxy, tmp_path: Path
) -> None:
    world = new_world(prompts=20)
    world.finish(range(20))
    proxy.plan = lambda request: (
        fault.ACCESS_DENIED if request.method in {"HEAD", "DELETE"} else None
    )

    with SinkProcess(valkey.url, tmp_path, *SOON) as sink:
        assert sink.wait(LIMIT_S) == 0
        assert "denied" not in sink.text().lower()

    ended_well(world, valkey, tmp_path, proxy)


def test_b82_a_bucket_that_is_missing_ends_the_start_and_is_never_made(
    redis_client: "redis.Redis",
    valkey: RedisServer,
    output: MemoryStore,
    proxy: FaultProxy,
    tmp_path: Path,
) -> None:
    output.url = "s3://no-such-bucket-here/prefix"
    World(redis_client, output)

    with SinkProcess(valkey.url, tmp_path, RUN) as sink:
        assert sink.wait(LIMIT_S) == 4
        said = " ".join(sink.text().split())

    assert output.url in said
    assert "the bucket is missing" in said
    never_made(proxy)


def never_made(proxy: FaultProxy) -> None:
    """Nothing but objects was asked for: a CreateBucket is a PUT of a path of one part."""
    puts = [r.path.partition("?")[0].strip("/") for r in proxy.requests if r.method == "PUT"]
    assert puts
    assert all("/" in path for path in puts)


@pytest.mark.parametrize("what", ["denied", "missing"])
def test_b82_an_enqueue_is_refused_as_its_sink_would_be(
    valkey: RedisServer, proxy: FaultProxy, bucket: str, tmp_path: Path, what: str
) -> None:
    (tmp_path / "p.jsonl").write_text('{"id":"a","prompt":"say a"}\n')
    url = f"s3://{bucket}/{PREFIX}"
    if what == "denied":
        proxy.plan = fault.always(fault.ACCESS_DENIED, method="PUT")
    else:
        url = "s3://no-such-bucket-here/prefix"

    ended = command(valkey, tmp_path, "enqueue", "p.jsonl", "--output", url, "--max-tokens", "8")

    assert ended.code == 4, ended.err
    said = " ".join(ended.err.split())
    assert url in said
    assert ("PutObject" if what == "denied" else "the bucket is missing") in said
    never_made(proxy)
    client = valkey.client()
    assert client.keys("headrace:*") == []
    client.close()


# --- B84: two sinks, two runs -------------------------------------------------------------------


def holders(world: World) -> set[Any]:
    """The sinks that hold a partition, by their tokens."""
    found = range(world.record.partitions)
    return {world.client.hget(names.sink(RUN, number), "token") for number in found} - {None}


@pytest.mark.timeout(400)
def test_b84_two_sinks_that_store_at_once_write_no_name_twice_and_no_other_run_may(
    new_world: Callable[..., World], valkey: RedisServer, proxy: FaultProxy, tmp_path: Path
) -> None:
    world = new_world(prompts=1000, partitions=2)
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    with (
        SinkProcess(valkey.url, folders[0], *SOON, "--batch-rows", "50") as one,
        SinkProcess(valkey.url, folders[1], *SOON, "--batch-rows", "50") as two,
    ):
        wait_until(lambda: len(holders(world)) == 2, "two sinks with a partition each", LIMIT_S)
        world.finish(range(1000))
        assert one.wait(LIMIT_S) == two.wait(LIMIT_S) == 0
        assert all("stored run" in sink.text() for sink in (one, two))

    assert len(catalog.manifests_of(world.store, world.record.uid)) >= 20
    ended_well(world, valkey, tmp_path, proxy)

    before = [found.name for found in world.store.list()]
    (tmp_path / "other.jsonl").write_text('{"id":"a","prompt":"say a"}\n')
    another = command(
        *(valkey, tmp_path, "enqueue", "other.jsonl", "--run", "other"),
        *("--output", world.store.url, "--max-tokens", "8"),
    )
    assert another.code == 5, another.err
    assert "give another --output" in " ".join(another.err.split())
    assert [name.name for name in world.store.list()] == before


# --- All at once --------------------------------------------------------------------------------

STORM = (
    fault.SLOW_DOWN,
    fault.INTERNAL_ERROR,
    fault.RESET_BEFORE,
    fault.RESET_MID,
    fault.RESET_AFTER,
    fault.HALF_REPLY,
)


def storm(seed: int) -> fault.Plan:
    """Spoil three of ten requests, but none more than four times on end: calls wait 20 s."""
    dice = random.Random(seed)
    on_end = defaultdict[tuple[str, str], int](int)

    def plan(request: Request) -> Fault | None:
        asked = request.method, request.path
        spoiled = dice.random() < 0.3 and on_end[asked] < 4
        on_end[asked] = on_end[asked] + 1 if spoiled else 0
        return dice.choice(STORM) if spoiled else None

    return plan


@pytest.mark.timeout(500)
def test_a_storm_of_faults_over_sink_resume_export_and_verify_loses_and_doubles_nothing(
    new_world: Callable[..., World], valkey: RedisServer, proxy: FaultProxy, tmp_path: Path
) -> None:
    seed = random.randrange(1_000_000)
    print("seed", seed)  # noqa: T201 - to run it again
    world = new_world(prompts=40)
    url = world.store.url
    proxy.plan = storm(seed)
    with SinkProcess(valkey.url, tmp_path, *SOON) as sink:
        world.finish(range(20))
        wait_until(lambda: world.waiting() == 0, "the first half", LIMIT_S)
    # The sink is killed and Redis has lost everything: the store alone must do.
    world.client.flushall()
    resumed = command(valkey, tmp_path, "resume", RUN, "--output", url)
    assert resumed.code == 0, resumed.err
    counts = world.runs.counts(RUN)
    assert (counts.total, counts.completed, counts.queued) == (40, 20, 20)
    world.finish(range(40))
    with SinkProcess(valkey.url, tmp_path, *SOON) as sink:
        assert sink.wait(LIMIT_S) == 0
    exported = command(valkey, tmp_path, "export", RUN, "--output", url, "--to", "all.jsonl")
    assert exported.code == 0, exported.err
    verified = command(valkey, tmp_path, "verify", RUN, "--output", url)
    assert verified.code == 0, verified.out + verified.err
    rows = [msgspec.json.decode(row) for row in (tmp_path / "all.jsonl").read_bytes().splitlines()]

    assert sorted(row["id"] for row in rows) == list(range(40))
    assert [r for r in proxy.requests if r.status == 503]
    proxy.plan = fault.never
    assert sorted(world.current()) == list(range(40))
    assert len(world.records()) == 40
    world.check_store()
    world.check_counts()
    written_once(proxy)
