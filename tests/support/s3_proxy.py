"""A proxy before an S3 server that spoils requests on demand, and remembers all of them.

with FaultProxy(server.port) as proxy:
    proxy.plan = once(reset_after())      # applied, then the answer is lost
    store = server.store(bucket, port=proxy.port)
"""

import asyncio
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

Plan = Callable[["Request"], "Fault | None"]


@dataclass(frozen=True)
class Fault:
    """What happens to a request.

    Attributes:
        status: Answer this and do not forward; 0 forwards.
        code: S3's word in the answer's body.
        headers: More headers of that answer.
        reset: Where to break the connection: "before" the request's body is read, "mid" body,
            "after" the server applied it, "reply" in the midst of the server's answer.
        delay_s: Wait before forwarding.
        without: A header (lower case) that the server behind does not get.
        body: Of the answer in the server's place; empty for an error of S3's form.
    """

    status: int = 0
    code: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    reset: str = ""
    delay_s: float = 0.0
    without: str = ""
    body: bytes = b""


def answer(status: int, code: str, **headers: str) -> Fault:
    """An answer in the server's place; header names with `_` for `-`."""
    return Fault(status, code, tuple((k.replace("_", "-"), v) for k, v in headers.items()))


SLOW_DOWN = answer(503, "SlowDown")
INTERNAL_ERROR = answer(500, "InternalError")
CONFLICT = answer(409, "ConditionalRequestConflict")
ACCESS_DENIED = answer(403, "AccessDenied")
EXPIRED_TOKEN = answer(400, "ExpiredToken")
NO_SUCH_BUCKET = answer(404, "NoSuchBucket")
NOT_IMPLEMENTED = answer(501, "NotImplemented")
WRONG_REGION = answer(301, "PermanentRedirect", x_amz_bucket_region="eu-west-1")
INVALID_ARGUMENT = answer(400, "InvalidArgument")
RESET_BEFORE = Fault(reset="before")
RESET_MID = Fault(reset="mid")
RESET_AFTER = Fault(reset="after")
HALF_REPLY = Fault(reset="reply")
CONDITION_IGNORED = Fault(without="if-none-match")


@dataclass
class Request:
    """One request as it came, and what became of it.

    Attributes:
        headers: Lower-case names.
        status: The answer that was sent, 0 when none was.
        applied: Whether the server behind got it whole.
    """

    method: str
    path: str
    headers: dict[str, str]
    status: int = 0
    applied: bool = False
    body: bytes = field(default=b"", repr=False)


def never(_: Request) -> None:
    """Spoil nothing."""


def always(fault: Fault, *, method: str = "") -> Plan:
    """Spoil every request (of a method)."""
    return lambda request: fault if method in {"", request.method} else None


def in_turn(faults: Iterable[Fault | None], *, method: str = "PUT") -> Plan:
    """Spoil the method's requests by this list, one each; None passes one on; then nothing."""
    left = iter(faults)
    return lambda request: next(left, None) if request.method == method else None


def once(fault: Fault, *, method: str = "PUT") -> Plan:
    """Spoil the first request of a method."""
    return in_turn([fault], method=method)


def checksum_refused(request: Request) -> Fault | None:
    """Refuse the checksum headers that newer SDKs add by default."""
    names = ("x-amz-sdk-checksum-algorithm", "x-amz-trailer", "x-amz-checksum-")
    return INVALID_ARGUMENT if any(h.startswith(names) for h in request.headers) else None


class FaultProxy:
    """The proxy, on a loopback port of its own, in a thread. `plan` may be changed at any time.

    Args:
        upstream_port: Of the server behind it, on loopback.
        certificate: A file with certificate and key: the proxy speaks TLS, the server need not.
    """

    def __init__(self, upstream_port: int, *, certificate: Path | None = None) -> None:
        self.plan: Plan = never
        self.requests: list[Request] = []
        self.port = 0
        self._upstream_port = upstream_port
        self._tls: ssl.SSLContext | None = None
        if certificate is not None:
            self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._tls.load_cert_chain(certificate)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def count(self, method: str) -> int:
        """How many requests of a method came."""
        return sum(request.method == method for request in self.requests)

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self._tls)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await self._handle(reader, writer)
        writer.close()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        request = parsed(head)
        self.requests.append(request)
        fault = self.plan(request) or Fault()
        if fault.reset == "before":
            return reset(writer)
        if request.headers.get("expect"):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = int(request.headers.get("content-length", "0"))
        if fault.reset == "mid":
            await reader.readexactly(length // 2)
            return reset(writer)
        request.body = await reader.readexactly(length)
        await asyncio.sleep(fault.delay_s)
        reply = (
            reply_of(request, fault) if fault.status else await self._forward(head, request, fault)
        )
        if fault.reset == "after":
            return reset(writer)
        if fault.reset == "reply":
            writer.write(reply[: len(reply) // 2])
            await writer.drain()
            return reset(writer)
        request.status = int(reply.split(b" ", 2)[1])
        writer.write(reply)
        await writer.drain()
        return None

    async def _forward(self, head: bytes, request: Request, fault: Fault) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        # The first two are not signed. One request a connection: its answer ends with it.
        dropped = (b"connection:", b"expect:", f"{fault.without or 'expect'}:".encode())
        lines = [ln for ln in head.split(b"\r\n")[:-2] if not ln.lower().startswith(dropped)]
        writer.write(b"\r\n".join([*lines, b"Connection: close", b"", b""]) + request.body)
        await writer.drain()
        reply = await reader.read()
        request.applied = True
        writer.close()
        return reply


def parsed(head: bytes) -> Request:
    """Read a request's head."""
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ", 2)
    pairs = (line.partition(":") for line in lines if line)
    return Request(method, path, {name.lower(): value.strip() for name, _, value in pairs})


def reply_of(request: Request, fault: Fault) -> bytes:
    """Write an S3 error answer."""
    body = (
        fault.body
        or f"<Error><Code>{fault.code}</Code><Message>planted</Message></Error>".encode()
    )
    headers = [*fault.headers, ("Content-Type", "application/xml"), ("Connection", "close")]
    headers.append(("Content-Length", str(len(body))))
    head = "".join(f"{name}: {value}\r\n" for name, value in headers)
    text = f"HTTP/1.1 {fault.status} Planted\r\n{head}\r\n".encode()
    return text if request.method == "HEAD" else text + body


def reset(writer: asyncio.StreamWriter) -> None:
    """Close so that the other side sees a reset, not an end."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
