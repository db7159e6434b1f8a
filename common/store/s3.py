"""Keep objects below a prefix of an S3 bucket, on Amazon's and on others' servers.

Settings are for the least of them: no checksum trailers (they break several servers over TLS, or
end up in the object), Content-MD5 in their place, single PUTs only, no Content-Encoding.

Failures:
    answer lost, then repeated    the repetition may meet our first success as 412: what is there
                                  is compared by the hash of its rows, and equal is success
    an object of ours, cut off    some server keeps what came of a broken upload, with its
                                  metadata: what is there must have its size, or its rows
    409                           another write was under way: tried again
    credentials refused           the session is made anew from ~/.aws or the machine's role, once
                                  a try; without new ones the call fails
    condition not honoured        `probe` sees it in the very bucket; each write then looks first
    no ETag                       whoever answered is no S3 server: nothing counts as written
"""

import hashlib
import re
import secrets
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

from botocore.exceptions import ClientError

from common.errors import StoreDamagedError, StoreDeniedError, StoreUnusableError, UsageError
from common.store import frames, s3_errors
from common.store.base import StoredObject
from common.store.identity import checked_name, holds_same, identity_of, looks_whole
from common.store.retry import DEFAULT, Patience, full_jitter_s
from common.store.s3_about import S3About, about
from common.store.s3_client import FOREIGN_ERRORS, RenewingClient, checksum_setting

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

Outcome = Literal["written", "exists", "again"]

PAGE = 1000
"""Names that a listing asks for at once: the most that S3 gives."""

_WRITE_TRIES = 8
_ROWS_SHA256 = "rows-sha256"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}")
_SEGMENT = re.compile(r"[A-Za-z0-9._=-]+")
_CONTENT_TYPES = {
    ".zst": "application/zstd",
    ".json": "application/json",
    ".parquet": "application/vnd.apache.parquet",
}


class S3Store:
    """A prefix of a bucket as store. Threads may share it; a forked process gets its own client.

    Args:
        bucket: Name of a bucket that exists.
        prefix: Below which all names lie; segments of letters, digits, `.`, `_`, `=`, `-`.
        endpoint_url: Another S3 than Amazon's; None leaves it to AWS_ENDPOINT_URL_S3 and ~/.aws.
        patience: How long a call repeats a request.
        sleep: How to wait between two tries.
        clock: Seconds on a clock that never goes back.

    Raises:
        UsageError: The bucket's or prefix's name would be mangled by some servers.
        StoreUnusableError: The profile does not exist, or boto3 refuses its settings.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint_url: str | None = None,
        patience: Patience = DEFAULT,
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bucket = _checked_bucket(bucket)
        prefix = _checked_prefix(prefix)
        self._stem = f"{prefix}/" if prefix else ""
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self.conditional = False
        self._condition: dict[str, Any] = {"IfNoneMatch": "*"}
        self._sleep = sleep
        # Directory buckets know no Content-MD5 and do not list in order; they take checksums.
        self._express = bucket.endswith("--x-s3")
        self._checksums = checksum_setting(express=self._express)
        with self._mapped("opening a session"):
            self._client = RenewingClient(
                endpoint_url,
                checksums=self._checksums,
                patience=patience,
                sleep=sleep,
                clock=clock,
            )

    def probe(self) -> None:
        """Write, read and list an object in the very prefix; find out about conditions."""
        name = f"_probe/{secrets.token_hex(8)}"
        first, second = b"first", b"second"
        self._write_settled(name, first)  # "exists" would be the repetition of a success
        stored_twice = self._write_settled(name, second) == "written"
        self.conditional = not stored_twice
        expected = second if stored_twice else first
        if self.get(name) != expected:
            raise StoreUnusableError(
                f"GetObject on {self.url}: other bytes come back than were written; this server "
                "or a proxy before it alters objects"
            )
        if [found.name for found in self.list(name)] != [name]:
            raise StoreUnusableError(
                f"ListObjectsV2 on {self.url}: an object that was just written is not listed"
            )
        with suppress(StoreUnusableError):  # a sink needs no right to delete
            self.delete(name)

    def about(self) -> S3About:
        """Ask, with one request, where this bucket is and what time it is there.

        Raises:
            StoreUnusableError: As of any call.
        """
        with self._mapped("ListObjectsV2"):
            return self._client.call(
                lambda client: about(client, bucket=self._bucket, prefix=self._stem)
            )

    def put_if_absent(self, name: str, data: bytes, *, rows_sha256: str = "") -> bool:
        """Write an object unless the name exists; see `ObjectStore`."""
        identity = identity_of(data, rows_sha256)
        for tries in range(_WRITE_TRIES):
            if not self.conditional and (same := self._holds(name, data, identity)) is not None:
                return same
            outcome = self._write_once(name, data, identity)
            if outcome == "written":
                return True
            if outcome == "exists" and (same := self._holds(name, data, identity)) is not None:
                return same
            self._sleep(full_jitter_s(tries))
        raise self._never_settled(name)

    def put(self, name: str, data: bytes) -> None:
        """Write an object, replacing what is there."""
        with self._mapped("PutObject"):
            self._send(name, data, identity_of(data, ""), {})

    def get(self, name: str) -> bytes | None:
        """Read an object whole; None when it does not exist."""
        found = self._read(name)
        return None if found is None else found[0]

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """List objects by the bytes of their names, page by page where the server's order serves.

        Every server lists the objects of one folder in order: those are passed on as they come.
        From the first object of a folder further down they are kept and sorted, as some servers
        put `a/b` before `a-b`. Directory buckets have no order at all.
        """
        pages = self._pages(prefix)
        kept: list[StoredObject] = []
        if not self._express:
            for found in pages:
                if found.name.count("/") > prefix.count("/"):
                    kept.append(found)
                    break
                yield found
        kept.extend(pages)
        yield from sorted(kept, key=lambda found: found.name.encode())

    def delete(self, name: str) -> None:
        """Remove an object; nothing happens when it does not exist."""
        key = self._stem + checked_name(name)
        try:
            with self._mapped("DeleteObject"):
                self._client.call(
                    lambda client: client.delete_object(Bucket=self._bucket, Key=key)
                )
        except StoreDeniedError:
            # S3 asks for the right even where there is nothing to delete.
            if self.get(name) is not None:
                raise

    def _write_settled(self, name: str, data: bytes) -> Outcome:
        for tries in range(_WRITE_TRIES):
            outcome = self._write_once(name, data, identity_of(data, ""))
            if outcome != "again":
                return outcome
            self._sleep(full_jitter_s(tries))
        raise self._never_settled(name)

    def _write_once(self, name: str, data: bytes, identity: str) -> Outcome:
        with self._mapped("PutObject"):
            try:
                self._send(name, data, identity, self._condition)
            except ClientError as error:
                status = s3_errors.status_of(error)
                if status == s3_errors.PRECONDITION_FAILED:
                    return "exists"
                if status == s3_errors.CONFLICT:
                    return "again"
                if status == s3_errors.NOT_IMPLEMENTED and self._condition:
                    # A server that refuses the header honestly is used without it: from now on
                    # each write looks first.
                    self._condition, self.conditional = {}, False
                    return "again"
                raise
        return "written"

    def _never_settled(self, name: str) -> StoreUnusableError:
        return StoreUnusableError(
            f"PutObject on {self.url}/{name}: always another write under way (409)", retryable=True
        )

    def _send(self, name: str, data: bytes, identity: str, condition: dict[str, Any]) -> None:
        key = self._stem + checked_name(name)
        options: dict[str, Any] = {**condition}
        if not self._express:
            digest = hashlib.md5(data, usedforsecurity=False).digest()
            options["ContentMD5"] = b64encode(digest).decode()
        kind = _CONTENT_TYPES.get(f".{name.rpartition('.')[2]}", "application/octet-stream")
        answer = self._client.call(
            lambda client: client.put_object(
                Bucket=self._bucket,
                Key=key,
                Body=data,
                ContentType=kind,
                Metadata={_ROWS_SHA256: identity},
                **options,
            ),
            body_bytes=len(data),
        )
        if not answer.get("ETag"):
            raise StoreUnusableError(
                f"PutObject on {self.url} was answered without an ETag, which every S3 server "
                "gives: something before it answers in its place, and nothing counts as written",
                retryable=True,
            )

    def _holds(self, name: str, data: bytes, identity: str) -> bool | None:
        # A GET, not a HEAD: one permission less to ask for, and servers that drop metadata
        # (rclone) are judged by content.
        try:
            found = self._read(name, unless=(identity, len(data)))
        except StoreDamagedError:
            return False
        if found is None:
            return None
        stored, stored_identity = found
        if stored is None:
            return True
        if stored_identity == identity:
            return looks_whole(name, stored, identity)
        return holds_same(name, stored, data, identity)

    def _read(
        self, name: str, *, unless: tuple[str, int] = ("", 0)
    ) -> tuple[bytes | None, str] | None:
        """Read (bytes, rows' hash); no bytes where that hash and the size are `unless`."""
        key = self._stem + checked_name(name)

        def once(client: "S3Client") -> tuple[bytes | None, str]:
            answer = client.get_object(Bucket=self._bucket, Key=key)
            metadata = {word.lower(): text for word, text in answer["Metadata"].items()}
            identity = metadata.get(_ROWS_SHA256, "")
            with answer["Body"] as body:
                size_bytes = answer["ContentLength"]
                if identity and (identity, size_bytes) == unless:
                    return None, identity
                if size_bytes > frames.MOST_UNPACKED_BYTES:
                    raise StoreDamagedError(
                        f"{self.url}/{name} is {size_bytes:,} bytes long: Headrace did not write "
                        "it; remove it, or restore it from a version or a copy"
                    )
                return body.read(), identity

        with self._mapped("GetObject"):
            try:
                return self._client.call(once)
            except ClientError as error:
                missing = s3_errors.status_of(error) == s3_errors.NOT_FOUND
                if missing and s3_errors.code_of(error) != "NoSuchBucket":
                    return None
                raise

    def _pages(self, prefix: str) -> Iterator[StoredObject]:
        position: dict[str, Any] = {}
        while True:
            with self._mapped("ListObjectsV2"):
                page = self._client.call(
                    lambda client: client.list_objects_v2(
                        Bucket=self._bucket,
                        Prefix=self._stem + prefix,
                        MaxKeys=PAGE,
                        **position,  # noqa: B023 - called before it changes
                    )
                )
            for found in page.get("Contents", ()):
                name = found["Key"].removeprefix(self._stem)
                if name and not name.endswith("/"):  # the marker of a folder, made by some tool
                    yield StoredObject(name=name, size_bytes=found["Size"])
            if not page.get("IsTruncated"):
                return
            token = page.get("NextContinuationToken")
            if not token or token == position.get("ContinuationToken"):
                raise StoreUnusableError(
                    f"ListObjectsV2 on {self.url}: the list is cut off and does not say where it "
                    "goes on; is it an S3 server that knows version 2 of listing?"
                )
            position = {"ContinuationToken": token}

    @contextmanager
    def _mapped(self, operation: str) -> Iterator[None]:
        try:
            yield
        except FOREIGN_ERRORS as error:
            raise s3_errors.unusable(
                error,
                operation,
                url=self.url,
                checksums_sent=self._checksums == "when_supported",
            ) from error


def _checked_bucket(bucket: str) -> str:
    if not _BUCKET.fullmatch(bucket):
        raise UsageError(
            "the output's bucket must be letters, digits, '.', '_' and '-': s3://BUCKET/PREFIX"
        )
    return bucket


def _checked_prefix(prefix: str) -> str:
    prefix = prefix.removesuffix("/")
    segments = prefix.split("/") if prefix else []
    if any(not _SEGMENT.fullmatch(s) or s in {".", ".."} for s in segments):
        raise UsageError(
            f"the output's prefix {prefix!r} must be parts of letters, digits, '.', '_', '=' and "
            "'-' between single slashes, none of them '.' or '..': some servers mangle others"
        )
    return prefix
