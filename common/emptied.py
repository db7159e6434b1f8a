"""Tell whether an output is still the run's own, before anything is believed of what it lacks.

A directory that somebody removed, a bucket that was emptied, a disk that is not mounted: each
says "no records", and none of them says that nothing was generated. What such an output lacks is
no reason to forget what Redis knows, nor to call a run complete. The sign of an output that can be
believed is its `run.json`; what of Redis' knowledge can be made anew is what stands in `inputs/`.
"""

import msgspec

from common import names
from common.errors import ConflictError, StoreDamagedError, StoreEmptiedError
from common.models import RunRecord
from common.store import ObjectStore


class _Uid(msgspec.Struct, frozen=True):
    """What of run.json says whose output it is."""

    uid: str


def refuse_emptied(store: ObjectStore, record: RunRecord) -> None:
    """See that the output is the run's.

    Raises:
        StoreEmptiedError: It has no run.json.
        ConflictError: It is another run's.
        StoreDamagedError: Its run.json is none.
    """
    data = store.get(names.RUN_JSON)
    if data is None:
        raise StoreEmptiedError(emptied(store, record))
    try:
        uid = msgspec.json.decode(data, type=_Uid).uid
    except msgspec.MsgspecError as error:
        raise StoreDamagedError(f"{store.url}/{names.RUN_JSON}: {error}") from error
    if uid != record.uid:
        raise ConflictError(
            f"{store.url} holds another run now (uid {uid}), not {record.run!r} with uid "
            f"{record.uid}: put the run's own output back there"
        )


def emptied(store: ObjectStore, record: RunRecord) -> str:
    """Say that an output was emptied, and what to do."""
    return (
        f"{store.url} has no {names.RUN_JSON} any more: it was emptied or removed, or no disk is "
        "mounted there. "
        f"Nothing of run {record.run!r} is forgotten and nothing is stored until it is back: "
        "put the output back, or call the same `producer enqueue FILE` again, which makes it anew "
        "and queues what it has lost"
    )


def unaccepted(store: ObjectStore, record: RunRecord, count: int) -> str:
    """Say that `inputs/` lacks prompts that Redis has, and what to do."""
    return (
        f"{store.url}/{names.INPUTS} lacks {count:,} accepted prompts of run {record.run!r} that "
        "Redis knows: the run cannot end. Put the objects back, or call the same `producer "
        "enqueue FILE` again for each of its files"
    )
