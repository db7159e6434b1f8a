"""`--redis embedded:DIR`: one server a directory, whoever starts, joins or is killed."""

import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from common.embedded import embedded_redis, stop_embedded
from common.errors import RedisUnusableError, UsageError
from tests.conftest import REPOSITORY
from tests.support.producer_cli import producer
from tests.support.server_process import wait_until

START = (
    "import sys; from common.embedded import embedded_redis; print(embedded_redis(sys.argv[1]))"
)
START_AND_LINGER = f"{START}; sys.stdout.flush(); import time; time.sleep(600)"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A directory whose server, if a test left one, is stopped."""
    directory = tmp_path / "redis"
    yield directory
    stop_embedded(directory)


def starter(program: str, home: Path) -> "subprocess.Popen[str]":
    """Another process that starts or joins, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", program, str(home)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def asked(url: str, *command: str) -> object:
    with redis.Redis.from_url(url) as client:
        return client.execute_command(*command)


def server_pid(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return int(client.info("server")["process_id"])


def test_many_processes_at_once_share_one_server(home: Path) -> None:
    processes = [starter(START, home) for _ in range(6)]

    with ThreadPoolExecutor(6) as threads:
        urls = {out.strip() for out, _ in threads.map(lambda p: p.communicate(), processes)}

    assert len(urls) == 1
    started = (home / "valkey.log").read_text().count("Ready to accept connections")
    assert started == 1
    assert embedded_redis(home) in urls


def test_the_server_outlives_a_killed_starter_and_the_next_caller_joins_it(home: Path) -> None:
    process = starter(START_AND_LINGER, home)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    pid = server_pid(url)
    asked(url, "SET", "key", "value")

    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()

    assert embedded_redis(home) == url
    assert server_pid(url) == pid
    assert asked(url, "GET", "key") == b"value"


def test_a_killed_server_comes_back_with_its_data(home: Path) -> None:
    url = embedded_redis(home)
    asked(url, "SET", "key", "value")
    pid = server_pid(url)

    os.kill(pid, signal.SIGKILL)

    assert embedded_redis(home) == url
    assert server_pid(url) != pid
    assert asked(url, "GET", "key") == b"value"


def test_a_stopped_server_keeps_its_data(home: Path) -> None:
    url = embedded_redis(home)
    asked(url, "SET", "key", "value")

    assert stop_embedded(home)
    assert not stop_embedded(home)

    assert asked(embedded_redis(home), "GET", "key") == b"value"


def test_it_persists_never_evicts_and_is_reached_by_its_user_only(home: Path) -> None:
    url = embedded_redis(home)

    with redis.Redis.from_url(url) as client:
        said = {name: client.config_get(name)[name] for name in SETTINGS}
    assert said == SETTINGS
    assert stat.S_IMODE(Path(urlsplit(url).path).stat().st_mode) == 0o700


SETTINGS = {
    "appendonly": "yes",
    "appendfsync": "everysec",
    "maxmemory-policy": "noeviction",
    "hash-max-listpack-value": "65536",
    "port": "0",
}


@pytest.mark.parametrize("folder", ["short", "a b%2F", "x" * 150])
def test_rqs_own_tools_take_the_address(tmp_path: Path, folder: str) -> None:
    home = tmp_path / folder
    url = embedded_redis(home)

    info = subprocess.run(
        [sys.executable, "-m", "rq.cli", "info", "-u", url],
        capture_output=True,
        text=True,
        check=False,
    )

    assert stop_embedded(home)
    assert not Path(urlsplit(url).path).exists()
    assert (info.returncode, info.stderr) == (0, "")
    assert "0 workers, 0 queues" in info.stdout


def test_a_missing_package_is_named_with_what_to_install(home: Path) -> None:
    with pytest.raises(UsageError, match="pip install no_such_valkey"):
        embedded_redis(home, package="no_such_valkey")


def test_a_directory_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(UsageError, match="file"):
        embedded_redis(tmp_path / "file")


def test_a_server_that_says_nothing_is_an_error_and_not_a_second_server(home: Path) -> None:
    pid = server_pid(embedded_redis(home))
    os.kill(pid, signal.SIGSTOP)

    try:
        with pytest.raises(RedisUnusableError, match="has not answered"):
            embedded_redis(home, silence_limit_s=0.1)
    finally:
        os.kill(pid, signal.SIGCONT)

    wait_until(lambda: server_pid(embedded_redis(home)) == pid, "the same server")


def test_a_server_that_cannot_start_is_told_with_its_own_words(home: Path) -> None:
    embedded_redis(home)
    stop_embedded(home)
    for path in (home / "appendonlydir").glob("*.manifest"):
        path.write_text("nonsense\n")

    with pytest.raises(RedisUnusableError, match="manifest"):
        embedded_redis(home)


def test_what_an_embedded_redis_lost_with_its_directory_comes_back_from_the_store(
    home: Path, tmp_path: Path
) -> None:
    (tmp_path / "job.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    where = ("--redis", f"embedded:{home}")
    enqueue = ("enqueue", "job.jsonl", "--output", "out", "--max-tokens", "8", *where)
    assert producer(*enqueue, cwd=tmp_path).code == 0
    stop_embedded(home)
    shutil.rmtree(home)

    # Without the output it may as well be a typing error.
    refused = producer("resume", "job", *where, cwd=tmp_path)
    resumed = producer("resume", "job", "--output", "out", *where, cwd=tmp_path)

    assert refused.code == 2
    assert "no Redis was ever started in this directory" in refused.err
    assert resumed.code == 0, resumed.err
    assert producer("status", "job", "--json", *where, cwd=tmp_path).told["total"] == 2
