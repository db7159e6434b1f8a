"""The store: what is kept for good, in a bucket or a directory, written once and never changed.

    base.py       the contract, five calls
    directory.py  a directory              s3.py      a prefix of a bucket
    identity.py   names, equal contents    frames.py  zstd frames, hashes of rows, size limits
    files.py      what may be read and entered of a directory that others can write to
    retry.py      waiting for a store that is away

One way to write: `put_if_absent`. A write whose answer was lost is repeated and recognised by the
hash of its rows, which travels as metadata (S3) or is computed from what is there (directory). A
store that does not honour conditions (`conditional` is False after `probe`) is looked at before
each write, which is no guard against a second writer: its names end in the hash of their rows.

What is read may come from others: an object is neither read nor unpacked beyond 1 GiB, of which a
batch of ours (`--batch-bytes`) may ask half; pipes, devices and other users' links are refused.

Failures: every call raises `StoreUnusableError` or one of its kinds and nothing else; `retryable`
says whether waiting may help, `StoreDeniedError` that no object is to blame. Two layers wait: a
call within its `Patience`, `outer_retry` as long as the caller likes. Missing buckets are never
made: a typing error must not become a bucket.
"""

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from common.errors import UsageError
from common.store.base import ObjectStore, StoredObject
from common.store.directory import DirectoryStore
from common.store.retry import DEFAULT, Patience, outer_retry

__all__ = ["ObjectStore", "Patience", "StoredObject", "open_store", "outer_retry", "same_output"]

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")

ALLOWED = "a directory, file:///DIRECTORY, or s3://BUCKET/PREFIX"


def open_store(
    url: str,
    endpoint_url: str | None = None,
    *,
    create: bool = True,
    patience: Patience = DEFAULT,
) -> ObjectStore:
    """Open the store that a person named. Talks to no network; `probe` does.

    Args:
        url: `s3://bucket/prefix`, `file:///path`, or a path.
        endpoint_url: Another S3 than Amazon's; None leaves it to AWS_ENDPOINT_URL_S3 and ~/.aws.
        create: Make a missing directory.
        patience: How long a call of S3 repeats a request.

    Raises:
        UsageError: No such kind of address, or a prefix that some servers mangle.
        StoreUnusableError: The directory is missing or may not be written.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        if not url or "\0" in url:
            raise UsageError(f"--output {url!r} is no address: give {ALLOWED}")
        if scheme_like := _SCHEME.match(url):
            # s3:/BUCKET would be a local folder of that name, and the results not where one looks.
            raise UsageError(
                f"--output {_without_secrets(url)!r} is no address: `{scheme_like[0]}` needs two "
                f"slashes and must be known; give {ALLOWED} (./{scheme_like[0]}… for a directory "
                "of that name)"
            )
        return DirectoryStore(url, create=create)
    if scheme.lower() == "s3":
        # boto3 takes longer to import than most commands need to run.
        from common.store.s3 import S3Store  # noqa: PLC0415

        bucket, _, prefix = rest.partition("/")
        return S3Store(bucket, prefix, endpoint_url=endpoint_url, patience=patience)
    parts = urlsplit(url)
    if scheme.lower() == "file" and parts.netloc in {"", "localhost"} and len(parts.path) > 1:
        return DirectoryStore(unquote(parts.path), create=create)
    raise UsageError(f"--output {_without_secrets(url)!r} is no address: give {ALLOWED}")


def same_output(one: str, other: str) -> bool:
    """Tell whether two addresses name one output, however each is written. Opens nothing.

    Slashes at the end, `file://`, `~`, relative paths and symbolic links make no difference.
    """
    return one == other or _canonical(one) == _canonical(other)


def _canonical(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    if separator and scheme.lower() == "s3":
        return f"s3://{rest.rstrip('/')}"
    if separator and scheme.lower() == "file":
        url = unquote(urlsplit(url).path)
    return str(Path(url).expanduser().resolve())


def _without_secrets(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url.rpartition("@")[2].partition("?")[0]
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"
