"""Make boto3's client, repeat what may pass, and read credentials anew when they are refused.

boto3's own repetition is off. Its quota is one for all requests of a client: where every second
PUT was spoiled it was used up within a minute, and from then on each spoiled request spoilt its
whole batch. Here each request has its own tries, with full jitter, for as long as its caller is
patient; what lasts longer is the caller's to wait for (`outer_retry`).

How long an answer may take grows with the object: a gateway that takes 20 MB at once and passes
them on slowly answers when it has done so.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, CredentialRetrievalError
from urllib3.exceptions import HTTPError

from common.errors import UsageError
from common.store import s3_errors
from common.store.retry import FIRST_CALL_DELAY_S, Patience, full_jitter_s

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")
Checksums = Literal["when_required", "when_supported"]

CONNECT_TIMEOUT_S = 10.0
ANSWER_S = 30.0
ANSWER_S_PER_MIB = 10.0
LONGEST_RETRY_AFTER_S = 20.0
CONNECTIONS = 8

FOREIGN_ERRORS = (ClientError, BotoCoreError, HTTPError)
"""Whatever boto3 raises for a request."""


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
        checksums: See `checksum_setting`.
        patience: How long a request is repeated.
        sleep: How to wait between two tries.
        clock: Seconds on a clock that never goes back.

    Raises:
        UsageError: The endpoint is no URL, or holds a password.
    """

    def __init__(
        self,
        endpoint_url: str | None,
        *,
        checksums: Checksums,
        patience: Patience,
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _refuse_secret(endpoint_url)
        self._endpoint_url = endpoint_url
        self._checksums = checksums
        self._patience = patience
        self._sleep = sleep
        self._clock = clock
        self._lock = threading.Lock()  # making a session is not safe in two threads
        self._pid = os.getpid()
        # One session at a time, and its client for each limit of an answer's time.
        self._session = boto3.session.Session()
        self._clients: dict[int, S3Client] = {}
        self._client(0)

    def call(self, request: Callable[["S3Client"], T], *, body_bytes: int = 0) -> T:
        """Send a request, and again what may pass by itself, within the patience.

        Args:
            request: May be sent any number of times; reads the whole answer.
            body_bytes: Size of what it sends.
        """
        began_s, tries = self._clock(), 0
        while True:
            try:
                return self._once(request, body_bytes)
            except FOREIGN_ERRORS as error:
                delay_s = max(
                    full_jitter_s(tries, first_s=FIRST_CALL_DELAY_S), _retry_after_s(error)
                )
                past_s = self._clock() - began_s + delay_s
                if not s3_errors.passes_soon(error) or past_s > self._patience.limit_s:
                    raise
                self._patience.tell(s3_errors.word_of(error), past_s)
            tries += 1
            self._sleep(delay_s)

    def _once(self, request: Callable[["S3Client"], T], body_bytes: int) -> T:
        """Send a request; once more, with credentials read anew, where they were refused.

        Who mends a profile or a policy need not start anything again.
        """
        client = self._client(body_bytes)
        try:
            return request(client)
        except (ClientError, BotoCoreError) as error:
            if not s3_errors.is_refused(error):
                raise
        self._renew(client)
        return request(self._client(body_bytes))

    def _client(self, body_bytes: int) -> "S3Client":
        mib = _rounded_mib(body_bytes)
        with self._lock:
            if self._pid != os.getpid():
                # A connection shared with the parent would mix their answers.
                self._pid = os.getpid()
                self._begin_anew()
            if mib not in self._clients:
                self._clients[mib] = self._new_client(mib)
            return self._clients[mib]

    def _renew(self, stale: "S3Client") -> None:
        with self._lock:
            if any(client is stale for client in self._clients.values()):
                self._begin_anew()

    def _begin_anew(self) -> None:
        # A new session: it reads ~/.aws, the environment and the machine's role again.
        self._session = boto3.session.Session()
        self._clients = {}

    def _new_client(self, mib: int) -> "S3Client":
        config = Config(
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=ANSWER_S + mib * ANSWER_S_PER_MIB,
            max_pool_connections=CONNECTIONS,
            tcp_keepalive=True,
            retries={"mode": "standard", "total_max_attempts": 1},
            request_checksum_calculation=self._checksums,
            response_checksum_validation="when_required",
        )
        try:
            return self._session.client("s3", endpoint_url=self._endpoint_url, config=config)
        except json.JSONDecodeError as error:
            # botocore asks a credential_process as soon as a client is made.
            raise CredentialRetrievalError(
                provider="credential_process", error_msg="no JSON"
            ) from error
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


def _rounded_mib(size_bytes: int) -> int:
    """Round a size up to a power of two MiB, so that there are few clients; small ones are 0."""
    mib = size_bytes >> 20
    return 1 << mib.bit_length() if mib else 0


def _retry_after_s(error: Exception) -> float:
    """Read how long the server asks to be left alone, of what can be waited for."""
    if not isinstance(error, ClientError):
        return 0.0
    metadata: dict[str, Any] = dict(error.response.get("ResponseMetadata", {}))
    asked = str(metadata.get("HTTPHeaders", {}).get("retry-after", ""))
    return min(float(asked), LONGEST_RETRY_AFTER_S) if asked.isdecimal() else 0.0
