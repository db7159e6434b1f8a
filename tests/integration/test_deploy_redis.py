"""deploy/redis.conf as operators use it: taken by each promised server, all of it in force."""

from pathlib import Path

import pytest

from common import connect
from tests.support.redis_server import RedisServer, flavours
from workers.node.doctor.lines import Scribe
from workers.node.doctor.redis_part import examine_redis

REPOSITORY = Path(__file__).resolve().parents[2]
CONF = REPOSITORY / "deploy" / "redis.conf"
COMPACT = {b"listpack", b"ziplist"}


def settings_of(conf: Path) -> dict[str, str]:
    """What a configuration file sets."""
    lines = [line.split(maxsplit=1) for line in conf.read_text().splitlines()]
    return {words[0]: words[1].strip('"') for words in lines if words and words[0][0] != "#"}


@pytest.mark.parametrize("flavour", flavours())
def test_each_promised_server_takes_our_redis_conf(flavour: str) -> None:
    with RedisServer(flavour, conf=CONF) as server:
        client = connect.connect(server.url)
        raw = server.client()
        try:
            assert connect.persistence_warning(client) is None
            wanted = settings_of(CONF) | {"maxmemory": str(8 << 30)}
            for name in ("maxmemory", "maxmemory-policy", "appendonly", "appendfsync", "save"):
                assert raw.config_get(name)[name] == wanted[name]

            doctor = Scribe("redis")
            examine_redis(doctor, server.url)
            # A machine that others use may answer late, which says nothing of the settings.
            found = [line for line in doctor.lines if line.check not in {"latency", "clock"}]
            assert [line for line in found if line.level != "ok"] == []
            assert len(found) > 5

            raw.hset("job", mapping={"id": "1", "request": "x" * 5_000})
            raw.hset("bucket", mapping={str(key): "v" * 9 for key in range(500)})
            assert {raw.object("encoding", key) for key in ("job", "bucket")} <= COMPACT
        finally:
            client.close()
            raw.close()
