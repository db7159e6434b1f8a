"""One request from its arrival to its end."""

from dataclasses import dataclass

from workers.simulator.checks import Plan
from workers.simulator.errors import Api
from workers.simulator.faults import Fault
from workers.simulator.journal import Ident
from workers.simulator.wire import Connection


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that a server has accepted.

    The server writes the first group once and ends it; the engine alone writes the second.

    Attributes:
        connection: Where the answer goes.
        api: Which API it came by.
        plan: What it asks for.
        ident: Its rid, hash and number.
        tokens: What it generates if nothing ends it before.
        natural_tokens: What it would generate without a limit.
        arrived_s: On the monotonic clock.
        prompt_tokens: What it holds in the KV pool from its start.
        fault: Befalls it at its end; None: nothing does.
        left: Whether the client has gone.
        work: Work until its end: tokens, or seconds with a latency distribution.
        done: Work that it had before it was last retracted.
        started_at: Virtual time of its start, less `done`.
        serial: Its turn of admission while it runs, else 0.
        admitted_s: On the monotonic clock; 0 until it first runs.
        retractions: How often the KV pool was too full for it.
    """

    connection: Connection
    api: Api
    plan: Plan
    ident: Ident
    tokens: int
    natural_tokens: int
    arrived_s: float
    work: float
    prompt_tokens: int
    fault: Fault | None = None
    left: bool = False
    done: float = 0.0
    started_at: float = 0.0
    serial: int = 0
    admitted_s: float = 0.0
    retractions: int = 0

    @property
    def tokens_per_work(self) -> float:
        """Tokens that a unit of work makes."""
        return self.tokens / self.work if self.work > 0 else 0.0
