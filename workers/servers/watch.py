"""Watch one SGLang server: is it there, who is it, does work go on in it.

    waiting   no token has come yet: refused, 503, or warming up; asked again every second
    ready     a one-token request was answered: claims may go on
    down      refused or reset, or nothing moved for a while with requests open, and a one-token
              request was not answered either; claims stop until a token comes again
    faulty    it answers, but refuses us (key, no such page): says so, asked again every 30 s;
              before the first token that ends the process, for somebody has to change something

`/health` is not asked: it says 503 under a long prefill and 200 over a dead scheduler. What counts
is progress (answers, or the server's own token counters) and a real token.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from common.errors import HeadraceError, ServerUnusableError
from workers.client.faults import AttemptError, ServerAnswer, ServerGoneError
from workers.client.probe import is_alive
from workers.client.requests import Request
from workers.client.rows import Origin
from workers.client.sglang import SGLangClient
from workers.readings.loads import ServerIdentity, ServerLoad
from workers.servers.telemetry import Telemetry
from workers.servers.telling import tell_ready
from workers.timing import Timing

log = logging.getLogger(__name__)

PAGE_SHARE = 0.8
RATE_READINGS = 4
"""Over how many readings a rate is taken."""


class ServerWatch:
    """The state of one server; `generate` sends through it, so that it sees what comes back.

    With `always` it judges also while nothing of ours is open, as a server's supervisor wants it:
    one in which nothing moves is asked for a token, whoever its requests are of.

    Attributes:
        state: waiting, ready, down or faulty.
        detail: Why, for people.
        identity, load: What the server last said of itself; None before.
        restarts: How often it was seen to count from the beginning again.
        telemetry: What that comes to, with its log.
    """

    def __init__(
        self,
        client: SGLangClient,
        *,
        on_change: Callable[[], None],
        timing: Timing,
        start_limit_s: float | None = None,
        may_be_away: Callable[[], bool] = lambda: False,
        always: bool = False,
    ) -> None:
        self._client = client
        self._may_be_away = may_be_away
        self._on_change = on_change
        self._timing = timing
        self._start_limit_s = start_limit_s
        self._always = always
        self._began_s = time.monotonic()
        self._rest_until_s = 0.0
        self._ever_ready = False
        self._out_of_sight = False
        self.state = "waiting"
        # Nothing to tell of it before it was asked.
        self.detail = ""
        self.identity: ServerIdentity | None = None
        self.load: ServerLoad | None = None
        self.restarts = 0
        # The last load that was told, by whichever life of the server.
        self._told: ServerLoad | None = None
        self.telemetry = Telemetry(RATE_READINGS * timing.load_every_s)
        self._wake = asyncio.Event()
        self._moved_at_s = time.monotonic()
        self._open = 0
        self._said_at_s = self._limit_said_at_s = float("-inf")
        self._probe: asyncio.Task[bool] | None = None

    @property
    def ready(self) -> bool:
        """Whether claims may go on."""
        return self.state == "ready"

    @property
    def origin(self) -> Origin:
        """What result rows say of where they came from."""
        identity = self.identity
        return Origin(
            server=self._client.url,
            model=identity.model if identity else "",
            server_version=identity.version if identity else "",
        )

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and answer together, None when the server does not say."""
        return self.identity.context_length if self.identity else None

    def cuts(self, prompt_tokens: int) -> bool:
        """Whether the server, told to do so, has cut a prompt of so many tokens to what fits."""
        return self.identity is not None and self.identity.cuts(prompt_tokens)

    async def generate(
        self, request: Request, deadline_s: float, *, fresh: bool = False
    ) -> ServerAnswer:
        """Send a request (see `SGLangClient.generate`); an answer of any kind is progress."""
        if not self._open:
            self._moved_at_s = time.monotonic()
        self._open += 1
        try:
            answer = await self._client.generate(request, deadline_s, fresh=fresh)
        finally:
            self._open -= 1
        self._moved_at_s = time.monotonic()
        return answer

    @property
    def _judged(self) -> bool:
        """Whether something has to move: requests of ours are open, or the server is ours."""
        return bool(self._open) or (self._always and self._ever_ready)

    async def alive(self) -> bool:
        """Ask for one token; several askers share one request."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(is_alive(self._client, limit_s=self._probe_s))
        return await asyncio.shield(self._probe)

    def report(self, fault: str, *, config: bool = False) -> None:
        """Take note of a server fault: no claims until a token has come again."""
        if self.state in {"waiting", "ready"}:
            self._enter("faulty" if config else "down", self._of_ours(fault))
            self._wake.set()

    def look_again(self) -> None:
        """Believe nothing of before: it may be another server by now, and has to give a token."""
        if self.state == "ready":
            self._enter("waiting", "not asked yet since it was drained")
            self._wake.set()

    def ask_for_rest(self, rest_s: float) -> None:
        """Take note that the server wants no request for so long."""
        self._rest_until_s = max(self._rest_until_s, time.monotonic() + rest_s)

    def rest_s(self) -> float:
        """How much of that is left, 0 when requests may be sent."""
        return max(0.0, self._rest_until_s - time.monotonic())

    def say_limit(self, what: str) -> None:
        """Tell people, now and then, that this machine cannot connect to the server."""
        now_s = time.monotonic()
        if now_s - self._limit_said_at_s >= self._timing.say_again_s:
            self._limit_said_at_s = now_s
            log.warning("%s; the slots that have no connection wait", what)

    async def run(self, on_hang: Callable[[], None]) -> None:
        """Watch for ever; `on_hang` gives back what is open when nothing moves any more.

        Raises:
            ServerUnusableError: Before the first token: it refuses us, or the start limit is over.
        """
        while True:
            await self._until_token(on_hang)
            await self._until_fault(on_hang)

    async def quiet(self, limit_s: float | None = None) -> bool:
        """Whether the server itself says, within the limit, that nothing is open there."""
        load = await self._read_load(self._timing.load_s if limit_s is None else limit_s)
        return load is not None and load.idle

    async def _until_token(self, on_hang: Callable[[], None]) -> None:
        timing = self._timing
        while not await self._try_token():
            if self._judged and self._stalled():
                # Connections of a dead machine may stay open for hours.
                on_hang()
            detail = self._of_ours(self.detail)
            self._say(f"waiting for the server at {self._client.url}: {detail}")
            self._check_start_limit()
            await asyncio.sleep(
                timing.faulty_again_s if self.state == "faulty" else timing.ask_again_s
            )
        self._ever_ready = True
        self._enter("ready", "")
        tell_ready(self._client.url, self.identity)

    async def _try_token(self) -> bool:
        try:
            async with asyncio.timeout(self._probe_s):
                self.identity = await self._client.identify()
                await self._note_first_load()
                alive = await self.alive()
            if alive:
                # One that hangs tells its model, and another may take its place before its token.
                before = self.identity
                await self._identify_anew()
                if self.identity != before:
                    await self._note_first_load()
                return True
            self.detail = "it gives no token yet"
        except (TimeoutError, AttemptError) as error:
            self.detail = str(error) or "no answer in time"
            if self.state == "faulty":
                self._enter("down", self.detail)
        except ServerUnusableError as error:
            if not self._ever_ready:
                raise
            self._enter("faulty", str(error))
        return False

    async def _note_first_load(self) -> None:
        self.load = await self._read_load(self._timing.load_s)
        self._note_told(self.load)
        self.telemetry.begin_anew()
        if self.load is not None:
            self.telemetry.note_pages(self.load, time.monotonic())

    def _check_start_limit(self) -> None:
        limit_s = self._start_limit_s
        if self._may_be_away():
            self._began_s = time.monotonic()
        if self._ever_ready or limit_s is None or time.monotonic() - self._began_s < limit_s:
            return
        raise ServerUnusableError(
            f"the server at {self._client.url} gave no token within {limit_s:g} s "
            f"(--start-limit): {self.detail}"
        )

    @property
    def _probe_s(self) -> float:
        return self._timing.probe_s if self._judged else self._timing.first_token_s

    async def _until_fault(self, on_hang: Callable[[], None]) -> None:
        self._wake.clear()
        self._moved_at_s = time.monotonic()
        while self.state == "ready":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timing.load_every_s):
                    await self._wake.wait()
            if self.state != "ready":
                return
            await self._note_load()
            if await self._hangs():
                stall_s = self._timing.stall_s
                self._enter("down", f"no progress for {stall_s:.0f} s and no token on asking")
                on_hang()

    async def _note_load(self) -> None:
        earlier = self.load
        load = await self._read_load(self._timing.load_s)
        if load is None:
            self._out_of_sight = True
            if not self._open:
                await self._look_for_it()
            return
        restarted = self._told is not None and load.went_back(self._told)
        if self._out_of_sight or restarted:
            await self._identify_anew()
        self._note_told(load)
        now_s = time.monotonic()
        if earlier is None or load.moved_since(earlier) or not self._judged:
            self._moved_at_s = now_s
        self.load = load
        self.telemetry.note_pages(load, now_s)
        self._on_change()

    def _note_told(self, load: ServerLoad | None) -> None:
        """Count a restart once it is known who the server is now: both are to be seen at once."""
        if load is None or self._out_of_sight:
            return
        if self._told is not None and load.went_back(self._told):
            self.restarts += 1
        self._told = load

    async def _identify_anew(self) -> None:
        """Ask who it is: it may have restarted as another while nothing was open there."""
        try:
            async with asyncio.timeout(self._timing.load_s):
                self.identity = await self._client.identify()
        except (TimeoutError, AttemptError, HeadraceError):
            self._out_of_sight = True
        else:
            self._out_of_sight = False

    async def _look_for_it(self) -> None:
        """Find out whether the server is gone while nothing is open there that would tell."""
        try:
            async with asyncio.timeout(self._timing.load_s):
                await self._client.identify()
        except ServerGoneError as error:
            if not error.reached:
                self.report(str(error))
        except (TimeoutError, AttemptError, HeadraceError):
            pass

    def _of_ours(self, text: str) -> str:
        """Leave out which server it is: whoever reads it knows."""
        return text.removeprefix(f"the server at {self._client.url} ")

    async def _read_load(self, limit_s: float) -> ServerLoad | None:
        try:
            async with asyncio.timeout(limit_s):
                # Pages that hang take none along: up to 0.5.12 a dead scheduler leaves /metrics.
                return await self._client.load(limit_s * PAGE_SHARE)
        except (TimeoutError, AttemptError, HeadraceError):
            return None

    async def _hangs(self) -> bool:
        if not self._judged or not self._stalled():
            return False
        # Under a long prefill an older server answers between two chunks alone: the token after
        # the last one, but the load after the present one.
        alive, load = await asyncio.gather(self.alive(), self._read_load(self._probe_s))
        before, self.load = self.load, load or self.load
        if alive or (load and before and load.moved_since(before)):
            self._moved_at_s = time.monotonic()
            return False
        if load and before is None:
            return False  # the first that it says of itself: the next one will tell
        # An answer may have come while the token was awaited.
        return self._stalled()

    def _stalled(self) -> bool:
        return time.monotonic() - self._moved_at_s >= self._timing.stall_s

    def _enter(self, state: str, detail: str) -> None:
        if state != self.state and state in {"down", "faulty"}:
            log.log(
                logging.INFO if self._may_be_away() else logging.WARNING,
                "server %s: %s; no claims until it gives a token",
                self._client.url,
                detail,
            )
            self._said_at_s = time.monotonic()
        self.state, self.detail = state, detail
        self._on_change()

    def _say(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._said_at_s >= self._timing.say_again_s:
            self._said_at_s = now_s
            log.info("%s", text)
