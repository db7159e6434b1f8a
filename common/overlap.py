"""Choose which stream entries go because the store has their records. Pure."""

from collections.abc import Sequence

from common.models import Record
from common.queue.maintenance import StreamItem
from common.reader import current_records
from common.streams import OUTCOMES


def to_drop(
    waiting: Sequence[StreamItem], stored: Sequence[Record]
) -> list[tuple[StreamItem, Record]]:
    """Choose which of a key's stream entries go, given its records in the store.

    Those go whose try the store has, and all of them where it has a completion: at most one
    terminal record a (key, try), at most one completion a key.

    Returns:
        (entry, the key's current record over the store and the entries that stay) pairs.
    """
    completed = any(record.outcome == "completed" for record in stored)
    tries = {record.try_ for record in stored}
    gone = [item for item in waiting if completed or item.try_ in tries]
    stay = [
        Record(
            key=item.key,
            fingerprint=stored[0].fingerprint,
            try_=item.try_,
            outcome=OUTCOMES[item.outcome.encode()],
        )
        for item in waiting
        if item not in gone
    ]
    current = current_records([*stored, *stay])
    return [(item, current[item.key]) for item in gone]
