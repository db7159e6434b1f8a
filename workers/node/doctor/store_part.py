"""Try an output: write, read, list and remove in the very prefix, and tell whether it is alone."""

import secrets
import shutil
from pathlib import Path

from common.errors import HeadraceError, StoreUnusableError, UsageError
from common.store import ObjectStore, Patience, open_store
from common.store.directory import DirectoryStore
from common.store.s3 import S3Store
from workers.node.doctor.lines import Scribe

PATIENCE_S = 5.0
CLOCK_WARNING_S, CLOCK_FAULT_S = 60.0, 600.0
"""S3 refuses what is signed a quarter of an hour off."""

LEAST_FREE_BYTES, FEW_FREE_BYTES = 200e6, 5e9

_PROBE = "_probe-doctor-"
"""No folder: who removes an empty one takes it from another that probes."""


def examine_store(say: Scribe, url: str, endpoint_url: str | None) -> None:
    """Tell of one output.

    Args:
        say: Gets the lines.
        url: As `--output` says.
        endpoint_url: Another S3 than Amazon's.
    """
    try:
        store = open_store(url, endpoint_url, create=False, patience=Patience(limit_s=PATIENCE_S))
    except StoreUnusableError as error:
        _tell_missing(say, url, error)
        return
    except UsageError as error:
        say.failed("address", error)
        return
    if isinstance(store, S3Store) and not _tell_where(say, store):
        return
    if isinstance(store, DirectoryStore):
        tell_free(say, store.root)
    _try(say, store)


def _tell_missing(say: Scribe, url: str, error: StoreUnusableError) -> None:
    path = Path(url.removeprefix("file://")).expanduser()
    if "://" in url.removeprefix("file://") or path.exists():
        say.failed("reachable", error)
        return
    say.warning("directory", f"{path} is not there yet", "`producer enqueue` makes it")
    tell_free(say, path)


def _tell_where(say: Scribe, store: S3Store) -> bool:
    """Tell of bucket, region and clock; returns whether it can be reached at all."""
    try:
        told = store.about()
    except HeadraceError as error:
        say.failed("reachable", error)
        return False
    region = told.bucket_region or told.region
    say.ok("reachable", f"{store.url} at {told.endpoint}{f', {region}' if region else ''}")
    judge_store_clock(say, told.ahead_s)
    return True


def judge_store_clock(say: Scribe, ahead_s: float | None) -> None:
    """Judge how far the store's clock is ahead of this machine's; None where it tells none."""
    if ahead_s is None:
        return
    told = f"{abs(ahead_s):,.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
    advice = "set this machine's clock by a time service: S3 refuses requests signed 15 min off"
    if abs(ahead_s) >= CLOCK_FAULT_S:
        say.fault("clock", told, advice)
    elif abs(ahead_s) >= CLOCK_WARNING_S:
        say.warning("clock", told, advice)
    else:
        say.ok("clock", f"within {CLOCK_WARNING_S:.0f} s of this machine's")


def _try(say: Scribe, store: ObjectStore) -> None:
    try:
        store.probe()
    except HeadraceError as error:
        say.failed("writes", error)
        return
    say.ok("writes", f"an object below {store.url} was written, read back and listed")
    if store.conditional:
        say.ok("conditions", "what exists is not replaced (conditional writes are honoured)")
    else:
        say.warning(
            "conditions",
            "it takes a second write of one name (If-None-Match is not honoured)",
            "nothing need be done: names end in the hash of their rows; one sink a run is safest",
        )
    _try_deleting(say, store)


def _try_deleting(say: Scribe, store: ObjectStore) -> None:
    name = _PROBE + secrets.token_hex(8)
    try:
        store.put(name, b"doctor")
        store.delete(name)
        gone = store.get(name) is None
    except HeadraceError as error:
        say.warning(
            "deletes",
            str(error),
            f"it is needed only where a finished run gets more prompts; {name} stays there",
        )
        return
    if gone:
        say.ok("deletes", "an object was removed")
    else:
        say.warning("deletes", f"{name} is still there after it was removed: a copy of old?")


def tell_free(say: Scribe, path: Path, check: str = "disk") -> None:
    """Tell how much room is left where a folder lies, or will."""
    there = next((each for each in (path, *path.absolute().parents) if each.exists()), None)
    if there is None:
        return
    try:
        free = shutil.disk_usage(there).free
    except OSError as error:
        say.fault(check, f"{there} cannot be looked at: {error.strerror}")
        return
    told = f"{free / 1e9:,.1f} GB free at {there}"
    if free < LEAST_FREE_BYTES:
        say.fault(check, told, "make room: nothing can be written soon")
    elif free < FEW_FREE_BYTES:
        say.warning(check, told, "make room, or write elsewhere")
    else:
        say.ok(check, told)
