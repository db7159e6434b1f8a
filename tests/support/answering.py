"""A server that answers each prompt as a test says, for worker groups in processes of their own.

It looks like SGLang just enough for a worker group: a model page, and one token for a probe. What
the simulator does not do (any nonsense, any choice of bodies) is a function here.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.scripted_server import Reply, scripted_server

MODEL = "tiny"
PROBE = "headrace-probe"
_START_S = 10
_IDLE = {"num_running_reqs": 0, "num_waiting_reqs": 0, "max_running_requests": 64}

Respond = Callable[[dict[str, Any]], Reply]


@dataclass
class AnsweringServer:
    """What a test sees of it: its address, and the prompts' requests as they came."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)


def generated(text: str | None, *, tokens: int = 1, finish: str = "stop") -> bytes:
    """The body of an answer of /generate."""
    meta = {
        "id": "x",
        "finish_reason": {"type": finish},
        "prompt_tokens": 3,
        "completion_tokens": tokens,
    }
    return json.dumps({"text": text, "meta_info": meta}).encode()


def prompt_of(body: dict[str, Any]) -> str:
    """The text that a request asks, whatever its route."""
    if "messages" in body:
        return str(body["messages"][-1]["content"])
    return str(body.get("prompt", body.get("text")))


@contextlib.contextmanager
def answering(respond: Respond) -> Iterator[AnsweringServer]:
    """Run one on a free loopback port, on a loop of its own."""
    server = AnsweringServer()
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    done = asyncio.Event()

    async def step(body: dict[str, Any]) -> Reply:
        if str(body.get("rid", "")).startswith(PROBE):
            return Reply(body=generated("a"))
        server.requests.append(body)
        return respond(body)

    async def serve(step: Callable[[dict[str, Any]], Awaitable[Reply]]) -> None:
        pages = {
            "/v1/models": json.dumps({"data": [{"id": MODEL, "max_model_len": 32768}]}).encode(),
            # A server that says it is idle is not left alone for the sake of unknown processes.
            "/v1/loads": json.dumps({"loads": [_IDLE]}).encode(),
        }
        async with scripted_server(step, pages=pages) as script:
            server.url = script.url
            ready.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(step),))
    thread.start()
    try:
        assert ready.wait(_START_S), "the server did not start"
        yield server
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()
