"""Read objects of rows as they are, one ahead, and see whether they are what is said of them."""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest

import msgspec

from common.catalog import rows_of
from common.errors import StoreDamagedError
from common.models import PartFile
from common.store import ObjectStore
from common.store.frames import DIGEST_DIGITS


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """An object of rows.

    Attributes:
        rows: As JSON lines, whatever it is written as; None where it is missing or damaged.
        sha256: Of the rows, 64 hex digits.
        fault: Why there are no rows.
    """

    name: str
    rows: bytes | None = None
    sha256: str = ""
    size_bytes: int = 0
    fault: str = ""


def load(store: ObjectStore, name: str) -> Loaded:
    """Read one object.

    Raises:
        StoreUnusableError: The store cannot be read; an object that is missing raises nothing.
    """
    data = store.get(name)
    if data is None:
        return Loaded(name=name, fault="is missing")
    try:
        rows = rows_of(name, data)
    except StoreDamagedError as error:
        return Loaded(name=name, size_bytes=len(data), fault=f"cannot be read: {error}")
    sha256 = hashlib.sha256(rows).hexdigest()
    return Loaded(name=name, rows=rows, sha256=sha256, size_bytes=len(data))


def load_all(store: ObjectStore, objects: Sequence[str]) -> Iterator[Loaded]:
    """Read objects in their order, the next one while this one is being looked at."""
    with ThreadPoolExecutor(1, "read") as pool:
        ahead: Future[Loaded] | None = None
        for name, following in zip_longest(objects, objects[1:]):
            loaded = ahead.result() if ahead else load(store, name)
            ahead = pool.submit(load, store, following) if following else None
            yield loaded


def fault_of(part: PartFile, loaded: Loaded, *, rows: int) -> str:
    """Say how an object differs from what its manifest, or its own name, says; empty if it is so.

    Args:
        part: What the manifest says.
        loaded: What is there.
        rows: How many rows that has.
    """
    if loaded.sha256 != part.sha256:
        return "its rows are not those whose hash the manifest holds"
    if not named_after(part.name, loaded.sha256):
        return "its rows are not those that its name says"
    if rows != part.rows:
        return f"it holds {rows} rows, the manifest says {part.rows}"
    if loaded.size_bytes != part.bytes:
        return f"it has {loaded.size_bytes} bytes, the manifest says {part.bytes}"
    return ""


def named_after(name: str, sha256: str) -> bool:
    """Whether a name ends in the hash of its rows."""
    return f"-{sha256[:DIGEST_DIGITS]}." in name
