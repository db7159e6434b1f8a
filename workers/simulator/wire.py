"""HTTP/1.1 over one socket: cut bytes into requests, put replies into bytes.

The server side of what uvicorn does, and no more: keep-alive, Content-Length and chunked bodies,
`Expect: 100-continue`, requests sent ahead of their answers (answered in order). What is
malformed gets 400 and the connection is closed.
"""

import asyncio
import contextlib
import functools
import socket
import struct
import time
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple, Protocol, cast

from workers.simulator.compat import override

_REASONS = {int(status): status.phrase.encode() for status in HTTPStatus}
# Where PEP and RFC names differ from those that uvicorn sends, none matters to a client.
_MAX_HEAD_BYTES = 65_536
# l_onoff 1, l_linger 0: close() sends RST instead of FIN.
_LINGER_ZERO = struct.pack("ii", 1, 0)


class Reply(NamedTuple):
    """An answer, before it is framed.

    Attributes:
        status: HTTP status code.
        body: Bytes of the body; may be empty.
        content_type: None leaves the header out, as uvicorn does for empty bodies.
        headers: More header lines, each ending in CRLF.
    """

    status: int
    body: bytes = b""
    content_type: bytes | None = b"application/json"
    headers: bytes = b"vary: Origin\r\n"


class Head(NamedTuple):
    """Request line and headers.

    Attributes:
        method: Upper case, e.g. `POST`.
        path: Without the query.
        query: What follows the question mark.
        length: Bytes of the body; -1 when it comes in chunks.
        content_type: In lower case.
        lower: All of it, in lower case.
    """

    method: str
    path: str
    query: str
    length: int
    content_type: bytes
    lower: bytes

    def has(self, line: bytes) -> bool:
        """Whether this line (`name: value`, lower case) is among the headers."""
        return b"\r\n" + line in self.lower

    def header(self, name: bytes) -> bytes:
        """Give a header's value in lower case, or nothing when it is not there."""
        return _header(self.lower, name)


class Request(NamedTuple):
    """One request as it came."""

    head: Head
    body: bytes


class Handler(Protocol):
    """Who answers the requests of a connection."""

    def opened(self, connection: "Connection") -> None:
        """A client has connected."""

    def handle(self, connection: "Connection", request: Request) -> None:
        """Answer now or later with `connection.send`."""

    def closed(self, connection: "Connection") -> None:
        """The connection is gone, answered or not."""


class DateClock:
    """The `date` header's line, written anew once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._lines = b""

    def lines(self) -> bytes:
        """Give the headers that every reply carries."""
        now = int(time.time())
        if now != self._second:
            self._second = now
            self._lines = (
                b"date: %s\r\nserver: uvicorn\r\n" % formatdate(now, usegmt=True).encode()
            )
        return self._lines


_date = DateClock()


def frame(reply: Reply, *, close: bool = False) -> bytes:
    """Write a reply as the bytes of an HTTP/1.1 response."""
    head = b"HTTP/1.1 %d %s\r\n%scontent-length: %d\r\n" % (
        reply.status,
        _REASONS.get(reply.status, b""),
        _date.lines(),
        len(reply.body),
    )
    kind = b"content-type: %s\r\n" % reply.content_type if reply.content_type else b""
    end = b"connection: close\r\n\r\n" if close else b"\r\n"
    return b"".join((head, kind, reply.headers, end, reply.body))


class Connection(asyncio.Protocol):
    """One client's connection: at most one request is with the handler at a time."""

    __slots__ = (
        "_buffer", "_handler", "_needed", "_parsing", "_said_continue", "_transport",
        "busy", "close_after", "idle_since",
    )  # fmt: skip

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._buffer = bytearray()
        self._needed = 0  # do not look again before the buffer holds this many bytes
        self._parsing = False
        self._said_continue = False
        self._transport: asyncio.Transport | None = None
        self.busy = False
        self.close_after = False
        self.idle_since = time.monotonic()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._handler.opened(self)

    @override
    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._buffer += data
        if not self.busy:
            self._parse()

    @override
    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncio's name)
        """See asyncio."""
        self._transport = None
        self._handler.closed(self)

    @property
    def alive(self) -> bool:
        """Whether the client is still there, as far as the socket tells."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, reply: Reply) -> None:
        """Answer the request at hand; nothing happens if the client has gone."""
        self.send_raw(frame(reply, close=self.close_after))

    def send_raw(self, data: bytes) -> None:
        """Send bytes as the whole answer to the request at hand."""
        self.busy = False
        self.idle_since = time.monotonic()
        if self._transport is None:
            return
        self._transport.write(data)
        if self.close_after:
            self._transport.close()
        elif self._buffer and not self._parsing:
            self._parse()

    def close(self, *, data: bytes = b"") -> None:
        """Close in good order, after sending `data`."""
        if self._transport is not None:
            self._transport.write(data)
            self._transport.close()

    def reset(self) -> None:
        """Close with RST, as a process that dies with unread data does."""
        if self._transport is None:
            return
        sock = self._transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
        self._transport.abort()

    def _parse(self) -> None:
        self._parsing = True
        try:
            while not self.busy and len(self._buffer) >= max(self._needed, 1):
                request = self._next_request()
                if request is None:
                    return
                self.busy = True
                self._handler.handle(self, request)
        except ValueError:
            self.close_after = True
            plain = b"text/plain; charset=utf-8"
            self.send(Reply(400, b"Invalid HTTP request received.", plain))
        finally:
            self._parsing = False

    def _next_request(self) -> Request | None:
        """Take one request from the buffer, or None while it is not whole.

        Raises:
            ValueError: If the bytes are not HTTP/1.
        """
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEAD_BYTES:
                raise ValueError("head too long")
            return None
        head = parse_head(bytes(self._buffer[:end]))
        start = end + 4
        if head.length < 0:
            body, stop = _chunked(self._buffer, start)
        else:
            stop = start + head.length
            body = bytes(self._buffer[start:stop]) if len(self._buffer) >= stop else None
        if body is None:
            self._needed = stop
            self._answer_expect(head)
            return None
        del self._buffer[:stop]
        self._needed = 0
        self._said_continue = False
        if head.has(b"connection: close"):
            self.close_after = True
        return Request(head, body)

    def _answer_expect(self, head: Head) -> None:
        if head.has(b"expect: 100-continue") and not self._said_continue:
            self._said_continue = True
            if self._transport is not None:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


@functools.lru_cache(maxsize=4096)
def parse_head(raw: bytes) -> Head:
    """Read what comes before a body; clients that keep a connection send few different ones.

    Raises:
        ValueError: If it is not HTTP/1.
    """
    lower = raw.lower()
    line, _, _ = raw.partition(b"\r\n")
    method, target, _ = line.decode("ascii").split(" ")
    path, _, query = target.partition("?")
    chunked = b"\r\ntransfer-encoding: chunked" in lower
    length = -1 if chunked else int(_header(lower, b"content-length") or 0)
    return Head(method, path, query, length, _header(lower, b"content-type"), lower)


def _header(head: bytes, name: bytes) -> bytes:
    at = head.find(b"\r\n" + name + b":")
    if at < 0:
        return b""
    start = at + len(name) + 3
    end = head.find(b"\r\n", start)
    return head[start : len(head) if end < 0 else end].strip()


def _chunked(buffer: bytearray, start: int) -> tuple[bytes | None, int]:
    """Join the chunks from `start`; give the body and its end, or None and how much is needed."""
    parts: list[bytes] = []
    while True:
        line_end = buffer.find(b"\r\n", start)
        if line_end < 0:
            return None, len(buffer) + 1
        size = int(bytes(buffer[start:line_end]).split(b";")[0], 16)
        start = line_end + 2
        if len(buffer) < start + size + 2:
            return None, start + size + 2
        if size == 0:
            return b"".join(parts), start + 2
        parts.append(bytes(buffer[start : start + size]))
        start += size + 2
