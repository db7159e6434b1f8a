"""Say in our words what boto3 raised, by type and code: the operation, the place, what to do.

The server's own text is left out: it may quote a request's parts, and nobody knows which.
"""

import re
import ssl
from typing import Any

from botocore import exceptions as boto
from botocore.exceptions import ClientError

from common.errors import StoreFullError, StoreUnusableError

PRECONDITION_FAILED = 412
CONFLICT = 409
NOT_FOUND = 404
NOT_IMPLEMENTED = 501
_FORBIDDEN = 403
_REDIRECT = 301

EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired",
                     "RequestExpired", "RequestTimeTooSkewed"})  # fmt: skip
"""Signed with what is no longer valid: new credentials, or signing again, may do."""

_TRANSIENT = EXPIRED | {
    "SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "OperationAborted",
    "Throttling", "ThrottlingException", "RequestLimitExceeded", "BandwidthLimitExceeded",
    "TooManyRequests", "ConditionalRequestConflict", "BadDigest", "IncompleteBody", "Busy",
}  # fmt: skip
_TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "InsufficientCapacity"}
_FULL_STATUS = 507
_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "TemporaryRedirect", "Redirect",
           "IllegalLocationConstraintException"}  # fmt: skip
_DENIED = {"AccessDenied", "AllAccessDisabled", "AccountProblem", "Forbidden",
           "UnauthorizedAccess"}  # fmt: skip
_CREDENTIALS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidSecurity"}
_CHECKSUM = {"InvalidArgument", "InvalidRequest", "NotImplemented", "MissingContentLength",
             "BadDigest", "XAmzContentChecksumMismatch", "UnsupportedHeader"}  # fmt: skip

_PERMISSION = {"PutObject": "s3:PutObject", "GetObject": "s3:GetObject",
               "ListObjectsV2": "s3:ListBucket", "DeleteObject": "s3:DeleteObject"}  # fmt: skip

_NOTHING_TO_WAIT_FOR: tuple[type[Exception], ...] = (
    boto.NoCredentialsError, boto.PartialCredentialsError, boto.ProfileNotFound, boto.SSOError,
    boto.TokenRetrievalError, boto.LoginError, boto.ValidationError, boto.ParamValidationError,
    boto.ConfigNotFound, boto.ConfigParseError, boto.InvalidConfigError, boto.NoRegionError,
    boto.EndpointProviderError, boto.InvalidEndpointConfigurationError, boto.NoAuthTokenError,
)  # fmt: skip


def status_of(error: ClientError) -> int:
    """Read the HTTP status of an answer."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: ClientError) -> str:
    """Read S3's word for an error; a bare answer has its status in place of one."""
    code = str(error.response.get("Error", {}).get("Code", ""))
    return code if re.fullmatch(r"[\w.]{1,60}", code) else str(status_of(error))


def unusable(
    error: Exception, operation: str, *, url: str, checksums_sent: bool = False
) -> StoreUnusableError:
    """Make ours of an error of boto3.

    Args:
        error: What was raised.
        operation: S3's name of what was asked, such as `PutObject`.
        url: The store, as a person names it.
        checksums_sent: Whether boto3 was told to add checksum headers to each request.
    """
    if isinstance(error, ClientError):
        return _answered(error, f"{operation} on {url}", checksums_sent=checksums_sent)
    return _unanswered(error, f"{operation} on {url}")


def _answered(error: ClientError, what: str, *, checksums_sent: bool) -> StoreUnusableError:
    code, status = code_of(error), status_of(error)
    said = f"{what} was answered {status} {code}"
    if code in _FULL or status == _FULL_STATUS:
        return StoreFullError(f"{said}: the store is full; free some space", retryable=True)
    if code in _REGION or status == _REDIRECT:
        return StoreUnusableError(f"{said}: {_region_advice(error.response)}")
    if code == "NoSuchBucket" or (status == NOT_FOUND and code in {"404", "NotFound"}):
        return StoreUnusableError(
            f"{said}: the bucket is missing; create it or correct its name (Headrace never makes "
            "one)"
        )
    if checksums_sent and code in _CHECKSUM:
        return StoreUnusableError(
            f"{said}: this server may not know the checksum headers that boto3 was told to add; "
            "set request_checksum_calculation=when_required (AWS_REQUEST_CHECKSUM_CALCULATION)"
        )
    retryable = code in _TRANSIENT or status in _TRANSIENT_STATUS
    advice = _advice(error.operation_name, code, status, retryable=retryable)
    return StoreUnusableError(f"{said}: {advice}", retryable=retryable)


def _advice(operation: str, code: str, status: int, *, retryable: bool) -> str:
    if code == "RequestTimeTooSkewed":
        return "this machine's clock is wrong, or the request was long under way; set the clock"
    if code in EXPIRED:
        return "the temporary credentials have run out; renew them, and they are read anew"
    if code in _CREDENTIALS:
        return "the credentials are refused; check AWS_PROFILE or the key's two parts"
    if code in _DENIED or status == _FORBIDDEN:
        needed = _PERMISSION.get(operation, f"s3:{operation}")
        return f"denied; the credentials need {needed} for this bucket and prefix"
    if retryable:
        return "the store asks for time"
    return "the store does not take this request; is it an S3 server with this bucket?"


def _region_advice(response: Any) -> str:
    headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = headers.get("x-amz-bucket-region") or response.get("Error", {}).get("Region")
    if not region:
        return "the bucket is in another region or behind another endpoint; set the right one"
    return f"the bucket is in region {region}; set AWS_DEFAULT_REGION={region}"


def _unanswered(error: Exception, what: str) -> StoreUnusableError:
    kind = type(error).__name__
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return StoreUnusableError(
            f"{what}: no AWS credentials found; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        )
    if isinstance(error, boto.ProfileNotFound):
        return StoreUnusableError(f"{what}: AWS_PROFILE names no profile of ~/.aws; correct it")
    if _is_bad_certificate(error):
        return StoreUnusableError(
            f"{what}: the endpoint's certificate is not trusted; set AWS_CA_BUNDLE to its issuer"
        )
    if isinstance(error, _NOTHING_TO_WAIT_FOR):
        return StoreUnusableError(f"{what}: boto3 refused its own settings ({kind}); check ~/.aws")
    return StoreUnusableError(
        f"{what}: no answer ({kind}); is the endpoint right and the network up?", retryable=True
    )


def _is_bad_certificate(error: BaseException | None) -> bool:
    # botocore wraps urllib3's error, which wraps the system's; the last one tells.
    for _ in range(8):
        if error is None or isinstance(error, ssl.SSLCertVerificationError):
            break
        inner = getattr(error, "kwargs", {}).get("error") or getattr(error, "reason", None)
        if not isinstance(inner, BaseException):
            inner = next((arg for arg in error.args if isinstance(arg, BaseException)), None)
        error = inner or error.__cause__ or error.__context__
    return isinstance(error, ssl.SSLCertVerificationError)
