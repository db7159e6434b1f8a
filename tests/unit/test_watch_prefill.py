"""Ten minutes of slow prefill are no fault of a server: no token, health refused, pages late.

The watch runs as in production, with its own limits, on a loop whose clock jumps to the next thing
that is due: ten minutes pass in an instant.
"""

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typing_extensions import override

from workers.client import probe
from workers.client.faults import AttemptError, ServerAnswer
from workers.client.requests import Request
from workers.readings.loads import ServerIdentity, ServerLoad
from workers.servers import watch
from workers.servers.watch import ServerWatch
from workers.timing import Timing

TEN_MINUTES_S = 600.0
LONGEST_STALL_S = 60.0


class JumpingLoop(asyncio.SelectorEventLoop):
    """Waits for nothing: its clock jumps to whatever is due next."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        super().__init__(_JumpingSelector(self))

    @override
    def time(self) -> float:
        return self.now_s


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    @override
    def select(self, timeout: float | None = None) -> Any:
        self._loop.now_s += max(timeout or 0.0, 0.0)
        return super().select(0)


class PrefillingServer:
    """A server that prefills chunk by chunk, as the watch's client sees it.

    Args:
        chunk_s: How long a chunk takes; its tokens are counted at its end.
        blocks: Its pages are answered between two chunks only, as before SGLang 0.5.13.
        dead_after_s: When its scheduler stands still, with all pages answered as before.
        some_pages_hang: Some pages but not all hang from then on, as up to SGLang 0.5.12.
    """

    url = "http://gpu.test:30000"

    def __init__(
        self,
        chunk_s: float,
        *,
        blocks: bool,
        dead_after_s: float = 1e9,
        some_pages_hang: bool = False,
    ) -> None:
        self.some_pages_hang = some_pages_hang
        self.chunk_s = chunk_s
        self.blocks = blocks
        self.dead_after_s = dead_after_s
        self.warm = True
        self.began_s = self._now_s()

    async def identify(self) -> ServerIdentity:
        return ServerIdentity(model="m")

    async def load(self, timeout_s: float = 5.0) -> ServerLoad:
        if self.some_pages_hang and self._now_s() - self.began_s > self.dead_after_s:
            await asyncio.sleep(timeout_s)  # the others have answered
        if self.blocks:
            passed_s = self._now_s() - self.began_s
            await asyncio.sleep(self.chunk_s - passed_s % self.chunk_s)
        alive_s = min(self._now_s() - self.began_s, self.dead_after_s)
        done = 8192 * int(alive_s // self.chunk_s)
        return ServerLoad(running=8, gen_tokens_total=7, prompt_tokens_total=done, counted_by="x")

    async def probe_token(self, limit_s: float) -> None:
        if not self.warm:
            # It waits behind the prompts that are prefilled.
            await asyncio.sleep(limit_s)
            raise AttemptError("no token in time")

    async def generate(self, *_: object, **__: object) -> ServerAnswer:
        await asyncio.sleep(1e6)
        raise AssertionError("nobody waits so long")

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


def played(monkeypatch: pytest.MonkeyPatch, what: Callable[[], Awaitable[Any]]) -> Any:
    """Run on a loop of our own, with the watch's clock as its clock."""
    loop = JumpingLoop()
    clock = SimpleNamespace(monotonic=loop.time)
    monkeypatch.setattr(watch, "time", clock)
    if hasattr(probe, "time"):
        monkeypatch.setattr(probe, "time", clock)
    try:
        return loop.run_until_complete(what())
    finally:
        loop.close()


async def hang_seen_after_s(make: Callable[[], PrefillingServer]) -> float | None:
    """Watch a server with requests open for ten minutes; None when it is left in peace."""
    loop = asyncio.get_running_loop()
    server = make()
    seen = ServerWatch(cast("Any", server), on_change=lambda: None, timing=Timing())
    hung: asyncio.Future[float] = loop.create_future()

    def on_hang() -> None:
        if not hung.done():
            hung.set_result(loop.time() - server.began_s)

    watching = asyncio.create_task(seen.run(on_hang))
    assert not watching.done()
    while not seen.ready:  # noqa: ASYNC110 - it rings no bell here
        await asyncio.sleep(0.1)
    server.warm = False
    requests = [
        asyncio.create_task(seen.generate(cast("Request", None), 1e6, fresh=False))
        for _ in range(8)
    ]
    assert len(requests) == 8
    done, _ = await asyncio.wait([hung], timeout=TEN_MINUTES_S)
    # The token that is asked for outlives whoever asks.
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    return hung.result() if done else None


@pytest.mark.cases
@pytest.mark.parametrize(
    ("chunk_s", "blocks"), [(5.0, False), (25.0, False), (5.0, True), (14.0, True)]
)
def test_b44_ten_minutes_of_slow_prefill_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, chunk_s: float, *, blocks: bool
) -> None:
    def make() -> PrefillingServer:
        return PrefillingServer(chunk_s, blocks=blocks)

    assert played(monkeypatch, lambda: hang_seen_after_s(make)) is None


@pytest.mark.parametrize("some_pages_hang", [False, True])
@pytest.mark.parametrize("dead_after_s", [100.0, 101.0, 102.0, 103.0, 104.0])
def test_a_server_that_stands_still_under_the_same_load_is_found(
    monkeypatch: pytest.MonkeyPatch, dead_after_s: float, *, some_pages_hang: bool
) -> None:
    def make() -> PrefillingServer:
        return PrefillingServer(
            # Tokens come after whichever reading is the last before it dies.
            0.5,
            blocks=False,
            dead_after_s=dead_after_s,
            some_pages_hang=some_pages_hang,
        )

    seen_s = played(monkeypatch, lambda: hang_seen_after_s(make))

    assert seen_s is not None
    assert dead_after_s < seen_s < dead_after_s + LONGEST_STALL_S
