"""Find out where a bucket is, by whose account it is reached, and what time it is there."""

import email.utils
import time
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


class S3About(msgspec.Struct, frozen=True, kw_only=True):
    """What one answer tells of a bucket.

    Attributes:
        endpoint: URL that requests go to; holds no key.
        region: The one that requests are signed for; empty where there is none.
        bucket_region: The one that the server names; empty where it names none.
        ahead_s: How far its clock is ahead of this machine's, to a second; None: it says no date.
    """

    endpoint: str
    region: str
    bucket_region: str = ""
    ahead_s: float | None = None


def about(client: "S3Client", *, bucket: str, prefix: str) -> S3About:
    """List one object, and take from the answer's head what it says beside.

    Args:
        client: Of boto3.
        bucket: Its name.
        prefix: Below which the listing is allowed.
    """
    began_s = time.time()
    answer = client.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1)
    middle_s = (began_s + time.time()) / 2
    headers: dict[str, Any] = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return S3About(
        endpoint=client.meta.endpoint_url,
        region=client.meta.region_name or "",
        bucket_region=str(headers.get("x-amz-bucket-region", "")),
        ahead_s=_ahead_s(str(headers.get("date", "")), middle_s),
    )


def _ahead_s(date: str, at_s: float) -> float | None:
    try:
        # It tells whole seconds: half a one is nearer than none.
        return email.utils.parsedate_to_datetime(date).timestamp() + 0.5 - at_s
    except (TypeError, ValueError):
        return None
