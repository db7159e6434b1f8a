"""Know that this process was told to stop, and how urgently."""

import asyncio


class StopRequest:
    """Whether this process was told to stop, how often, and by which signal.

    Attributes:
        asked: Set by the first request.
        hurried: Set by the second one.
        signal: Number of the first signal, None where none was the reason.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()
        self.signal: int | None = None

    def ask(self, signal: int | None = None) -> None:
        """Ask to stop."""
        if self.asked.is_set():
            self.hurried.set()
        else:
            self.signal = signal
        self.asked.set()
