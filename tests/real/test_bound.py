"""The bound against a real server: its slots full, never more, and its own figures read rightly.

The server judges: its log says how many ran, its journal how many were open.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.real.conftest import ServerWith
from tests.real.pipeline import CONCURRENCY, MAMBA_LIMITED, Pipeline, as_chat, human_eval, say
from tests.real.server import RealServer, Seen, most_open, open_over_time
from workers.capacity.model_files import shape_at
from workers.client.sglang import SGLangClient
from workers.readings.loads import ServerIdentity, ServerLoad

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


async def _ask(url: str) -> tuple[ServerIdentity, ServerLoad]:
    async with SGLangClient(url, slots=1) as client:
        return await client.identify(), await client.load()


def asked(server: RealServer) -> tuple[ServerIdentity, ServerLoad]:
    """What the product's own client reads from the server now."""
    return asyncio.run(_ask(server.url))


class Case(NamedTuple):
    """A server and what it must come to when more than its cap is asked for."""

    flags: tuple[str, ...]
    cap: int
    bound: int
    ramp: int
    states: int
    sizing: str
    better: str


CASES = [
    # A ramp of 8 a second would fill these slots only with answers of over 4 s.
    pytest.param(
        Case(
            (),
            cap=32,
            bound=35,
            ramp=100,
            states=96,
            sizing="32 requests at once: as many as --max-running-requests asks (96 states, 3 a "
            "request)",
            better="no_radix",
        ),
        id="default",
    ),
    pytest.param(
        Case(
            MAMBA_LIMITED,
            cap=4,
            bound=6,
            ramp=8,
            states=12,
            sizing="4 requests at once: the mamba pool binds (12 states, 3 a request), 32 were "
            "asked for",
            better="no_radix",
        ),
        id="mamba-limited",
    ),
]

# 3 recurrent layers of 4 heads of 32 by 32 in float32, and a window of 3 over 256 channels; one
# layer that attends, with 2 heads of 32 for key and value each.
STATE_BYTES = 3 * (4 * 32 * 32 * 4 + 256 * 3 * 2)
TOKEN_BYTES = 2 * (32 + 32) * 2


@pytest.mark.parametrize("case", CASES)
def test_asked_above_the_cap_the_server_is_full_and_never_holds_more_than_the_bound(
    server_with: ServerWith, tmp_path: Path, case: Case
) -> None:
    server, cap = server_with(*case.flags), case.cap
    since, since_s = server.mark(), time.time()
    with Pipeline(tmp_path, server.url) as run:
        run.enqueue(as_chat(human_eval()), 100)
        run.start_workers(ramp=case.ramp)
        sink = run.start_sink()
        run.watch_until(lambda _: server.most_running(since) >= cap, "a full server")
        identity, load = asked(server)
        took_s = run.watch_to_the_end(sink)
        code, verdict = run.verify()
        figures = [each for each in run.figures if each.in_flight]

    seen = server.seen(since_s)
    most = most_open(seen)
    full = full_share(seen, cap)
    say(
        f"cap {cap}",
        asked=CONCURRENCY,
        requests=len(seen),
        most_open=most,
        most_running=server.most_running(since),
        full_share=f"{full:.3f}",
        mamba=load.mamba_usage,
        seconds=f"{took_s:.0f}",
    )
    assert (code, len(seen)) == (0, 164), verdict
    assert list(most.values()) == [case.bound]
    assert server.most_running(since) == server.logged_cap() == cap
    # Answers of one length end together, and this machine's cores are the server's too.
    assert full >= 0.9
    assert (identity.cap, load.cap) == (cap, cap)
    assert identity.strategy == "no_buffer"
    assert identity.facts is not None
    assert (identity.facts.states, identity.facts.recurrent) == (case.states, True)
    # What it says of itself, and its own model's config.json, come to what it does.
    assert {each.sizing for each in figures if each.running} == {case.sizing}
    assert any(case.better == each.better for each in figures if each.running)
    shape = shape_at(str(server.model))
    assert (shape.state_bytes, shape.token_bytes) == (STATE_BYTES, TOKEN_BYTES)
    assert identity.version == server.ask("/server_info")["version"]
    assert load.mamba_usage is not None
    assert any(abs(load.mamba_usage - told) < 0.006 for told in server.mamba_usages(since))
    assert {(f.cap, f.bound, f.strategy, f.server_version) for f in figures} == {
        (cap, case.bound, "no_buffer", identity.version)
    }
    assert max(f.in_flight for f in figures) == case.bound


def full_share(seen: Sequence[Seen], cap: int) -> float:
    """How full the server's slots were, from when they first were until the last request came."""
    steps = open_over_time(seen)
    first = next(i for i, (_, now) in enumerate(steps) if now >= cap)
    last_s = max(each.begun_s for each in seen)
    held = 0.0
    for (at_s, now), (next_s, _) in zip(steps[first:], steps[first + 1 :], strict=False):
        held += min(now, cap) * max(0.0, min(next_s, last_s) - at_s)
    return held / (cap * (last_s - steps[first][0]))
