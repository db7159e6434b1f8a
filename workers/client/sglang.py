"""Talk to one SGLang server: generate, abort, probe, and ask who it is and how loaded.

Failures:
    refused, reset, half an answer     `ServerGoneError`; the next call opens a new connection
    our time limit                     the request is aborted by its id, then its connection is
                                       closed (a server has died of the other order), then
                                       `AttemptTimeoutError`
    the caller is cancelled            the connection is closed, and SGLang aborts within some 4 s;
                                       a caller that knows before aborts by prefix first
    a status other than 200            an answer like any other; `workers.client.faults` judges it

Works with 0.5.7 to 0.5.23. Pages that a version lacks are asked for once, until `identify` is
called again: after each restart of the server.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import msgspec

from common.errors import ServerDeniedError, ServerUnusableError
from common.models import Endpoint
from workers.client.answers import BadAnswerError, read_answer
from workers.client.faults import AttemptError, AttemptTimeoutError, ServerAnswer, ServerGoneError
from workers.client.requests import PATHS, Request
from workers.client.transport import CONNECT_TIMEOUT_S, Transport
from workers.readings.loads import (
    ServerIdentity,
    ServerLoad,
    combined,
    load_of_get_load,
    load_of_info,
    load_of_loads,
    read_identity,
)
from workers.readings.metrics_page import load_of_metrics

ABORT_TIMEOUT_S = 2.0
PAGE_TIMEOUT_S = 10.0
MIN_PREFIX_CHARS = 8
"""The server aborts every request whose id begins with what it gets: with nothing, all of them."""

_OK = 200
_BUSY = 503
_NOT_THERE = frozenset({404, 405, 501})
_REFUSES_KEY = frozenset({401, 403})

_PROBES: Mapping[Endpoint, dict[str, Any]] = {
    # Token 0 is in every vocabulary, and needs no tokenizer and no chat template.
    "generate": {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}},
    # For a gateway that has the OpenAI routes only.
    "chat": {"messages": [{"role": "user", "content": "."}], "max_tokens": 1, "stream": False},
}

_LOAD_PAGES: Mapping[str, Callable[[bytes], ServerLoad]] = {
    "/v1/loads": load_of_loads,
    "/metrics": load_of_metrics,
    "/server_info": load_of_info,
}
_OLD_LOAD_PAGES: Mapping[str, Callable[[bytes], ServerLoad]] = {
    "/get_load": load_of_get_load,
    "/get_server_info": load_of_info,
}


class SGLangClient:
    """The client of one server, in one event loop. Close it, or use it as a context manager.

    Attributes:
        url: The server's, without a trailing slash; holds no credential.
        slots: How many requests the caller means to keep open. Nothing is limited by it here.

    `may_send` is asked when the connection of a prompt's request stands: whether it may still go.
    """

    def __init__(
        self,
        url: str,
        *,
        slots: int,
        api_key: str | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        may_send: Callable[[], bool] | None = None,
    ) -> None:
        self._transport = Transport(url, api_key=api_key, connect_timeout_s=connect_timeout_s)
        self.url = self._transport.url
        self.slots = slots
        self._may_send = may_send
        # Filled by time limits and cancelled probes, emptied by the aborts' own ends.
        self._aborts: set[asyncio.Task[None]] = set()
        self._absent: set[str] = set()
        self._probe_rid = f"headrace-probe-{secrets.token_hex(8)}"

    async def __aenter__(self) -> Self:
        """Open nothing yet: connections are made as calls need them."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close as `aclose` does."""
        await self.aclose()

    async def aclose(self) -> None:
        """Wait for aborts under way, a few seconds at most, then close all connections."""
        if self._aborts:
            await asyncio.wait(self._aborts)
        await self._transport.aclose()

    async def generate(
        self, request: Request, deadline_s: float, *, fresh: bool = False
    ) -> ServerAnswer:
        """Send a request and wait for its whole answer.

        Args:
            request: As `build_request` gives it.
            deadline_s: Seconds from now after which it is aborted.
            fresh: On a connection of its own, so that a reset proves that the server died with it.

        Raises:
            ServerGoneError: Refused, reset, half an answer, no HTTP.
            AttemptTimeoutError: `deadline_s` have passed.
            AnswerTooLargeError: No row could hold the answer.
            LocalLimitError, NotSentError, BadEncodingError: See `Transport.call`.
        """
        limit = asyncio.timeout(None)
        timer = asyncio.get_running_loop().call_later(
            deadline_s, self._abort_soon, request.rid, limit
        )
        try:
            async with limit:
                answer = await self._transport.call(
                    "POST", request.path, request.content, fresh=fresh, may_send=self._may_send
                )
        except TimeoutError:
            raise _too_late(deadline_s) from None
        finally:
            timer.cancel()
        if answer.latency_s > deadline_s and b'"abort"' in answer.body:
            # It ended by our abort before its connection was closed.
            raise _too_late(deadline_s)
        return answer

    async def abort(self, rid_prefix: str, *, timeout_s: float = ABORT_TIMEOUT_S) -> bool:
        """Abort every request whose id begins with `rid_prefix`; unknown ones are ignored.

        Args:
            rid_prefix: At least `MIN_PREFIX_CHARS` long.
            timeout_s: How long the server may take to confirm it.

        Returns:
            Whether the server confirmed it. Never raises for a server that is gone: then its
            requests are gone too.
        """
        if len(rid_prefix) < MIN_PREFIX_CHARS:
            raise ValueError(f"an id of under {MIN_PREFIX_CHARS} characters aborts too much")
        return await self._abort(rid_prefix, timeout_s)

    async def probe_token(self, timeout_s: float = 60.0) -> None:
        """Ask for one token and return when it has come: the only proof that the server generates.

        At a full server the probe waits its turn like any other request, so one that is late
        there proves nothing; `workers.client.probe` also looks at what is generated meanwhile.

        Raises:
            ServerGoneError: If no token came, within `timeout_s`, for whatever reason.
            ServerUnusableError: If the server refuses our key, or has neither route.
        """
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._probe_answer()
        except TimeoutError:
            raise ServerGoneError(
                f"the server at {self.url} gave no token within {timeout_s:g} s"
            ) from None
        if not _has_token(answer):
            raise ServerGoneError(
                f"the server at {self.url} gave no token: HTTP {answer.status} to a probe"
            )

    async def identify(self) -> ServerIdentity:
        """Ask who the server is; forget which pages it lacked.

        Raises:
            ServerGoneError: If it is not there, not ready, or its scheduler does not answer.
            ServerUnusableError: If it refuses our key, or is no such server.
        """
        self._absent.clear()
        models = await self._page("/v1/models", PAGE_TIMEOUT_S)
        if models.status != _OK:
            raise self._refused("/v1/models", models)
        info = None
        for path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
            answer = await self._page(path, PAGE_TIMEOUT_S)
            if answer.status == _OK:
                info = answer.body
                break
            if answer.status not in _NOT_THERE:
                raise self._refused(path, answer)
        try:
            return read_identity(models.body, info)
        except ValueError as error:
            raise ServerUnusableError(
                f"the server at {self.url} does not say which model it serves; "
                "is it an SGLang server?"
            ) from error

    async def load(self, timeout_s: float = 5.0) -> ServerLoad:
        """Ask how loaded the server is, from whichever pages it has, all at once.

        Raises:
            ServerGoneError: If no page answered within `timeout_s`.
        """
        pages = await self._load_pages(_LOAD_PAGES, timeout_s)
        if all(page.running is None for page in pages):
            pages += await self._load_pages(_OLD_LOAD_PAGES, timeout_s)
        if not pages:
            raise ServerGoneError(f"the server at {self.url} tells nothing of its load")
        return combined(pages)

    async def _load_pages(
        self, pages: Mapping[str, Callable[[bytes], ServerLoad]], timeout_s: float
    ) -> list[ServerLoad]:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._load_page(path, read, timeout_s))
                for path, read in pages.items()
                if path not in self._absent
            ]
        return [found for task in tasks if (found := task.result()) is not None]

    async def _load_page(
        self, path: str, read: Callable[[bytes], ServerLoad], timeout_s: float
    ) -> ServerLoad | None:
        try:
            answer = await self._page(path, timeout_s)
            if answer.status == _OK:
                return read(answer.body)
        except AttemptError:
            return None
        except ValueError:
            pass
        else:
            if answer.status == _BUSY:
                return None
        # A version's own fault as well: some answer 500 here for ever.
        self._absent.add(path)
        return None

    async def _probe_answer(self) -> ServerAnswer:
        for endpoint, ask in _PROBES.items():
            path = PATHS[endpoint]
            try:
                body = msgspec.json.encode({**ask, "rid": self._probe_rid})
                answer = await self._transport.call("POST", path, body)
            except asyncio.CancelledError:
                # It may stand in the server's queue, where nobody waits for it any more.
                self._abort_soon(self._probe_rid)
                raise
            if answer.status in _REFUSES_KEY:
                raise self._refused(path, answer)
            if answer.status not in _NOT_THERE:
                return answer
        raise ServerUnusableError(
            f"the server at {self.url} has neither /generate nor /v1/chat/completions; "
            "is it an SGLang server?"
        )

    async def _abort(self, rid_prefix: str, timeout_s: float = ABORT_TIMEOUT_S) -> bool:
        body = msgspec.json.encode({"rid": rid_prefix, "abort_all": False})
        try:
            answer = await self._page("/abort_request", timeout_s, body)
        except AttemptError:
            return False
        return answer.status == _OK

    def _abort_soon(self, rid: str, limit: asyncio.Timeout | None = None) -> None:
        task = asyncio.get_running_loop().create_task(self._abort_then_close(rid, limit))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort_then_close(self, rid: str, limit: asyncio.Timeout | None) -> None:
        await self._abort(rid)
        if limit is not None:
            with suppress(RuntimeError):  # the answer has come meanwhile
                limit.reschedule(asyncio.get_running_loop().time())

    async def _page(self, path: str, timeout_s: float, body: bytes = b"") -> ServerAnswer:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._transport.call("POST" if body else "GET", path, body)
        except TimeoutError:
            raise ServerGoneError(
                f"the server at {self.url} did not answer {path} within {timeout_s:g} s"
            ) from None

    def _refused(self, path: str, answer: ServerAnswer) -> Exception:
        if answer.status in _REFUSES_KEY:
            return ServerDeniedError(
                f"the server at {self.url} refuses our key (HTTP {answer.status}): "
                "set HEADRACE_API_KEY to its --api-key"
            )
        if answer.status in _NOT_THERE:
            return ServerUnusableError(
                f"the server at {self.url} has no {path}; is it an SGLang server?"
            )
        return ServerGoneError(
            f"the server at {self.url} is not ready: HTTP {answer.status} on {path}"
        )


def _too_late(deadline_s: float) -> AttemptTimeoutError:
    return AttemptTimeoutError(f"no answer within {deadline_s:g} s; the request was aborted")


def _has_token(answer: ServerAnswer) -> bool:
    """Whether an answer is a completion of either kind: some gateways mix the two up."""
    if answer.status != _OK:
        return False
    for endpoint in _PROBES:
        with suppress(BadAnswerError):
            read_answer(endpoint, answer.body)
            return True
    return False
