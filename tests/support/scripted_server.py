"""An HTTP server that follows a script: one step for each generation request, in order.

Steps: `ok`, `reset` (linger 0), `half` (part of a body, then closed), `stall` (never answers),
`drop` (closed without a byte; `late drop` after a while), `nonsense` (no HTTP), a key of `BYTES`
(written as it stands), a `Reply`, or an async function of the request's JSON that gives one. The
last step repeats. `… in the head`, `… in the body`: after a part of the answer; `dribble` writes a
byte a second.

Control pages (`/abort_request` and all GETs) are not steps; `pages` holds their bodies or replies,
and what is not there answers 404.
"""

import asyncio
import contextlib
import gzip
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    status: int = 200
    body: bytes = b""
    headers: str = ""
    after_s: float = 0.0


Step = str | Reply | Callable[[dict[str, Any]], Awaitable[Reply | str]]
Page = bytes | Reply | Callable[[], bytes | Reply]


@dataclass
class ScriptedServer:
    """What a test sees of it.

    Attributes:
        requests: JSON bodies of the generation requests, in the order in which they came.
        aborts: Ids that were asked to be aborted.
        connections: How many were accepted.
        events: `begin`, `abort` and `gone` (the client closed while a request was open), in order.
        asked: Paths of the GETs.
    """

    steps: tuple[Step, ...]
    pages: Mapping[str, Page]
    aborts_answered: bool = True
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    connections: int = 0
    events: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    serving: set[asyncio.Task[Any]] = field(default_factory=set)
    _happened: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def seen(self, event: str) -> None:
        """Wait until an event has happened."""
        async with asyncio.timeout(10), self._happened:
            await self._happened.wait_for(lambda: event in self.events)

    async def _note(self, event: str) -> None:
        async with self._happened:
            self.events.append(event)
            self._happened.notify_all()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        self.connections += 1
        task = asyncio.current_task()
        if task is not None:
            self.serving.add(task)
            task.add_done_callback(self.serving.discard)
        # Cancelled by the test's end only, about which asyncio's streams would complain.
        with contextlib.suppress(
            ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError
        ):
            while await self._one(reader, writer):
                pass
        writer.close()
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await writer.wait_closed()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        _, path, _ = head.split(" ", 2)
        body = await reader.readexactly(_length(head))
        if path == "/abort_request":
            self.aborts.append(json.loads(body)["rid"])
            await self._note("abort")
            if not self.aborts_answered:
                await reader.read(1)
            return await _write(writer, Reply())
        if head.startswith("GET"):
            self.asked.append(path)
            page = self.pages.get(path)
            found = page() if callable(page) else page
            if isinstance(found, bytes):
                found = Reply(body=found)
            return await _write(writer, found or Reply(404))
        self.requests.append(json.loads(body))
        self.heads.append(head)
        await self._note("begin")
        step = self.steps[min(len(self.requests), len(self.steps)) - 1]
        return await self._act(step, reader, writer)

    async def _act(
        self, step: Step, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        if callable(step):
            step = await step(self.requests[-1])
        if isinstance(step, Reply):
            await asyncio.sleep(step.after_s)
            return await _write(writer, step)
        if step == "ok":
            return await _write(writer, Reply(body=answer("hi")))
        if step in BYTES:
            writer.write(BYTES[step])
            await writer.drain()
            return step not in CLOSES
        await self._fail(step, reader, writer)
        return False

    async def _fail(
        self, step: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        step, _, part = step.partition(" in the ")
        writer.write(PARTS[part])
        if step == "stall":
            await reader.read(1)
            await self._note("gone")
        elif step == "dribble":
            while not reader.at_eof() and not writer.is_closing():
                writer.write(b"H")
                await asyncio.sleep(1)
        elif step == "late drop":
            await asyncio.sleep(1.5)
        elif step == "reset":
            await writer.drain()
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        elif step == "half":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n" + answer("hi")[:40])
        elif step == "nonsense":
            writer.write(b"\x00\x01 this is no HTTP \r\n\r\n")


async def _write(writer: asyncio.StreamWriter, reply: Reply) -> bool:
    head = f"HTTP/1.1 {reply.status} Scripted\r\ncontent-length: {len(reply.body)}\r\n"
    writer.write(f"{head}{reply.headers}\r\n".encode() + reply.body)
    await writer.drain()
    return True


def _chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


def _head(rest: str, *, first: str = "HTTP/1.1 200 OK") -> bytes:
    return f"{first}\r\n{rest}\r\n\r\n".encode()


def _length(head: str) -> int:
    for line in head.lower().splitlines():
        if line.startswith("content-length:"):
            return int(line.partition(":")[2])
    return 0


def answer(
    content: str | None, *, finish_reason: str = "stop", tokens: int = 1, **message: Any
) -> bytes:
    """The body of a chat completion."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": content, **message},
        "finish_reason": finish_reason,
        "matched_stop": None,
    }
    usage = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens}
    return json.dumps({"id": "x", "choices": [choice], "usage": usage}).encode()


@contextlib.asynccontextmanager
async def scripted_server(
    *steps: Step,
    pages: Mapping[str, Page] | None = None,
    port: int = 0,
    aborts_answered: bool = True,
) -> AsyncIterator[ScriptedServer]:
    """Start one on a free loopback port."""
    script = ScriptedServer(steps or ("ok",), pages or {}, aborts_answered)
    server = await asyncio.start_server(script.serve, "127.0.0.1", port)
    script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield script
    finally:
        server.close()
        for task in script.serving:
            task.cancel()
        if script.serving:
            await asyncio.wait(script.serving)


_BODY = answer("hi")
_CHUNKED = "transfer-encoding: chunked"

BYTES: Mapping[str, bytes] = {
    "1xx first": _head("x: y", first="HTTP/1.1 103 Early Hints")
    + _head(f"content-length: {len(_BODY)}")
    + _BODY,
    "http 1.0": _head("x: y", first="HTTP/1.0 200 OK") + _BODY,
    "chunks": _head(_CHUNKED) + _chunked(_BODY[:7], _BODY[7:], b""),
    "cut chunks": _head(_CHUNKED) + _chunked(_BODY[:7]) + b"40\r\nabc",
    "garbled chunks": _head(_CHUNKED) + b"no number\r\n" + _BODY,
    "gzip": _head(
        f"content-encoding: gzip\r\ncontent-length: {len(gzip.compress(_BODY, mtime=0))}"
    )
    + gzip.compress(_BODY, mtime=0),
}
"""Answers byte for byte, good and bad."""

CLOSES = frozenset({"http 1.0", "cut chunks", "garbled chunks"})
"""Those after which the connection ends."""

PARTS: Mapping[str, bytes] = {
    "": b"",
    "head": b"HTTP/1.1 200 OK\r\ncontent-le",
    "body": _head(f"content-length: {len(_BODY)}") + _BODY[:9],
}
"""What comes of an answer before the worst."""
