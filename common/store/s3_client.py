"""Make boto3's client, and again when its credentials have run out or its process forked."""

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from common.errors import UsageError
from common.store import s3_errors

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")
Checksums = Literal["when_required", "when_supported"]

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 30.0
CONNECTIONS = 8


def checksum_setting(*, express: bool) -> Checksums:
    """Choose whether boto3 adds checksum headers to each request.

    It is the one setting not left to boto3: its default breaks other servers. Who sets the
    variable means it. Directory buckets (`express`) know no Content-MD5 and need them.
    """
    said = os.environ.get("AWS_REQUEST_CHECKSUM_CALCULATION", "").lower()
    return "when_supported" if express or said == "when_supported" else "when_required"


class RenewingClient:
    """One client for all threads of a process. Raises what boto3 raises.

    Args:
        endpoint_url: Another S3 than Amazon's, or None.
        sdk_attempts: How often boto3 itself tries a request.
        checksums: See `checksum_setting`.

    Raises:
        UsageError: The endpoint is no URL, or holds a password.
    """

    def __init__(
        self, endpoint_url: str | None, *, sdk_attempts: int, checksums: Checksums
    ) -> None:
        _refuse_secret(endpoint_url)
        self._endpoint_url = endpoint_url
        self._config = Config(
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=ANSWER_TIMEOUT_S,
            max_pool_connections=CONNECTIONS,
            tcp_keepalive=True,
            retries={"mode": "standard", "total_max_attempts": sdk_attempts},
            request_checksum_calculation=checksums,
            response_checksum_validation="when_required",
        )
        self._lock = threading.Lock()  # making a session is not safe in two threads
        self._pid = os.getpid()
        self._client = self._new_client()

    def call(self, request: Callable[["S3Client"], T]) -> T:
        """Send a request; once more, with credentials read anew, where they had run out."""
        client = self._current()
        try:
            return request(client)
        except ClientError as error:
            if s3_errors.code_of(error) not in s3_errors.EXPIRED:
                raise
        return request(self._renewed(client))

    def _current(self) -> "S3Client":
        with self._lock:
            if self._pid != os.getpid():
                # A connection shared with the parent would mix their answers.
                self._pid, self._client = os.getpid(), self._new_client()
            return self._client

    def _renewed(self, stale: "S3Client") -> "S3Client":
        with self._lock:
            if self._client is stale:
                self._client = self._new_client()
            return self._client

    def _new_client(self) -> "S3Client":
        # A new session: it reads ~/.aws, the environment and the machine's role again.
        session = boto3.session.Session()
        try:
            return session.client("s3", endpoint_url=self._endpoint_url, config=self._config)
        except ValueError as error:
            raise UsageError(
                "the S3 endpoint (--endpoint-url or AWS_ENDPOINT_URL_S3) is no URL: http(s)://HOST"
            ) from error


def _refuse_secret(endpoint_url: str | None) -> None:
    # A run keeps its endpoint, in Redis and in the store, and status shows it.
    if endpoint_url and "@" in endpoint_url.partition("://")[2].partition("/")[0]:
        raise UsageError(
            "--endpoint-url holds a user or password: S3's keys come from AWS_PROFILE, ~/.aws or "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
