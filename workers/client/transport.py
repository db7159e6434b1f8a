"""Carry HTTP calls to one server: httpx's transport interface on aiohttp's connections.

Decisions, each measured (256 requests open, answers of 1.6 KB after 50 ms, CPU per call):

* httpx with its own pool costs 3 to 6 ms and collapses when many answers come at once; the
  `httpx-aiohttp` transport below `AsyncClient.send` costs 0.28 ms, the same transport called
  directly 0.16 to 0.2 ms: cookies, redirects and authentication flows are not ours to pay for.
* Idle connections close after 3 s here, before the 5 s of the server, so that a request never
  meets a connection that the server is just closing.
* No limit on the number of connections: slots are the bound, and a second one below them could
  only make a request wait where nobody sees it. No read time-out either: the attempt's deadline
  rules, and it is the caller's.

A call is sent a second time in one case only: its connection had carried an earlier call, and died
within `STALE_WINDOW_S` of this one, before the first byte of an answer. That is a server which
closed an idle connection. aiohttp itself repeats GET and the like, never POST. If the server had
read the first one after all, SGLang refuses the second while that runs, since the request id is
the same; and of two answers one at most is ever read.
"""

import errno
import socket
import time
from collections.abc import AsyncIterable, Callable
from contextvars import ContextVar
from typing import NamedTuple

import aiohttp
import httpx
from aiohttp.connector import AddrInfoType
from httpx_aiohttp import AiohttpTransport
from typing_extensions import override

from common.errors import UsageError
from common.secrecy import hide
from workers.client.faults import (
    AnswerTooLargeError,
    AttemptError,
    BadEncodingError,
    LocalLimitError,
    NotSentError,
    ServerAnswer,
    ServerGoneError,
)
from workers.client.rows import MAX_ROW_BYTES

KEEPALIVE_EXPIRY_S = 3.0
STALE_WINDOW_S = 1.0
CONNECT_TIMEOUT_S = 5.0

MAX_ANSWER_BYTES = 4 * MAX_ROW_BYTES
"""JSON may spell one character with up to six bytes that a row writes with two."""

_OK = 200

_BROKEN = (httpx.HTTPError, aiohttp.ClientError, OSError)
"""All that a broken connection or an answer that is no HTTP raises."""

_UNREACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
"""What is raised when no connection came to stand."""


_LOCAL_LIMITS = {
    errno.EMFILE: "this process has no file descriptor left: raise its limit (`ulimit -n`)",
    errno.ENFILE: "this machine has no file descriptor left",
    errno.ENOBUFS: "this machine has no room for another connection",
    errno.ENOMEM: "this machine has no memory for another connection",
    errno.EADDRNOTAVAIL: "this machine has no local port left: too many connections stand or "
    "have just ended",
}
"""What keeps us from connecting and is no fault of the server."""


class _Note:
    """What a call and its connection tell each other."""

    __slots__ = ("fresh", "may_send")

    def __init__(self, may_send: Callable[[], bool] | None) -> None:
        self.fresh = False
        self.may_send = may_send


_note: ContextVar[_Note] = ContextVar("note")
"""The note of this task's call; connecting may run in tasks of its own, which inherit it."""


def _new_socket(address: AddrInfoType) -> socket.socket:
    """Make the socket of a new connection, and note for the call that it has one."""
    _note.get().fresh = True
    family, kind, protocol, _, _ = address
    return socket.socket(family, kind, protocol)


class _LastMoment(aiohttp.ClientRequest):
    """A request that asks, when its connection stands, whether it may still be sent.

    Connecting takes as long as it takes, and the process may have been frozen meanwhile.
    """

    @override
    async def send(self, conn: aiohttp.connector.Connection) -> aiohttp.ClientResponse:
        """See aiohttp."""
        may_send = _note.get().may_send
        if may_send is not None and not may_send():
            raise NotSentError("the slot ran out before the request was sent")
        return await super().send(conn)


class _Call(NamedTuple):
    method: str
    path: str
    body: bytes
    may_send: Callable[[], bool] | None


class Transport:
    """The connections to one server; one for each server and event loop.

    Attributes:
        url: The server's, without a trailing slash; holds no credential.
    """

    def __init__(self, url: str, *, api_key: str | None, connect_timeout_s: float) -> None:
        self._url = httpx.URL(url.rstrip("/"))
        if self._url.scheme not in ("http", "https") or not self._url.host:
            raise UsageError("--server is no address: give http://HOST:PORT")
        if self._url.userinfo:
            raise UsageError(
                "--server holds a password: give the server's key in HEADRACE_API_KEY instead"
            )
        self.url = str(self._url)
        hide(api_key)
        self._headers = (
            (b"host", self._url.netloc),
            (b"content-type", b"application/json"),
            # What a model writes does not shrink enough to pay for it on a loopback.
            (b"accept-encoding", b"identity"),
            *(((b"authorization", f"Bearer {api_key}".encode()),) if api_key else ()),
        )
        self._extensions = {
            "timeout": {"connect": connect_timeout_s, "read": None, "write": None, "pool": None}
        }
        self._urls: dict[str, httpx.URL] = {}
        self._inner = AiohttpTransport(client=self._session, trust_env=False)
        self._lone = AiohttpTransport(
            client=lambda: self._session(force_close=True), trust_env=False
        )

    async def aclose(self) -> None:
        """Close all connections; calls that are still open fail."""
        await self._inner.aclose()
        await self._lone.aclose()

    async def call(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        fresh: bool = False,
        may_send: Callable[[], bool] | None = None,
    ) -> ServerAnswer:
        """Make one call, without a time limit.

        Args:
            method: GET or POST.
            path: Absolute, below the server's URL, with its query.
            body: JSON.
            fresh: On a connection of its own, so that a reset proves that the server died with it.
            may_send: Asked at the last moment; without it every call is sent.

        Raises:
            ServerGoneError: Refused, reset, half an answer, no HTTP.
            LocalLimitError: Not sent: this machine has no room for another connection.
            NotSentError: Not sent: `may_send` said no.
            BadEncodingError: The body's encoding cannot be undone.
            AnswerTooLargeError: The body exceeds `MAX_ANSWER_BYTES`.
        """
        began = time.monotonic()
        inner = self._lone if fresh else self._inner
        response = await self._send(inner, _Call(method, path, body, may_send))
        received = await self._read(response)
        return ServerAnswer(
            status=response.status_code,
            body=received,
            latency_s=time.monotonic() - began,
            headers={} if response.status_code == _OK else _lowered(response.headers),
        )

    def _session(self, *, force_close: bool = False) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            limit=0,
            force_close=force_close,
            # aiohttp refuses a keep-alive time for connections that are not kept.
            keepalive_timeout=None if force_close else KEEPALIVE_EXPIRY_S,
            ssl=httpx.create_ssl_context(trust_env=False) if self._url.scheme == "https" else True,
            socket_factory=_new_socket,
        )
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "User-Agent"),
            request_class=_LastMoment,
        )

    async def _send(self, inner: AiohttpTransport, call: _Call) -> httpx.Response:
        note = _Note(call.may_send)
        _note.set(note)
        began = time.monotonic()
        try:
            return await self._once(inner, call)
        except _BROKEN as error:
            fresh = note.fresh or isinstance(error.__cause__ or error, _UNREACHED)
            if fresh or time.monotonic() - began > STALE_WINDOW_S:
                raise self._gone("gave no answer", error) from error
        try:
            return await self._once(inner, call)
        except _BROKEN as error:
            # The server may have read the first one, and have died of it.
            raise self._gone("gave no answer", error, reached=True) from error

    async def _once(self, inner: AiohttpTransport, call: _Call) -> httpx.Response:
        method, path, body, _ = call
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = httpx.URL(self.url + path)
        return await inner.handle_async_request(
            httpx.Request(
                method, url, headers=self._headers, content=body, extensions=self._extensions
            )
        )

    async def _read(self, response: httpx.Response) -> bytes:
        try:
            parts: list[bytes] = []
            size_bytes = 0
            async for part in _parts(response):
                parts.append(part)
                size_bytes += len(part)
                if size_bytes > MAX_ANSWER_BYTES:
                    raise AnswerTooLargeError(
                        f"the server's answer is larger than {MAX_ANSWER_BYTES} bytes"
                    )
            return b"".join(parts)
        except httpx.DecodingError as error:
            raise BadEncodingError(
                f"the answer of the server at {self.url} is not encoded as it says"
            ) from error
        except _BROKEN as error:
            raise self._gone("broke off its answer", error) from error
        finally:
            await response.aclose()

    def _gone(self, what: str, error: BaseException, *, reached: bool = False) -> AttemptError:
        # The type alone: a parser's message may quote the answer.
        cause = error.__cause__ or error
        unreached = isinstance(cause, _UNREACHED)
        if unreached and not reached and (limit := _local_limit(cause)):
            return LocalLimitError(f"the server at {self.url} is not asked: {limit}")
        told = "cannot be reached; is it running?" if unreached else what
        if isinstance(cause, aiohttp.ClientConnectorDNSError):
            told = "cannot be reached: its name does not resolve"
        return ServerGoneError(
            f"the server at {self.url} {told} ({type(cause).__name__})",
            reached=reached or not unreached,
        )


def _local_limit(cause: BaseException) -> str | None:
    """Say what this machine lacks for a connection; None where that is not the reason."""
    reason = cause.os_error if isinstance(cause, aiohttp.ClientConnectorError) else cause
    number = reason.errno if isinstance(reason, OSError) else None
    return None if number is None else _LOCAL_LIMITS.get(number)


def _parts(response: httpx.Response) -> AsyncIterable[bytes]:
    """Give the body's parts; what is encoded against our wish goes through httpx's decoders."""
    encoded = any(name.lower() == b"content-encoding" for name, _ in response.headers.raw)
    if encoded or not isinstance(response.stream, httpx.AsyncByteStream):
        return response.aiter_bytes()
    return response.stream


def _lowered(headers: httpx.Headers) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
