"""The check at the start: it asks for what a sink needs, no more, and says what is wrong where."""

import datetime as dt
import ipaddress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from common.errors import StoreUnusableError, UsageError
from common.store import Patience, open_store
from common.store.s3 import S3Store
from tests.support import s3_proxy as fault
from tests.support.s3 import S3Server
from tests.support.s3_proxy import Fault, FaultProxy, Request

PREFIX = "team/run"
ONCE = Patience(limit_s=0)


@pytest.fixture
def bucket(moto: S3Server) -> str:
    return moto.new_bucket()


@pytest.fixture
def unprobed(moto: S3Server, proxy: FaultProxy, bucket: str) -> S3Store:
    return moto.store(bucket, PREFIX, port=proxy.port)


def listing(request: Request) -> bool:
    return request.method == "GET" and "list-type=2" in request.path


def reading(request: Request) -> bool:
    return request.method == "GET" and "list-type=2" not in request.path


@pytest.mark.parametrize(
    ("denied", "operation", "permission"),
    [
        (lambda request: request.method == "PUT", "PutObject", "s3:PutObject"),
        (reading, "GetObject", "s3:GetObject"),
        (listing, "ListObjectsV2", "s3:ListBucket"),
    ],
)
def test_a_denied_right_is_named_with_bucket_and_prefix(
    unprobed: S3Store, proxy: FaultProxy, denied: fault.Plan, operation: str, permission: str
) -> None:
    proxy.plan = lambda request: fault.ACCESS_DENIED if denied(request) else None

    with pytest.raises(StoreUnusableError) as refused:
        unprobed.probe()

    assert f"{operation} on {unprobed.url}" in str(refused.value)
    assert permission in str(refused.value)
    assert not refused.value.retryable


@pytest.mark.parametrize("method", ["HEAD", "DELETE"])
def test_rights_that_a_sink_does_not_need_may_be_denied(
    unprobed: S3Store, proxy: FaultProxy, method: str
) -> None:
    proxy.plan = fault.always(fault.ACCESS_DENIED, method=method)

    unprobed.probe()

    assert unprobed.conditional
    assert unprobed.put_if_absent("a", b"1")
    assert not unprobed.put_if_absent("a", b"2")


def test_the_probe_writes_below_the_prefix_only(
    unprobed: S3Store, proxy: FaultProxy, bucket: str
) -> None:
    unprobed.probe()

    written = [r.path for r in proxy.requests if r.method in {"PUT", "DELETE"}]
    assert all(path.startswith(f"/{bucket}/{PREFIX}/_probe/") for path in written)


def test_a_missing_bucket_is_an_error_and_is_not_made(moto: S3Server, proxy: FaultProxy) -> None:
    with pytest.raises(StoreUnusableError, match="bucket is missing"):
        moto.store("no-such-bucket", PREFIX, port=proxy.port).probe()

    assert [r for r in proxy.requests if r.path.strip("/").count("/") == 0] == []
    with pytest.raises(StoreUnusableError, match="bucket is missing"):
        moto.store("no-such-bucket", PREFIX).get("run.json")


def test_a_bucket_elsewhere_is_told_with_its_region(unprobed: S3Store, proxy: FaultProxy) -> None:
    proxy.plan = fault.always(fault.WRONG_REGION)

    with pytest.raises(StoreUnusableError, match="eu-west-1") as elsewhere:
        unprobed.probe()

    assert not elsewhere.value.retryable
    assert len(proxy.requests) <= 3


def test_a_server_that_refuses_conditions_is_used_without_them(
    unprobed: S3Store, proxy: FaultProxy
) -> None:
    proxy.plan = lambda r: fault.NOT_IMPLEMENTED if "if-none-match" in r.headers else None

    unprobed.probe()

    assert not unprobed.conditional
    assert unprobed.put_if_absent("a", b"1")
    assert unprobed.put_if_absent("a", b"1")
    assert not unprobed.put_if_absent("a", b"2")


@pytest.mark.parametrize(
    "spoiled", [[fault.RESET_AFTER], [fault.CONFLICT], [None, fault.CONFLICT]]
)
@pytest.mark.parametrize("honoured", [True, False])
def test_a_spoiled_request_does_not_fool_the_probe(
    unprobed: S3Store, proxy: FaultProxy, spoiled: list[Fault | None], *, honoured: bool
) -> None:
    spoil = fault.in_turn(spoiled)

    otherwise = None if honoured else fault.CONDITION_IGNORED
    proxy.plan = lambda request: spoil(request) or otherwise

    unprobed.probe()

    assert unprobed.conditional == honoured


def test_a_server_that_is_away_may_come_back(moto: S3Server, bucket: str) -> None:
    with FaultProxy(moto.port) as proxy:
        store = moto.store(bucket, port=proxy.port, patience_s=0)

    with pytest.raises(StoreUnusableError, match="no answer") as away:
        store.probe()

    assert away.value.retryable


def test_an_unknown_profile_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")

    with pytest.raises(StoreUnusableError, match="AWS_PROFILE"):
        open_store("s3://bucket/prefix")


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(UsageError, match="AWS_ENDPOINT_URL_S3"):
        open_store("s3://bucket/prefix", "minio:9000")


def test_the_endpoint_of_the_environment_is_used(
    moto: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", moto.url)
    store = open_store(f"s3://{bucket}/a/b/")

    store.probe()

    assert store.conditional
    assert store.url == f"s3://{bucket}/a/b"


def test_objects_are_single_puts_with_type_hash_and_no_encoding(
    moto: S3Server, unprobed: S3Store, proxy: FaultProxy, bucket: str
) -> None:
    unprobed.put_if_absent("big.jsonl.zst", bytes(20_000_000), rows_sha256="f" * 64)
    unprobed.put_if_absent("run.json", b"{}")

    assert not [r for r in proxy.requests if "upload" in r.path]
    head = moto.client().head_object(Bucket=bucket, Key=f"{PREFIX}/big.jsonl.zst")
    assert (head["ContentType"], head["Metadata"]) == (
        "application/zstd",
        {"rows-sha256": "f" * 64},
    )
    assert "ContentEncoding" not in head
    head = moto.client().head_object(Bucket=bucket, Key=f"{PREFIX}/run.json")
    assert head["ContentType"] == "application/json"


# --- TLS: where checksum trailers would be sent --------------------------------------------------


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A self-signed certificate for 127.0.0.1, and its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = dt.datetime.now(dt.UTC)
    built = (
        x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    pem, no_password = serialization.Encoding.PEM, serialization.NoEncryption()
    file = tmp_path / "certificate.pem"
    file.write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, no_password)
        + built.public_bytes(pem)
    )
    return file


def test_over_tls_nothing_but_the_object_is_sent(
    moto: S3Server, bucket: str, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    with FaultProxy(moto.port, certificate=certificate) as proxy:
        store = S3Store(bucket, endpoint_url=proxy.url)

        store.put("a.jsonl.zst", b"x" * 200_000)

        [request] = proxy.requests
        assert request.body == b"x" * 200_000
        assert "content-md5" in request.headers
        assert not {"x-amz-trailer", "transfer-encoding", "content-encoding"} & set(
            request.headers
        )
        assert store.get("a.jsonl.zst") == b"x" * 200_000


def test_a_certificate_that_nobody_vouches_for_is_told(
    moto: S3Server, bucket: str, certificate: Path
) -> None:
    with FaultProxy(moto.port, certificate=certificate) as proxy:
        store = S3Store(bucket, endpoint_url=proxy.url, patience=ONCE)

        with pytest.raises(StoreUnusableError, match="AWS_CA_BUNDLE") as untrusted:
            store.put("a", b"")

    assert not untrusted.value.retryable
