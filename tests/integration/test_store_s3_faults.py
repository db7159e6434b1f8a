"""S3 refuses, stalls, loses answers and changes its mind; the store says so or gets through."""

import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from common.errors import StoreUnusableError
from common.store import outer_retry
from common.store.frames import compress, digest_name
from common.store.s3 import S3Store
from tests.conftest import REPOSITORY
from tests.support import s3_proxy as fault
from tests.support.s3 import ACCESS_KEY, SECRET_KEY, S3Server
from tests.support.s3_proxy import Fault, FaultProxy, Request

NAME = "shards/00-00000001-0123456789abcdef.jsonl.zst"
ROWS = b'{"id":"a"}\n' * 5_000
DATA = compress(ROWS)
DIGEST = digest_name(ROWS)[0]
PREFIX = "team/run"


@pytest.fixture
def bucket(moto: S3Server) -> str:
    return moto.new_bucket()


@pytest.fixture
def store(moto: S3Server, proxy: FaultProxy, bucket: str) -> S3Store:
    """A store that has been probed while all was well."""
    opened = moto.store(bucket, PREFIX, port=proxy.port)
    opened.probe()
    proxy.requests.clear()
    return opened


def write(store: S3Store) -> bool:
    return store.put_if_absent(NAME, DATA, rows_sha256=DIGEST)


SPOILED = {
    "answer lost": fault.RESET_AFTER,
    "answer cut off": fault.HALF_REPLY,
    "reset": fault.RESET_BEFORE,
    "reset in the body": fault.RESET_MID,
    "SlowDown": fault.SLOW_DOWN,
    "500": fault.INTERNAL_ERROR,
    "409": fault.CONFLICT,
    "slow": Fault(delay_s=0.2),
}


@pytest.mark.parametrize("spoiled", SPOILED.values(), ids=SPOILED)
def test_one_spoiled_write_is_written_once_and_a_success(
    store: S3Store, proxy: FaultProxy, spoiled: Fault
) -> None:
    proxy.plan = fault.once(spoiled)

    assert write(store)

    assert store.get(NAME) == DATA
    assert [found.name for found in store.list()] == [NAME]


def test_a_lost_answer_and_another_writers_rows_are_not_confused(
    store: S3Store, proxy: FaultProxy
) -> None:
    other = compress(ROWS + b'{"id":"b"}\n')
    assert store.put_if_absent(NAME, other, rows_sha256="0" * 64)
    proxy.plan = fault.once(fault.RESET_AFTER)

    assert not write(store)

    assert store.get(NAME) == other


def test_a_minute_of_slow_down_ends_with_the_same_object(proxy: FaultProxy, bucket: str) -> None:
    store = S3Store(bucket, endpoint_url=proxy.url, sdk_attempts=1)
    now = [0.0]
    waits: list[float] = []
    proxy.plan = lambda _: fault.SLOW_DOWN if now[0] < 60.0 else None

    def sleep(delay_s: float) -> None:
        now[0] += max(delay_s, 1.0)

    assert outer_retry(
        lambda: write(store), on_wait=lambda _, delay_s: waits.append(delay_s), sleep=sleep
    )

    assert len(waits) >= 2
    assert max(waits) <= 30.0
    paths = {request.path for request in proxy.requests if request.method == "PUT"}
    bodies = {request.body for request in proxy.requests if request.method == "PUT"}
    assert (len(paths), bodies) == (1, {DATA})


def test_waiting_ends_at_its_deadline_with_the_last_error(
    store: S3Store, proxy: FaultProxy
) -> None:
    proxy.plan = fault.always(fault.SLOW_DOWN)
    now = [0.0]

    def sleep(delay_s: float) -> None:
        now[0] += delay_s + 5.0

    with pytest.raises(StoreUnusableError, match="SlowDown"):
        outer_retry(lambda: write(store), deadline_s=10.0, sleep=sleep, clock=lambda: now[0])

    assert now[0] < 21.0


def test_a_write_that_always_meets_another_is_tried_again_and_then_given_back(
    proxy: FaultProxy, bucket: str
) -> None:
    waits: list[float] = []
    store = S3Store(bucket, endpoint_url=proxy.url, sdk_attempts=1, sleep=waits.append)
    store.probe()
    proxy.plan = fault.always(fault.CONFLICT, method="PUT")

    with pytest.raises(StoreUnusableError) as given_back:
        write(store)

    assert given_back.value.retryable
    assert len(waits) > 3


def test_a_storm_of_faults_leaves_each_object_once_and_whole(
    store: S3Store, proxy: FaultProxy
) -> None:
    seed = random.randrange(1_000_000)
    print("seed", seed)  # noqa: T201 - to run it again
    dice = random.Random(seed)
    kinds = [fault.SLOW_DOWN, fault.INTERNAL_ERROR, fault.CONFLICT, fault.RESET_BEFORE,
             fault.RESET_MID, fault.RESET_AFTER, fault.HALF_REPLY]  # fmt: skip
    proxy.plan = lambda _: dice.choice(kinds) if dice.random() < 0.25 else None
    contents = {f"shards/{n:08d}.parquet": dice.randbytes(2_000) for n in range(40)}

    for name, data in contents.items():
        assert outer_retry(partial(store.put_if_absent, name, data), sleep=lambda _: None)

    proxy.plan = fault.never
    assert {found.name: store.get(found.name) for found in store.list()} == contents


def test_a_body_that_breaks_off_is_read_again(store: S3Store, proxy: FaultProxy) -> None:
    store.put("a.parquet", os.urandom(400_000))
    proxy.plan = fault.once(fault.HALF_REPLY, method="GET")

    data = store.get("a.parquet")

    assert data is not None
    assert len(data) == 400_000


# --- Checksums (case B79) ------------------------------------------------------------------------


def test_a_server_that_refuses_checksum_headers_is_used_without_them(
    store: S3Store, proxy: FaultProxy
) -> None:
    proxy.plan = fault.checksum_refused

    assert write(store)

    [request] = [request for request in proxy.requests if request.method == "PUT"]
    assert "content-md5" in request.headers
    assert "content-encoding" not in request.headers


def test_who_asks_for_checksums_is_told_which_setting_a_server_refuses(
    moto: S3Server, proxy: FaultProxy, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
    proxy.plan = fault.checksum_refused

    with pytest.raises(
        StoreUnusableError, match="request_checksum_calculation=when_required"
    ) as e:
        moto.store(bucket, PREFIX, port=proxy.port).probe()

    assert not e.value.retryable


# --- Credentials (case B80) ----------------------------------------------------------------------


def expired_for(key: str) -> fault.Plan:
    def plan(request: Request) -> Fault | None:
        old = f"Credential={key}/" in request.headers.get("authorization", "")
        return fault.EXPIRED_TOKEN if old else None

    return plan


def test_credentials_that_run_out_are_read_anew_within_the_call(
    moto: S3Server,
    proxy: FaultProxy,
    bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile = tmp_path / "credentials"
    entry = "[default]\naws_access_key_id = {}\naws_secret_access_key = fake\n"
    profile.write_text(entry.format("old-example"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = moto.store(bucket, PREFIX, port=proxy.port)
    store.probe()
    proxy.requests.clear()

    proxy.plan = expired_for("old-example")
    profile.write_text(entry.format("new-example"))

    assert write(store)
    assert proxy.count("PUT") == 2


def test_without_new_credentials_the_call_fails_and_may_be_repeated(
    store: S3Store, proxy: FaultProxy
) -> None:
    proxy.plan = expired_for(ACCESS_KEY)

    with pytest.raises(StoreUnusableError, match=f"PutObject on {store.url}.*renew") as expired:
        write(store)

    assert expired.value.retryable
    assert proxy.count("PUT") == 2
    proxy.plan = fault.never
    assert write(store)


def test_no_credentials_at_all_says_where_to_put_them(
    moto: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")

    with pytest.raises(StoreUnusableError, match="AWS_PROFILE") as missing:
        moto.store(bucket).probe()

    assert not missing.value.retryable


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied"])
def test_no_error_holds_a_credential(store: S3Store, proxy: FaultProxy, code: str) -> None:
    proxy.plan = fault.always(fault.answer(403, code))

    with pytest.raises(StoreUnusableError, match=code) as refused:
        write(store)

    assert not refused.value.retryable
    assert ACCESS_KEY not in str(refused.value)
    assert SECRET_KEY not in str(refused.value)


# --- A process that forks ------------------------------------------------------------------------

FORKS = """
import os, sys
from common.store.s3 import S3Store
store = S3Store(sys.argv[1], sdk_attempts=1)
store.put("first", b"")
child = os.fork()
who = "parent" if child else "child"
for number in range(40):
    name = f"{who}/{number:08d}"
    store.put(name, name.encode())
    assert store.get(name) == name.encode()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_process_has_a_connection_of_its_own() -> None:
    # Not moto: it closes each connection after one answer, so there is none to share.
    with S3Server("seaweedfs") as server:
        bucket = server.new_bucket()

        subprocess.run(
            [sys.executable, "-c", FORKS, bucket],
            env=server.environment(),
            cwd=REPOSITORY,
            check=True,
            timeout=60,
        )

        assert len(list(server.store(bucket).list())) == 81
