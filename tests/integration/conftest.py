"""Servers that the integration tests share: one of each kind a session, emptied for each test."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest
import redis

from tests.support.redis_server import RedisServer, flavours
from tests.support.s3 import CREDENTIALS, S3Server
from tests.support.s3_proxy import FaultProxy


@pytest.fixture(scope="session", autouse=True)
def _aws_of_the_tests() -> Iterator[None]:
    """Credentials of the test servers, and nothing of the person who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        patch.delenv("AWS_PROFILE", raising=False)
        patch.delenv("AWS_SESSION_TOKEN", raising=False)
        patch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
        yield


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    """An S3 server in pure Python, one a session; take a `new_bucket` of it."""
    with S3Server("moto") as server:
        yield server


@pytest.fixture
def proxy(moto: S3Server) -> Iterator[FaultProxy]:
    """A proxy before moto, which spoils nothing until its `plan` says so."""
    with FaultProxy(moto.port) as before_moto:
        yield before_moto


@pytest.fixture(scope="session")
def _redis_processes() -> Iterator[Callable[[str], RedisServer]]:
    # Not a parametrised fixture: tests come in random order, and each change of the parameter
    # would start a server.
    with ExitStack() as running:

        @cache
        def process(flavour: str) -> RedisServer:
            return running.enter_context(RedisServer(flavour, appendonly=True))

        yield process


@pytest.fixture
def valkey(_redis_processes: Callable[[str], RedisServer]) -> RedisServer:
    """The session's Valkey, empty; a test may kill it, the next one finds it running."""
    return emptied(_redis_processes("valkey"))


@pytest.fixture
def redis_client(valkey: RedisServer) -> Iterator["redis.Redis"]:
    """A client of the session's Valkey, which is empty."""
    client = valkey.client()
    yield client
    client.close()


@pytest.fixture(params=flavours())
def any_redis(
    request: pytest.FixtureRequest, _redis_processes: Callable[[str], RedisServer]
) -> RedisServer:
    """Each kind of Redis that this machine has, in turn, empty."""
    return emptied(_redis_processes(request.param))


def emptied(server: RedisServer) -> RedisServer:
    """Bring a server back to how a test expects it: alive, no data, no scripts, no limit."""
    if server.alive():
        server.thaw()
    else:
        server.start()
    client = server.client()
    client.config_set("maxmemory", "0")
    client.config_set("maxmemory-policy", "noeviction")
    client.flushall()
    client.script_flush()
    client.close()
    return server
