"""Say in our words what boto3 raised, by type and code: the operation, the place, what to do.

The server's own text is left out: it may quote a request's parts, and nobody knows which.
"""

import re
import ssl
from typing import Any

from botocore import exceptions as boto
from botocore.exceptions import ClientError

from common.errors import StoreDeniedError, StoreFullError, StoreUnusableError

PRECONDITION_FAILED = 412
CONFLICT = 409
NOT_FOUND = 404
NOT_IMPLEMENTED = 501
_DENIED_STATUS = {401, 403}
_REDIRECT = 301

EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired",
                     "RequestExpired", "RequestTimeTooSkewed"})  # fmt: skip
"""Signed with what is no longer valid: new credentials, or signing again, may do."""

_TRANSIENT = EXPIRED | {
    "SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "OperationAborted",
    "Throttling", "ThrottlingException", "RequestLimitExceeded", "BandwidthLimitExceeded",
    "TooManyRequests", "ConditionalRequestConflict", "BadDigest", "IncompleteBody", "Busy",
    "KMS.ThrottlingException", "KMS.KMSInternalException", "KMS.DependencyTimeoutException",
}  # fmt: skip
_TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "InsufficientCapacity"}
_FULL_STATUS = 507
_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "TemporaryRedirect", "Redirect",
           "IllegalLocationConstraintException"}  # fmt: skip
_DENIED = {"AccessDenied", "AllAccessDisabled", "AccountProblem", "Forbidden",
           "UnauthorizedAccess"}  # fmt: skip
_CREDENTIALS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidSecurity"}
_KEYS = "KMS."
_SAYS = {
    "RequestTimeTooSkewed": "this machine's clock is wrong, or the request was long under way; "
    "set the clock",
    "InvalidObjectState": "the object lies in an archive class; restore it, and let no rule of "
    "the bucket archive the prefix",
}
_CHECKSUM = {"InvalidArgument", "InvalidRequest", "NotImplemented", "MissingContentLength",
             "BadDigest", "XAmzContentChecksumMismatch", "UnsupportedHeader"}  # fmt: skip

_PERMISSION = {"PutObject": "s3:PutObject", "GetObject": "s3:GetObject",
               "ListObjectsV2": "s3:ListBucket", "DeleteObject": "s3:DeleteObject"}  # fmt: skip

_NOTHING_TO_WAIT_FOR: tuple[type[Exception], ...] = (
    boto.ProfileNotFound, boto.ValidationError, boto.ParamValidationError,
    boto.ConfigNotFound, boto.ConfigParseError, boto.InvalidConfigError, boto.NoRegionError,
    boto.EndpointProviderError, boto.InvalidEndpointConfigurationError,
)  # fmt: skip
_NO_CREDENTIALS_NOW: tuple[type[Exception], ...] = (
    boto.CredentialRetrievalError, boto.MetadataRetrievalError,
)  # fmt: skip
_LOGGED_OUT: tuple[type[Exception], ...] = (
    boto.SSOError, boto.TokenRetrievalError, boto.LoginError, boto.NoAuthTokenError,
    boto.RefreshWithMFAUnsupportedError,
)  # fmt: skip
_NONE_FOUND: tuple[type[Exception], ...] = (boto.NoCredentialsError, boto.PartialCredentialsError)


_NO_CREDENTIALS = (
    "no AWS credentials found; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
)
_LOG_IN = "log in again (`aws sso login`), it is read anew"
_UNTRUSTED = "the endpoint's certificate is not trusted; set AWS_CA_BUNDLE to its issuer"
_NO_SOURCE = "see whether credential_process, or the container's or machine's role, works"


def status_of(error: ClientError) -> int:
    """Read the HTTP status of an answer."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: ClientError) -> str:
    """Read S3's word for an error; a bare answer has its status in place of one."""
    code = str(error.response.get("Error", {}).get("Code", ""))
    return code if re.fullmatch(r"[\w.]{1,60}", code) else str(status_of(error))


def word_of(error: Exception) -> str:
    """Name an error in a word, for people."""
    return code_of(error) if isinstance(error, ClientError) else type(error).__name__


def passes_soon(error: Exception) -> bool:
    """Tell whether the same request may succeed within seconds.

    Not what has meaning for a caller (409 and 412), nor what only new credentials or free space
    can help: that takes longer than a call may.
    """
    if isinstance(error, ClientError):
        code, status = code_of(error), status_of(error)
        passes = code in _TRANSIENT or status in _TRANSIENT_STATUS
        return passes and status != CONFLICT and code not in EXPIRED
    return not _is_lasting(error) and not isinstance(error, _NO_CREDENTIALS_NOW)


def is_refused(error: Exception) -> bool:
    """Tell whether other credentials, or signing again, may make a difference."""
    if not isinstance(error, ClientError):
        return isinstance(error, (*_NO_CREDENTIALS_NOW, *_LOGGED_OUT, *_NONE_FOUND))
    return code_of(error) in EXPIRED | _CREDENTIALS or _is_denied(error)


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
        return StoreDeniedError(f"{said}: {_region_advice(error.response)}")
    if code == "NoSuchBucket" or (status == NOT_FOUND and code in {"404", "NotFound"}):
        return StoreDeniedError(
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
    if not retryable and (code in _CREDENTIALS or _is_denied(error)):
        return StoreDeniedError(f"{said}: {advice}")
    return StoreUnusableError(f"{said}: {advice}", retryable=retryable)


def _is_denied(error: ClientError) -> bool:
    code, status = code_of(error), status_of(error)
    denied = code in _DENIED or status in _DENIED_STATUS or code.startswith(_KEYS)
    return denied and code not in _TRANSIENT


def _advice(operation: str, code: str, status: int, *, retryable: bool) -> str:
    for holds, advice in (
        (code in _SAYS, _SAYS.get(code, "")),
        (
            code in EXPIRED,
            "the temporary credentials have run out; renew them, they are read anew",
        ),
        (
            code in _CREDENTIALS,
            "the credentials are refused; check AWS_PROFILE or the key's parts",
        ),
        (code.startswith(_KEYS), "the bucket's KMS key cannot be used; enable it, allow its use"),
        (code in _DENIED or status in _DENIED_STATUS, _denied_advice(operation)),
        (retryable, "the store asks for time"),
    ):
        if holds:
            return advice
    return "the store does not take this request; is it an S3 server with this bucket?"


def _denied_advice(operation: str) -> str:
    needed = _PERMISSION.get(operation, f"s3:{operation}")
    return (
        f"denied; the credentials need {needed} for this bucket and prefix (and its KMS key, "
        "where it has one)"
    )


def _region_advice(response: Any) -> str:
    headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = headers.get("x-amz-bucket-region") or response.get("Error", {}).get("Region")
    if not region:
        return "the bucket is in another region or behind another endpoint; set the right one"
    return f"the bucket is in region {region}; set AWS_DEFAULT_REGION={region}"


def _unanswered(error: Exception, what: str) -> StoreUnusableError:
    kind = type(error).__name__
    for holds, advice in (
        (isinstance(error, _NONE_FOUND), _NO_CREDENTIALS),
        (isinstance(error, boto.ProfileNotFound), "AWS_PROFILE names no profile of ~/.aws"),
        (isinstance(error, _LOGGED_OUT), f"the login has run out ({kind}); {_LOG_IN}"),
        (_is_bad_certificate(error), _UNTRUSTED),
        (_is_lasting(error), f"boto3 refused its own settings ({kind}); check ~/.aws"),
    ):
        if holds:
            return StoreDeniedError(f"{what}: {advice}")
    if isinstance(error, _NO_CREDENTIALS_NOW):
        why = f"where the credentials come from gives none ({kind}); {_NO_SOURCE}"
    else:
        why = f"no answer ({kind}); is the endpoint right and the network up?"
    return StoreUnusableError(f"{what}: {why}", retryable=True)


def _is_lasting(error: Exception) -> bool:
    """Tell what stays so until somebody changes a setting."""
    lasting = (*_NOTHING_TO_WAIT_FOR, *_LOGGED_OUT, *_NONE_FOUND)
    return isinstance(error, lasting) or _is_bad_certificate(error)


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
