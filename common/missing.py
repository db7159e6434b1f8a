"""Queue the accepted prompts that the ledger lacks: `inputs/` minus ledger."""

import logging
from collections.abc import Iterable

from common import catalog
from common.errors import RedisFullError
from common.models import HexRow
from common.queue.ledger import CALL_ROWS, Ledger
from common.queue.maintenance import Maintenance
from common.store import ObjectStore

log = logging.getLogger(__name__)


def add_missing(
    store: ObjectStore, ledger: Ledger, turn: Maintenance, *, cancelled: bool = False
) -> tuple[int, int]:
    """Go through `inputs/` in its order; memory is that of one object.

    A prompt that was accepted again with another text (`--accept-changes`) stands in `inputs/`
    twice: the last text counts, for whatever is not completed.

    Beyond the run's window only the ledger learns of them, and feeding brings the rest. Where
    Redis has no room even for that, it stays in `inputs/`: the end test misses it then, and has
    this done again.

    Of a cancelled run they are added alone, with their last text, and queued nowhere.

    Returns:
        How many were added, and how many took their last text.
    """
    added = 0
    full = False
    # Key -> fingerprint and object of its last row, only of keys whose rows differ somewhere.
    changed: dict[bytes, tuple[bytes, str]] = {}
    objects = catalog.list_inputs(store).rows
    # The last text is the one that comes first here, and nothing is replaced any more.
    for name, rows in catalog.all_inputs(store, objects[::-1] if cancelled else objects):
        seq = catalog.inputs_seq(name)
        for step in _steps(rows):
            absent, differing = turn.compare([row[:2] for row in step])
            if absent and not full:
                try:
                    fresh = catalog.raw_rows(step[at] for at in absent)
                    added += ledger.add(fresh, inputs_seq=seq, cancelled=cancelled).added
                except RedisFullError as error:
                    log.warning("%s", error)
                    full = True
            if not cancelled:
                changed.update({step[at][0]: (step[at][1], name) for at in differing})
        if changed:
            changed.update({row[0]: (row[1], name) for row in rows if row[0] in changed})
    return added, _replace(store, ledger, changed)


def _replace(store: ObjectStore, ledger: Ledger, changed: dict[bytes, tuple[bytes, str]]) -> int:
    replaced = 0
    for name in sorted({name for _, name in changed.values()}):
        rows = catalog.input_rows(store, name)
        last = [row for row in rows if changed.get(row[0]) == (row[1], name)]
        for step in _steps(last):
            reply = ledger.add(
                catalog.raw_rows(step), inputs_seq=catalog.inputs_seq(name), replace=True
            )
            replaced += reply.replaced
    return replaced


def _steps(rows: list[HexRow]) -> Iterable[list[HexRow]]:
    return (rows[first : first + CALL_ROWS] for first in range(0, len(rows), CALL_ROWS))
