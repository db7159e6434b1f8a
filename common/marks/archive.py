"""Marks in the store's `marks/`: each written once, and back from there into an emptied Redis."""

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from common import names, object_names
from common.crashpoints import reached
from common.marks.mark import MOST, Mark, iso
from common.models import RunRecord
from common.queue.marks import Marks
from common.store import ObjectStore

if TYPE_CHECKING:
    import redis

log = logging.getLogger(__name__)


def put(store: ObjectStore, mark: Mark) -> None:
    """Write a mark, unless its object is there.

    Raises:
        StoreUnusableError: It may be there all the same.
    """
    body: dict[str, Any] = {
        **msgspec.to_builtins(mark),
        # For people and for programs that do not know the kinds.
        "at": iso(mark.at_ms),
        "text": mark.text,
    }
    store.put_if_absent(object_names.mark_object(mark.id), msgspec.json.encode(body))


def archive(
    client: "redis.Redis", store: ObjectStore, record: RunRecord, *, close: bool = False
) -> int:
    """Write what the store lacks of a run's marks; returns how many.

    Several may be at it: a mark has one name, and no content but its own.

    Args:
        client: From `common.connect`.
        store: The run's output.
        record: The run.
        close: Also those that might have taken more events.

    Raises:
        StoreUnusableError: Call again later.
        RedisUnusableError: Likewise.
    """
    marks = Marks(client, record.run)
    waiting = marks.settled(close=close)
    for mark in waiting:
        put(store, mark)
        reached("mark.stored")
    marks.archived([mark.id for mark in waiting])
    return len(waiting)


def restore(client: "redis.Redis", store: ObjectStore, record: RunRecord) -> int:
    """Give Redis the newest marks that the store has; returns how many it lacked."""
    marks = Marks(client, record.run)
    known = {mark.id for mark in marks.latest()}
    found = _ids(store)
    # As Redis itself keeps them: what was set by hand first.
    by_hand = [mark_id for mark_id in found if "-hand-" in mark_id][-MOST:]
    others = [mark_id for mark_id in found if "-hand-" not in mark_id]
    ordered = [*by_hand, *others[max(len(others) - (MOST - len(by_hand)), 0) :]]
    missing = [mark_id for mark_id in ordered if mark_id not in known]
    read = list(_read_all(store, missing))
    return marks.restore(read) if read else 0


def all_of(store: ObjectStore) -> list[Mark]:
    """Read every mark that the store has, the oldest first."""
    return list(_read_all(store, _ids(store)))


def _ids(store: ObjectStore) -> list[str]:
    return sorted(
        filter(None, (object_names.mark_of(found.name) for found in store.list(names.MARKS)))
    )


def _read_all(store: ObjectStore, ids: Iterable[str]) -> Iterator[Mark]:
    for mark_id in ids:
        mark = _read(store, mark_id)
        if mark is not None:
            yield mark


def _read(store: ObjectStore, mark_id: str) -> Mark | None:
    data = store.get(object_names.mark_object(mark_id))
    try:
        mark = msgspec.json.decode(data or b"", type=Mark)
    except msgspec.MsgspecError as error:
        log.warning("%s/%s is no mark: %s", store.url, object_names.mark_object(mark_id), error)
        return None
    return mark if mark.id == mark_id else None
