"""Restart several servers, some at a time, and none any more once one has gone wrong."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress

from workers.node.restart.choice import Outcome, had
from workers.supervisor.records import ServerRecord

LOOK_S = 0.2
LEAVE_S = 8.0
"""What the steps get to end after an interruption: less than the command itself."""


def roll(
    records: Sequence[ServerRecord],
    restart: Callable[[ServerRecord], Outcome],
    *,
    at_once: int,
    stop: threading.Event,
    look: Callable[[], None],
) -> list[Outcome]:
    """Restart servers in their order.

    Args:
        records: Which.
        restart: Restarts one.
        at_once: How many at a time.
        stop: Tells those that are at work to end; set here when this thread is interrupted.
        look: Called a few times a second.

    Returns:
        What became of each, in their order; those after the first that went wrong are not begun.
    """
    outcomes: dict[str, Outcome] = {}
    waiting = list(records)
    at_work: dict[Future[Outcome], str] = {}
    with ThreadPoolExecutor(at_once) as threads:
        try:
            while at_work or (waiting and not _wrong(outcomes)):
                while waiting and len(at_work) < at_once and not _wrong(outcomes):
                    record = waiting.pop(0)
                    at_work[threads.submit(restart, record)] = record.name
                done, _ = wait(at_work, timeout=LOOK_S, return_when=FIRST_COMPLETED)
                for each in done:
                    outcomes[at_work.pop(each)] = each.result()
                look()
        except BaseException:
            stop.set()
            with suppress(Exception):
                wait(at_work, timeout=LEAVE_S)
            raise
    for record in records:
        outcomes.setdefault(
            record.name, Outcome(name=record.name, state="not begun", before=had(record))
        )
    return [outcomes[record.name] for record in records]


def _wrong(outcomes: dict[str, Outcome]) -> bool:
    return any(each.state in {"failed", "stopped"} for each in outcomes.values())
