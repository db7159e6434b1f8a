"""What Headrace asks of a store: five calls, objects that are written once.

Every implementation passes the one conformance suite, `tests/integration/test_store.py`.
"""

from collections.abc import Iterator
from typing import Protocol

import msgspec


class StoredObject(msgspec.Struct, frozen=True, kw_only=True):
    """One listed object: its name below the store's root, and its size in bytes."""

    name: str
    size_bytes: int


class ObjectStore(Protocol):
    """A prefix of a bucket, or a directory. Names are relative, `/` separates folders.

    Every call raises `StoreUnusableError` (its `retryable` says whether waiting may help) or
    `StoreFullError`; a call that raised may nevertheless have been carried out.
    """

    url: str
    """How a person names it: `s3://bucket/prefix` or an absolute path. Never a credential."""

    conditional: bool
    """Whether `put_if_absent` is honoured by the store itself; found out by `probe`."""

    def probe(self) -> None:
        """Check with real calls what a sink needs, and set `conditional`.

        Raises:
            StoreUnusableError: Naming the operation that was denied, the bucket and the prefix.
        """

    def put_if_absent(self, name: str, data: bytes, *, rows_sha256: str = "") -> bool:
        """Write an object unless the name exists.

        Args:
            name: Relative name.
            data: The whole object.
            rows_sha256: Kept as the object's metadata, so that a repeated write can be told from a
                clash (hash of the uncompressed rows, 64 hex digits).

        Returns:
            True when this call wrote it, or an earlier one of which the answer was lost
            (recognised by equal `rows_sha256`); False when the name holds something else.
        """

    def put(self, name: str, data: bytes) -> None:
        """Write an object, replacing what is there: only `progress.json` and `_SUCCESS`."""

    def get(self, name: str) -> bytes | None:
        """Read an object whole; None when it does not exist."""

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """List the objects whose names begin with `prefix`, by the bytes of their names."""

    def delete(self, name: str) -> None:
        """Remove an object; nothing happens when it does not exist. Only `_SUCCESS`."""
