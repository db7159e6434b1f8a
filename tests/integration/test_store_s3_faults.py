"""S3 refuses, stalls, loses answers and changes its mind; the store says so or gets through."""

import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import zstandard

from common.errors import StoreDeniedError, StoreFullError, StoreUnusableError
from common.store import Patience, outer_retry, s3_client
from common.store.frames import compress, digest_name
from common.store.retry import CALL_S
from common.store.s3 import S3Store
from tests.conftest import REPOSITORY
from tests.support import s3_proxy as fault
from tests.support.aws_login import SOURCES, login
from tests.support.s3 import ACCESS_KEY, SECRET_KEY, S3Server
from tests.support.s3_proxy import Fault, FaultProxy, Request

NAME = "shards/00-00000001-0123456789abcdef.jsonl.zst"
ROWS = b'{"id":"a"}\n' * 5_000
DATA = compress(ROWS)
DIGEST = digest_name(ROWS)[0]
PREFIX = "team/run"
ONCE = Patience(limit_s=0)


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
    store = S3Store(bucket, endpoint_url=proxy.url, patience=ONCE)
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


def test_waiting_ends_at_its_deadline_with_the_last_error(proxy: FaultProxy, bucket: str) -> None:
    store = S3Store(bucket, endpoint_url=proxy.url, patience=ONCE)
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
    store = S3Store(bucket, endpoint_url=proxy.url, patience=ONCE, sleep=waits.append)
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


def test_what_no_s3_server_answered_counts_as_nothing_written(
    store: S3Store, proxy: FaultProxy
) -> None:
    # A portal that wants a login answers 200 to everything.
    proxy.plan = fault.once(Fault(status=200, body=b"<html>please log in</html>"))

    with pytest.raises(StoreUnusableError, match="ETag") as portal:
        write(store)

    assert portal.value.retryable
    assert store.get(NAME) is None
    assert write(store)


CUT_OFF = {
    "jsonl.zst": DATA,
    "tsv.zst": compress(b"key\tfingerprint\n"),
    "parquet": b"PAR1 rows and a footer PAR1",
    "json": b'{"uid":"1","partition":0}',
}


def test_an_object_of_ours_that_was_cut_off_is_no_success(
    moto: S3Server, store: S3Store, bucket: str
) -> None:
    # As a server leaves it that keeps what came of a broken upload: with our own metadata.
    for kind, data in CUT_OFF.items():
        name = f"shards/00-00000001-{DIGEST[:16]}.{kind}"
        moto.client().put_object(
            Bucket=bucket,
            Key=f"{PREFIX}/{name}",
            Body=data[:-5],
            Metadata={"rows-sha256": DIGEST},
        )

        assert not store.put_if_absent(name, data, rows_sha256=DIGEST), kind

        assert store.get(name) == data[:-5]


def test_a_rewrite_by_another_version_is_still_a_success(store: S3Store) -> None:
    other = zstandard.ZstdCompressor(level=1).compress(ROWS)
    assert len(other) != len(DATA)
    assert store.put_if_absent(NAME, other, rows_sha256=DIGEST)

    assert write(store)

    assert store.get(NAME) == other


@pytest.mark.parametrize("spoiled", [fault.SLOW_DOWN, fault.RESET_BEFORE, fault.INTERNAL_ERROR])
def test_a_call_asks_a_busy_store_politely_and_no_longer_than_it_may(
    proxy: FaultProxy, bucket: str, spoiled: Fault
) -> None:
    now = [0.0]

    def sleep(delay_s: float) -> None:
        now[0] += delay_s

    store = S3Store(bucket, endpoint_url=proxy.url, sleep=sleep, clock=lambda: now[0])
    proxy.plan = fault.always(spoiled)

    with pytest.raises(StoreUnusableError) as busy:
        write(store)

    assert busy.value.retryable
    assert now[0] <= CALL_S
    assert 2 <= len(proxy.requests) <= 25


def test_a_store_that_says_how_long_it_wants_to_be_left_alone_is(
    proxy: FaultProxy, bucket: str
) -> None:
    waits: list[float] = []
    store = S3Store(bucket, endpoint_url=proxy.url, sleep=waits.append)
    proxy.plan = fault.once(fault.answer(503, "SlowDown", retry_after="7"))

    assert write(store)

    assert waits == [7.0]


def test_a_reader_is_told_of_a_store_that_it_waits_for(proxy: FaultProxy, bucket: str) -> None:
    now, said = [0.0], list[str]()

    def sleep(delay_s: float) -> None:
        now[0] += delay_s

    store = S3Store(
        bucket,
        endpoint_url=proxy.url,
        patience=Patience(limit_s=300.0, say=said.append),
        sleep=sleep,
        clock=lambda: now[0],
    )
    proxy.plan = lambda _: fault.SLOW_DOWN if now[0] < 120.0 else None

    assert list(store.list()) == []

    assert now[0] >= 120.0
    assert said
    assert all("SlowDown" in text for text in said)


def test_a_large_object_has_more_time_for_its_answer_than_a_small_one(
    proxy: FaultProxy, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A gateway that passes 2 MiB on slowly answers when it has done so.
    monkeypatch.setattr(s3_client, "ANSWER_S", 0.5)
    monkeypatch.setattr(s3_client, "ANSWER_S_PER_MIB", 30.0)
    store = S3Store(bucket, endpoint_url=proxy.url, patience=ONCE)
    proxy.plan = fault.always(Fault(delay_s=3.0), method="PUT")

    with pytest.raises(StoreUnusableError, match="ReadTimeoutError"):
        store.put("small", b"x" * 1_000)
    store.put("large", b"x" * (2 << 20))

    # 30 s for what is small, and a rate of 100 KB/s from there on.
    assert [s3_client._rounded_mib(size) for size in (0, (1 << 20) - 1, 1 << 20)] == [0, 0, 2]
    assert all(
        size >> 20 < s3_client._rounded_mib(size) <= 2 * (size >> 20)
        for size in (2 << 20, 3 << 20, 25_000_000, 64 << 20)
    )


LASTING = [
    ("AccessDenied", 403, StoreDeniedError, "s3:PutObject"),
    ("SomethingNew", 403, StoreDeniedError, "s3:PutObject"),
    ("SomethingNew", 401, StoreDeniedError, "s3:PutObject"),
    ("InvalidAccessKeyId", 403, StoreDeniedError, "AWS_PROFILE"),
    ("SignatureDoesNotMatch", 403, StoreDeniedError, "AWS_PROFILE"),
    ("KMS.DisabledException", 400, StoreDeniedError, "KMS key"),
    ("NoSuchBucket", 404, StoreDeniedError, "bucket is missing"),
    ("AuthorizationHeaderMalformed", 400, StoreDeniedError, "region"),
    ("InvalidObjectState", 403, StoreDeniedError, "archive"),
    ("QuotaExceeded", 403, StoreFullError, "full"),
    ("InsufficientStorage", 507, StoreFullError, "full"),
    ("EntityTooLarge", 400, StoreUnusableError, "does not take"),
]


def test_what_waiting_within_a_call_cannot_help_is_told_at_once(
    store: S3Store, proxy: FaultProxy
) -> None:
    for code, status, kind, word in LASTING:
        proxy.requests.clear()
        proxy.plan = fault.always(fault.answer(status, code))

        with pytest.raises(StoreUnusableError, match=word) as refused:
            write(store)

        assert type(refused.value) is kind, code
        assert refused.value.retryable == (kind is StoreFullError), code
        # With credentials that were read anew; and once to find the region.
        assert len(proxy.requests) <= 3, code


PASSING = [
    *(("SlowDown", 503), ("", 503), ("TooManyRequests", 429), ("", 429), ("", 502), ("", 504)),
    *(("RequestTimeout", 400), ("KMS.ThrottlingException", 400), ("InternalError", 500)),
    *(("BadDigest", 400), ("IncompleteBody", 400)),
]


def test_what_passes_by_itself_is_waited_for_within_the_call(
    proxy: FaultProxy, bucket: str
) -> None:
    store = S3Store(bucket, endpoint_url=proxy.url, sleep=lambda _: None)
    store.probe()
    for number, (code, status) in enumerate(PASSING):
        for method in ("PUT", "GET"):
            proxy.requests.clear()
            proxy.plan = fault.in_turn([fault.answer(status, code)] * 2, method=method)
            name = f"shards/{number:08d}.parquet"

            done = store.put_if_absent(name, DATA) if method == "PUT" else store.get(name)

            assert done in {True, DATA}
            assert proxy.count(method) == 3, (method, code, status)


PAGE = b"""<?xml version="1.0"?><ListBucketResult><IsTruncated>true</IsTruncated>%b
<Contents><Key>team/run/shards/a</Key><Size>1</Size></Contents></ListBucketResult>"""


@pytest.mark.parametrize(
    "token", [b"", b"<NextContinuationToken>again</NextContinuationToken>"], ids=["none", "same"]
)
def test_a_list_that_never_ends_is_an_error_and_no_endless_loop(
    store: S3Store, proxy: FaultProxy, token: bytes
) -> None:
    proxy.plan = fault.always(Fault(status=200, body=PAGE % token))

    with pytest.raises(StoreUnusableError, match="ListObjectsV2"):
        list(store.list("shards/"))

    assert len(proxy.requests) <= 2


def test_a_right_to_delete_is_needed_only_where_there_is_something_to_delete(
    store: S3Store, proxy: FaultProxy
) -> None:
    proxy.plan = fault.always(fault.ACCESS_DENIED, method="DELETE")
    store.delete("_SUCCESS")
    store.put("_SUCCESS", b"{}")

    with pytest.raises(StoreDeniedError, match="s3:DeleteObject"):
        store.delete("_SUCCESS")


def test_a_server_that_refuses_conditions_in_mid_run_is_looked_at_before_each_write(
    store: S3Store, proxy: FaultProxy
) -> None:
    assert store.conditional
    assert store.put_if_absent("a", b"1")
    proxy.plan = lambda r: fault.NOT_IMPLEMENTED if "if-none-match" in r.headers else None

    assert not store.put_if_absent("a", b"2")

    assert store.get("a") == b"1"
    assert not store.conditional


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


def refused_for(key: str, refusal: Fault) -> fault.Plan:
    def plan(request: Request) -> Fault | None:
        old = f"Credential={key}/" in request.headers.get("authorization", "")
        return refusal if old else None

    return plan


def expired_for(key: str) -> fault.Plan:
    return refused_for(key, fault.EXPIRED_TOKEN)


@pytest.mark.parametrize("source", SOURCES)
def test_credentials_that_run_out_are_read_anew_within_the_call(
    moto: S3Server,
    proxy: FaultProxy,
    bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
) -> None:
    with login(source, tmp_path, monkeypatch) as given:
        given.hand_out("old-example")
        store = moto.store(bucket, PREFIX, port=proxy.port)
        store.probe()
        proxy.requests.clear()
        proxy.plan = expired_for("old-example")

        with pytest.raises(StoreUnusableError, match="renew") as expired:
            write(store)
        assert expired.value.retryable
        proxy.requests.clear()
        given.hand_out("new-example")

        assert write(store)
        assert proxy.count("PUT") == 2


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "AccessDenied", "InvalidToken"])
def test_keys_that_were_replaced_are_read_anew_within_the_call(
    moto: S3Server,
    proxy: FaultProxy,
    bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
) -> None:
    with login("file", tmp_path, monkeypatch) as given:
        given.hand_out("old-example")
        store = moto.store(bucket, PREFIX, port=proxy.port)
        store.probe()
        proxy.plan = refused_for("old-example", fault.answer(403, code))
        given.hand_out("new-example")

        assert write(store)


@pytest.mark.parametrize("source", ["process", "container", "machine"])
def test_a_source_that_gives_no_credentials_is_named_and_asked_again(
    moto: S3Server,
    proxy: FaultProxy,
    bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
) -> None:
    monkeypatch.setenv("AWS_METADATA_SERVICE_NUM_ATTEMPTS", "1")
    with login(source, tmp_path, monkeypatch) as given:
        given.hand_out("old-example")
        store = moto.store(bucket, PREFIX, port=proxy.port)
        proxy.plan = expired_for("old-example")
        given.take_away()
        with pytest.raises(StoreUnusableError, match="credentials") as none:
            write(store)
        assert "is the endpoint right" not in str(none.value)

        given.hand_out("new-example")

        assert write(store)


def test_a_clock_that_is_wrong_is_told_and_what_was_long_under_way_is_signed_again(
    store: S3Store, proxy: FaultProxy
) -> None:
    skewed = fault.answer(403, "RequestTimeTooSkewed")
    proxy.plan = fault.once(skewed)
    assert write(store)

    proxy.plan = fault.always(skewed)
    with pytest.raises(StoreUnusableError, match="set the clock") as wrong:
        write(store)
    assert wrong.value.retryable


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
store = S3Store(sys.argv[1])
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
