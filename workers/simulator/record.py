"""What of a server outlives its death."""

from dataclasses import dataclass, field

from workers.simulator.faults import FaultBook
from workers.simulator.journal import Journal


class Tally:
    """What a server has seen since the simulator started, across its deaths.

    Attributes:
        served: Answers sent, whatever they said.
        open: Requests whose client is waiting now.
        max_open: The most that there have been at once.
        refused: Requests answered with 400.
    """

    def __init__(self) -> None:
        self.served = 0
        self.open = 0
        self.max_open = 0
        self.refused = 0


@dataclass(slots=True)
class ServerRecord:
    """A server, whether it lives or not.

    Attributes:
        port: Where it listens; 0 until it has first listened on a free one.
        faults: The request faults armed at it.
        tally: What it has seen.
        journal: Where its requests are written down.
    """

    port: int
    journal: Journal
    faults: FaultBook = field(default_factory=FaultBook)
    tally: Tally = field(default_factory=Tally)
