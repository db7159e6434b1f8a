"""Know that this process was told to stop, and how urgently."""

import asyncio
import signal
from collections import Counter

BY_PARENT = signal.SIGUSR1
"""How the process that watches worker groups passes a stop on.

Ctrl-C in a terminal, `scancel` and systemd tell the whole family at once. Passed on as the same
signal, one Ctrl-C would reach each child twice, and the second one does not wait.
"""


class StopRequest:
    """Whether this process was told to stop, how often, and by which signal.

    Attributes:
        asked: Set by the first request.
        hurried: Set by the second one of the same teller.
        signal: Number of the first signal, None where none was the reason.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()
        self.signal: int | None = None
        self._told: Counter[str] = Counter()

    def ask(self, signal: int | None = None, *, teller: str = "") -> None:
        """Ask to stop.

        Args:
            signal: By which signal, None for none.
            teller: Who asks: what two of them say is one request, said twice.
        """
        self._told[teller] += 1
        if self._told[teller] > 1:
            self.hurried.set()
        if not self.asked.is_set():
            self.signal = signal
        self.asked.set()
