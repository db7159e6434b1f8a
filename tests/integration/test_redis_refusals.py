"""What a Redis may answer instead of doing: told in words, and what can pass is waited for."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import redis
from rq import Queue

from common import connect, snapshot
from common.errors import ConflictError, RedisUnusableError
from tests.support.queue_world import QueueWorld
from tests.support.redis_contents import contents
from tests.support.redis_server import RedisServer, flavours
from tests.support.server_process import free_port, wait_until
from workers.engine.eligible import Eligible

FLAVOURS = pytest.mark.parametrize("flavour", flavours())

EVICTING = [
    "allkeys-lru",
    "allkeys-lfu",
    "allkeys-random",
    "volatile-lru",
    "volatile-lfu",
    "volatile-random",
    "volatile-ttl",
]


@contextmanager
def serving(flavour: str, **settings: str) -> Iterator[tuple[RedisServer, "redis.Redis"]]:
    """One server and a client of ours for it."""
    options = {name.replace("_", "-"): value for name, value in settings.items()}
    with RedisServer(flavour, settings=options) as server:
        client = connect.without_retries(connect.client_for(server.tcp_url))
        yield server, client
        client.close()


def replica_of_nobody(client: "redis.Redis") -> None:
    client.replicaof("127.0.0.1", free_port())


def lost_master(client: "redis.Redis") -> None:
    client.config_set("replica-serve-stale-data", "no")
    replica_of_nobody(client)


def too_few_replicas(client: "redis.Redis") -> None:
    client.config_set("min-replicas-to-write", 1)


def unsaved(client: "redis.Redis") -> None:
    """Let a snapshot fail: what `stop-writes-on-bgsave-error` waits for."""
    client.config_set("save", "3600 1")
    client.config_set("stop-writes-on-bgsave-error", "yes")
    client.config_set("dir", "/proc")
    client.bgsave()
    wait_until(
        lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", "a failed snapshot"
    )


@FLAVOURS
@pytest.mark.parametrize(
    ("breaks", "told"),
    [
        (replica_of_nobody, "is a replica and takes no writes"),
        (lost_master, "replica that has lost its master"),
        (too_few_replicas, "min-replicas-to-write"),
        (unsaved, "cannot write its data to its disk"),
    ],
)
def test_each_refusal_of_a_write_is_told_in_words_and_writes_nothing(
    flavour: str, breaks: Callable[["redis.Redis"], None], told: str
) -> None:
    settings = {"enable_protected_configs": "yes"} if flavour != "redis6.2" else {}
    with serving(flavour, **settings) as (server, client):
        world = QueueWorld(client, prompts=3)
        jobs = world.jobs("e1")
        world.claim(jobs, 2)
        before = contents(client)
        breaks(client)

        with pytest.raises(RedisUnusableError, match=told):
            world.finish(jobs, [0])
        with pytest.raises(RedisUnusableError, match=told):
            world.ledger.add([world.item(7)])

        if breaks is not lost_master:
            with server.client() as plain:
                assert contents(plain) == before


@FLAVOURS
def test_a_held_up_redis_is_told_and_waited_for(flavour: str) -> None:
    with serving(flavour, lua_time_limit="50") as (server, client), ThreadPoolExecutor(1) as pool:
        with server.client() as other:
            busy = pool.submit(other.eval, LOOP, 0)
            wait_until(lambda: not answers(client), "a script that holds Redis up")
            with pytest.raises(RedisUnusableError, match="script holds it up"):
                connect.connect(server.tcp_url)
            with server.client() as third:
                third.script_kill()
            with pytest.raises(redis.ResponseError):
                busy.result()

        assert connect.connect(server.tcp_url).ping()


LOOP = "while true do end"


def answers(client: "redis.Redis") -> bool:
    try:
        return bool(client.ping())
    except redis.ResponseError:
        return False


@FLAVOURS
def test_no_connection_left_is_told_by_the_setting(flavour: str) -> None:
    with serving(flavour) as (server, client):
        client.config_set("maxclients", 1)
        with pytest.raises(RedisUnusableError, match="maxclients"):
            connect.connect(server.tcp_url)


@FLAVOURS
def test_a_replica_is_refused_at_the_start_and_its_master_named(flavour: str) -> None:
    with serving(flavour) as (server, client):
        client.replicaof("127.0.0.1", 65001)
        with pytest.raises(RedisUnusableError, match=r"a replica of 127\.0\.0\.1:65001"):
            connect.connect(server.tcp_url)


@pytest.mark.parametrize("flavour", [each for each in flavours() if each != "redis6.2"])
def test_a_cluster_is_refused_at_the_start(flavour: str) -> None:
    # Redis 6.2 takes a second port, 10,000 above its first, which there may not be.
    with (
        serving(flavour, cluster_enabled="yes", cluster_port=str(free_port())) as (server, _),
        pytest.raises(RedisUnusableError, match="Redis Cluster, which Headrace does not support"),
    ):
        connect.connect(server.tcp_url)


@pytest.mark.parametrize("policy", EVICTING)
def test_every_policy_that_evicts_is_refused_also_when_it_is_set_in_mid_run(
    valkey: RedisServer, redis_client: "redis.Redis", policy: str
) -> None:
    world = QueueWorld(redis_client, prompts=1)
    eligible = Eligible(redis_client)
    eligible.refresh()
    redis_client.config_set("maxmemory-policy", policy)

    with pytest.raises(RedisUnusableError, match=f"{policy}.*set maxmemory-policy noeviction"):
        connect.connect(valkey.tcp_url)
    # Worker groups look every second, and claim nothing while that fails.
    with pytest.raises(RedisUnusableError, match=policy):
        eligible.refresh()
    with pytest.raises(RedisUnusableError, match=policy):
        snapshot.read(redis_client, world.run)

    redis_client.config_set("maxmemory-policy", "noeviction")
    eligible.refresh()
    assert eligible.all_names == [world.run]


def test_a_redis_that_loads_its_data_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    # Clients are answered every 1,024 commands, so some tenths of a second between two looks.
    with RedisServer("valkey", appendonly=True) as server:
        with server.client() as client:
            client.eval("for i = 1, 100000 do redis.call('SET', 'key' .. i, i) end", 0)
        server.kill()

        def connects_meanwhile() -> int:
            with server.client() as client, ThreadPoolExecutor(1) as pool:
                wait_until(lambda: is_loading(client), "a Redis that loads")
                connected = pool.submit(connect.connect, server.tcp_url)
                wait_until(lambda: "is loading its data" in caplog.text, "the word about it")
                assert not connected.done()
                client.config_set("key-load-delay", 0)
                return int(connected.result(60).dbsize())

        with ThreadPoolExecutor(1) as pool:
            size = pool.submit(connects_meanwhile)
            # The server lives no longer than the thread that has started it.
            server.start({"key-load-delay": "100"})
            assert size.result(60) == 100_000


def is_loading(client: "redis.Redis") -> bool:
    try:
        return bool(client.info("persistence")["loading"])
    except redis.RedisError:
        return False


def test_a_name_that_another_programs_queue_bears_is_no_run(redis_client: "redis.Redis") -> None:
    queue = Queue("demo", connection=redis_client)
    jobs = [queue.enqueue("os.getpid"), queue.enqueue("os.getpid", job_id="a" * 32)]
    before = contents(redis_client)

    with pytest.raises(ConflictError, match="RQ queue 'demo' with jobs of another program"):
        QueueWorld(redis_client, prompts=1)

    assert queue.job_ids == [job.id for job in jobs]
    assert contents(redis_client) == before


def test_jobs_that_others_put_into_a_runs_queue_are_never_deleted(
    redis_client: "redis.Redis",
) -> None:
    world = QueueWorld(redis_client, prompts=1)
    queue = Queue(world.run, connection=redis_client)
    theirs = [queue.enqueue("os.getpid"), queue.enqueue("os.getpid", job_id="a" * 32)]

    assert world.claimed(world.jobs("e1")) == [0]

    assert [job.get_status() for job in theirs] == ["failed", "failed"]
