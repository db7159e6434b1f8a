"""How a process is told to stop, and to wait for nothing more."""

import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.server_process import wait_until
from workers.node.part_log import PartLog
from workers.node.processes import Child
from workers.stop_request import BY_PARENT, HURRY, StopRequest

LISTENS = """
import asyncio, signal
from workers.stop_request import BY_PARENT, HURRY, StopRequest

async def main():
    stop = StopRequest()
    for number in (BY_PARENT, HURRY):
        signal.signal(number, lambda number, _: stop.on_signal(number))
    print("listens", flush=True)
    while not stop.asked.is_set():
        await asyncio.sleep(0.01)
    print("asked", stop.signal, "hurried" if stop.hurried.is_set() else "patient", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("signals", "hurried", "first"),
    [
        ([signal.SIGTERM], False, signal.SIGTERM),
        # One Ctrl-C in a terminal reaches the whole family, and is passed on besides.
        ([signal.SIGINT, BY_PARENT], False, signal.SIGINT),
        ([signal.SIGINT, signal.SIGTERM], True, signal.SIGINT),
        ([BY_PARENT, HURRY], True, signal.SIGTERM),
        ([HURRY], True, signal.SIGTERM),
    ],
)
def test_the_second_signal_of_one_teller_hurries(
    signals: list[signal.Signals], *, hurried: bool, first: signal.Signals
) -> None:
    stop = StopRequest()
    for number in signals:
        stop.on_signal(number)

    assert stop.asked.is_set()
    assert (stop.hurried.is_set(), stop.signal) == (hurried, first)


def test_a_child_is_told_both_though_it_looks_late(tmp_path: Path) -> None:
    """A node that was told twice tells servers and sink to stop and to hurry in one moment."""
    log = PartLog(tmp_path / "x.log")
    part = Child("part", [sys.executable, "-c", LISTENS], env={}, log=log)
    part.look(0.0)
    wait_until(lambda: log.last_line() == "listens", "its handlers", 60)
    process = psutil.Process(part.pid)
    process.suspend()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "its rest", 60)

    part.tell_to_stop()
    part.hurry()
    process.resume()

    wait_until(lambda: not part.alive, "its end", 60)
    assert log.last_line() == f"asked {int(signal.SIGTERM)} hurried"
