"""Know that this process was told to stop, and how urgently."""

import asyncio
import signal
from collections import Counter

BY_PARENT = signal.SIGUSR1
"""How the process that watches worker groups passes a stop on.

Ctrl-C in a terminal, `scancel` and systemd tell the whole family at once. Passed on as the same
signal, one Ctrl-C would reach each child twice, and the second one does not wait.
"""

HURRY = signal.SIGUSR2
"""How it says that nobody wants to wait any more.

Not by `BY_PARENT` once more: two equal signals that come before the first is handled are one.
"""


class StopRequest:
    """Whether this process was told to stop, how often, and by which signal.

    Attributes:
        asked: Set by the first request.
        hurried: Set by the second one of the same teller, or by `hurry`.
        signal: Number of the first signal, None where none was the reason.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()
        self.signal: int | None = None
        self._told: Counter[str] = Counter()

    def on_signal(self, number: int) -> None:
        """Take a signal that asks to stop: one of `common.stops`, or of the watching process."""
        if number == HURRY:
            self.hurry(int(signal.SIGTERM))
        elif number == BY_PARENT:
            self.ask(int(signal.SIGTERM), teller="watching process")
        else:
            self.ask(number)

    def ask(self, number: int | None = None, *, teller: str = "") -> None:
        """Ask to stop.

        Args:
            number: Of the signal, None for none.
            teller: Who asks: what two of them say is one request, said twice.
        """
        self._told[teller] += 1
        if self._told[teller] > 1:
            self.hurried.set()
        self._begin(number)

    def hurry(self, number: int | None = None) -> None:
        """Ask to stop without waiting for anything.

        Args:
            number: Of the signal, None for none.
        """
        self.hurried.set()
        self._begin(number)

    def _begin(self, number: int | None) -> None:
        if not self.asked.is_set():
            self.signal = number
        self.asked.set()
