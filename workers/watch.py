"""Watch one SGLang server: is it there, who is it, does work go on in it.

    waiting   no token has come yet: refused, 503, or warming up; asked again every second
    ready     a one-token request was answered: claims may go on
    down      refused or reset, or nothing moved for STALL_S while requests were open and a one-token
              request was not answered either; claims stop until a token comes again
    faulty    it answers, but refuses us (key, model): says so, asked again every 30 s

`/health` is not asked: it says 503 under a long prefill and 200 over a dead scheduler. What counts is
progress (answers, or the server's own token counters) and a real token.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from common.errors import HeadraceError, ServerUnusableError
from workers.faults import AttemptError, ServerAnswer
from workers.loads import ServerIdentity, ServerLoad
from workers.requests import Request
from workers.rows import Origin
from workers.probe import is_alive
from workers.sglang import SGLangClient

log = logging.getLogger(__name__)

ASK_AGAIN_S = 1.0
FAULTY_AGAIN_S = 30.0
SAY_AGAIN_S = 10.0
PROBE_S = 20.0
LOAD_EVERY_S = 5.0
LOAD_S = 5.0
STALL_S = 35.0
"""With PROBE_S after it, a hang is found within 60 s."""


class ServerWatch:
    """The state of one server; `generate` sends through it, so that it sees what comes back.

    Attributes:
        state: waiting, ready, down or faulty.
        detail: Why, for people.
        identity, load: What the server last said of itself; None before.
    """

    def __init__(self, client: SGLangClient, *, on_change: Callable[[], None]) -> None:
        self._client = client
        self._on_change = on_change
        self.state = "waiting"
        self.detail = "not asked yet"
        self.identity: ServerIdentity | None = None
        self.load: ServerLoad | None = None
        self.gen_tokens_per_s: float | None = None
        self._wake = asyncio.Event()
        self._moved_at_s = time.monotonic()
        self._load_at_s = 0.0
        self._open = 0
        self._said_at_s = 0.0
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

    async def generate(self, request: Request, deadline_s: float) -> ServerAnswer:
        """Send a request; an answer of any kind is progress."""
        if not self._open:
            self._moved_at_s = time.monotonic()
        self._open += 1
        try:
            answer = await self._client.generate(request, deadline_s)
        finally:
            self._open -= 1
        self._moved_at_s = time.monotonic()
        return answer

    async def alive(self) -> bool:
        """Ask for one token; several askers share one request."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self._ask_token())
        return await asyncio.shield(self._probe)

    def report(self, fault: str, *, config: bool = False) -> None:
        """Take note of a server fault: no claims until a token has come again."""
        if self.state in {"waiting", "ready"}:
            self._enter("faulty" if config else "down", fault)
            self._wake.set()

    async def run(self, on_hang: Callable[[], None]) -> None:
        """Watch for ever; `on_hang` gives back what is open when nothing moves any more."""
        while True:
            await self._until_token()
            await self._until_fault(on_hang)

    async def quiet(self) -> bool:
        """Whether the server itself says that nothing is open there."""
        load = await self._read_load()
        return load is not None and load.running == 0 and not load.queued

    async def _until_token(self) -> None:
        while not await self._try_token():
            self._say(f"waiting for the server at {self._client.url}: {self.detail}")
            await asyncio.sleep(FAULTY_AGAIN_S if self.state == "faulty" else ASK_AGAIN_S)
        self._enter("ready", "")
        identity = self.identity
        log.info(
            "server %s is ready: model %s, SGLang %s, cap %s, %s",
            self._client.url,
            identity and identity.model,
            identity and (identity.version or "of unknown version"),
            identity and identity.cap,
            identity and (identity.strategy or "no mamba strategy told"),
        )

    async def _try_token(self) -> bool:
        try:
            async with asyncio.timeout(PROBE_S):
                self.identity = await self._client.identify()
                self.load = await self._client.load()
                if await self.alive():
                    return True
            self.detail = "it gives no token yet"
        except (TimeoutError, AttemptError) as error:
            self.detail = str(error) or "no answer in time"
            if self.state == "faulty":
                self._enter("down", self.detail)
        except ServerUnusableError as error:
            self._enter("faulty", str(error))
        return False

    async def _ask_token(self) -> bool:
        return await is_alive(self._client, limit_s=PROBE_S)

    async def _until_fault(self, on_hang: Callable[[], None]) -> None:
        self._wake.clear()
        self._moved_at_s = time.monotonic()
        while self.state == "ready":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOAD_EVERY_S):
                    await self._wake.wait()
            if self.state != "ready":
                return
            await self._note_load()
            if await self._hangs():
                self._enter("down", f"no progress for {STALL_S:.0f} s and no token on asking")
                on_hang()

    async def _note_load(self) -> None:
        earlier, earlier_s = self.load, self._load_at_s
        load = await self._read_load()
        if load is None:
            return
        now_s = time.monotonic()
        if earlier is None or load.moved_since(earlier) or not self._open:
            self._moved_at_s = now_s
        if earlier and earlier_s and earlier.counted_by == load.counted_by:
            self.gen_tokens_per_s = _rate(earlier, load, now_s - earlier_s)
        self.load, self._load_at_s = load, now_s
        self._on_change()

    async def _read_load(self) -> ServerLoad | None:
        try:
            async with asyncio.timeout(LOAD_S):
                return await self._client.load()
        except (TimeoutError, AttemptError, HeadraceError):
            return None

    async def _hangs(self) -> bool:
        if not self._open or time.monotonic() - self._moved_at_s < STALL_S:
            return False
        if await self.alive():
            self._moved_at_s = time.monotonic()
            return False
        # An answer may have come while the token was awaited.
        return time.monotonic() - self._moved_at_s >= STALL_S

    def _enter(self, state: str, detail: str) -> None:
        if state != self.state and state in {"down", "faulty"}:
            log.warning("server %s: %s; no claims until it gives a token", self._client.url, detail)
            self._said_at_s = time.monotonic()
        self.state, self.detail = state, detail
        self._on_change()

    def _say(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._said_at_s >= SAY_AGAIN_S:
            self._said_at_s = now_s
            log.info("%s", text)


def _rate(earlier: ServerLoad, load: ServerLoad, passed_s: float) -> float | None:
    if load.gen_tokens_total is None or earlier.gen_tokens_total is None or passed_s <= 0:
        return load.gen_throughput
    return max(0.0, load.gen_tokens_total - earlier.gen_tokens_total) / passed_s
