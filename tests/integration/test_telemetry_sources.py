"""A server's figures from each side alone: its pages, those of older versions, and its log."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from tests.support.engine_world import until
from workers.client.requests import Request
from workers.client.sglang import SGLangClient
from workers.readings.log_lines import Batch, parse_line
from workers.servers.log_tail import LogTail
from workers.servers.telemetry import ServerFigures
from workers.servers.watch import ServerWatch
from workers.simulator.launch import SimulatorProcess
from workers.timing import Timing

CAP, WAITING = 12, 3
RATE = 3015.0 * CAP / (CAP + 112)
"""Of the simulator's model with the cap's requests running: tokens a second."""

QUICK = Timing(ask_again_s=0.05, load_every_s=0.3)
PAGES = ("/metrics", "/v1/loads", "/server_info", "/get_server_info", "/get_load")


class Case(NamedTuple):
    """A server: its version, the pages that it has, whether it has a log, what stays unknown."""

    version: str
    pages: tuple[str, ...] = ()
    log: bool = True
    unknown: frozenset[str] = frozenset()


def without(*names: str) -> frozenset[str]:
    return frozenset(names)


CASES = {
    "metrics": Case("0.5.23", ("/metrics",), log=False, unknown=without("cap")),
    "loads": Case("0.5.23", ("/v1/loads",), log=False, unknown=without("mamba_usage")),
    "loads-0.5.12": Case(
        "0.5.12.post1", ("/v1/loads",), log=False, unknown=without("mamba_usage")
    ),
    "info-and-load-0.5.7": Case(
        "0.5.7",
        ("/get_server_info", "/get_load"),
        log=False,
        unknown=without("token_usage", "mamba_usage", "cap"),
    ),
    "log-0.5.4": Case("0.5.4"),
    "log-0.5.9": Case("0.5.9"),
    "log-0.5.23": Case("0.5.23"),
    "loads-and-log": Case("0.5.12.post1", ("/v1/loads",)),
    "everything": Case("0.5.23", PAGES),
}


def request(number: int) -> Request:
    members = {
        "text": "x" * 400,
        "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": True},
    }
    raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in members.items()}
    return Request(
        endpoint="generate", members=raw, rid=f"telemetry-{number:06d}", max_tokens=30_000
    )


class Watched:
    """A server with as many requests as it runs and some that wait, and who watches it."""

    def __init__(self, watch: ServerWatch, tail: LogTail) -> None:
        self.watch = watch
        self._tail = tail

    def look(self) -> ServerFigures:
        """Follow the log, and say how the server is now."""
        now_s = time.monotonic()
        self.watch.telemetry.note_log(self._tail.read(), now_s)
        return self.watch.telemetry.figures(now_s)

    def told(self) -> dict[str, Any]:
        """What is known of a server at work, by name."""
        now = self.look()
        names = ("running", "queued", "cap", "token_usage", "mamba_usage")
        figures = {name: getattr(now.load, name) for name in names}
        return {**figures, "gen_tokens_per_s": now.gen_tokens_per_s, "told_s": now.told_s}


@asynccontextmanager
async def watched(simulator: SimulatorProcess, log: Path | None) -> AsyncIterator[Watched]:
    async with SGLangClient(simulator.urls[0], slots=64) as client:
        watch = ServerWatch(client, on_change=lambda: None, timing=QUICK)
        watching = asyncio.create_task(watch.run(lambda: None))
        asked = [
            asyncio.create_task(watch.generate(request(n), 600.0)) for n in range(CAP + WAITING)
        ]
        try:
            yield Watched(watch, LogTail(lambda: log))
        finally:
            for task in (*asked, watching):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*asked, watching, return_exceptions=True)


def is_right(told: dict[str, Any], unknown: frozenset[str]) -> bool:
    """Whether all figures are what a full server's are; those that nobody tells are missing."""
    missing = {name for name, value in told.items() if value is None}
    if missing != unknown:
        return False
    rate, mamba = told["gen_tokens_per_s"], told["mamba_usage"]
    return (
        told["running"] == CAP
        # The watch's own question for a token waits its turn too.
        and told["queued"] in {WAITING, WAITING + 1}
        and told["cap"] in {CAP, None}
        and abs(rate - RATE) < 0.2 * RATE
        and (mamba is None or 0.05 < mamba < 0.95)
        and told["told_s"] < 30
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_side_alone_tells_how_a_server_at_work_is(case: Case, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    options: dict[str, Any] = {
        "sglang_version": case.version,
        "missing": [path for path in PAGES if path not in case.pages],
        "answer_tokens": "30000",
        "cap": CAP,
    }
    if case.log:
        options["sglang_log"] = str(log)

    async def see() -> None:
        async with watched(simulator, log) as server:
            last: dict[str, Any] = {}

            def right() -> bool:
                last.update(server.told())
                return is_right(last, case.unknown)

            try:
                await until(right, "figures of a server at work")
            except TimeoutError as error:
                raise AssertionError(f"{last} is not right, rate {RATE:.0f}") from error

    with SimulatorProcess(servers=1, **options) as simulator:
        asyncio.run(see())
    if case.log:
        written = [parse_line(line) for line in log.read_bytes().splitlines()]
        batches = [line for line in written if isinstance(line, Batch)]
        assert None not in written
        # Where pages tell the rest, the figures may be right before a decode has been logged.
        seen = {line.kind for line in batches}
        assert seen == {"prefill", "decode"} or (case.pages and seen == {"prefill"})
        assert None not in [line.running for line in batches]


def test_a_server_that_is_gone_looks_like_nothing_after_a_while(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    options: dict[str, Any] = {"answer_tokens": "30000", "cap": CAP, "sglang_log": str(log)}

    async def see() -> None:
        async with watched(simulator, log) as server:
            await until(lambda: server.look().gen_tokens_per_s is not None, "a rate")
            simulator.kill()
            now_s = time.monotonic()
            gone = server.watch.telemetry.figures(now_s + 40)
            assert (gone.load.running, gone.gen_tokens_per_s) == (None, None)
            assert gone.told_s is not None
            assert gone.told_s > 30

    with SimulatorProcess(servers=1, **options) as simulator:
        asyncio.run(see())
