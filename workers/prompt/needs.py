"""What serving a prompt needs of others: its server, and what Redis keeps meanwhile."""

from typing import NamedTuple, Protocol

from common.models import Claim, KeptTurns
from workers.client.faults import ServerAnswer
from workers.client.oddities import Lately
from workers.client.requests import Request
from workers.client.rows import Origin
from workers.rids import Rids


class Server(Protocol):
    """What serving a prompt needs of its server; `workers.servers.watch` gives it."""

    @property
    def origin(self) -> Origin:
        """What result rows say of where they came from."""

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and answer together, None when the server does not say."""

    async def generate(
        self, request: Request, deadline_s: float, *, fresh: bool = False
    ) -> ServerAnswer:
        """Send a request, if so told on a fresh connection; raises `AttemptError`."""

    async def alive(self) -> bool:
        """Ask for one token; True when it came."""

    def cuts(self, prompt_tokens: int) -> bool:
        """Whether the server has cut a prompt of so many tokens to what fits."""

    def ask_for_rest(self, rest_s: float) -> None:
        """Take note that the server wants to be left alone for so long."""

    def rest_s(self) -> float:
        """How much of that is left."""

    def say_limit(self, what: str) -> None:
        """Tell people, now and then, that this machine cannot connect to the server."""


class Charger(Protocol):
    """Charges attempts durably."""

    async def charge(self, claim: Claim, reason: str, *, before: int | None) -> int:
        """Count an attempt in Redis.

        Args:
            claim: Whose.
            reason: One word.
            before: Attempts so far; with None a lost answer may charge one too many.

        Returns:
            How many this try has now; 0 when another process holds the job.
        """


class TurnStore(Protocol):
    """Keeps finished turns."""

    async def keep(self, kept: KeptTurns) -> str:
        """Keep the turns so far; gives what `TurnKeeper.keep` gives."""


class SlotHolder(Protocol):
    """Knows whether this process has the right to its open requests."""

    def may_go_on(self) -> bool:
        """Whether a request may be opened in a slot that has just ended one."""

    def held_since(self, instant_s: float) -> bool:
        """Whether slots were held without a gap since an instant of the monotonic clock.

        In a gap another process may have taken them, and aborts what it finds open there.
        """


class Needs(NamedTuple):
    """All of it, with what is the process's own: its request ids, and what it answered lately."""

    server: Server
    charger: Charger
    rids: Rids
    lately: Lately
    turns: TurnStore
    slots: SlotHolder
