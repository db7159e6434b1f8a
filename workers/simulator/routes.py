"""The routes of a server: which path takes which method, and what it answers."""

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from workers.simulator import errors, info, metrics
from workers.simulator.errors import Api
from workers.simulator.serving import Serving
from workers.simulator.settings import Settings
from workers.simulator.wire import Connection, Reply, Request

State = Literal["ready", "starting", "draining", "hung", "stalled", "refusing", "dead"]
_Answer = Callable[[Connection, Request, Serving, State], None]

_APIS: dict[str, Api] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/generate": "generate",
}
_STALLED_HEALTH_S = 20.0
_OK = Reply(200, b"", None)
_UNAVAILABLE = Reply(503, b"", None)
_OPEN_PATHS = ("/health", "/ready", "/metrics", "/_sim/")
# What needs the scheduler's word, and so never answers while that is stopped.
_SCHEDULER_PATHS = frozenset(
    {"/server_info", "/get_server_info", "/model_info", "/get_model_info", "/v1/loads"}
)
_FLUSHED = (
    b"Cache flushed.\nPlease check backend logs for more details. "
    b"(When there are running or waiting requests, the operation will not be performed.)\n"
)
_METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_INFO_VERSION = (0, 5, 6)
_LOADS_VERSION = (0, 5, 8)
_READY_VERSION = (0, 5, 20)
_NO_GET_LOAD_VERSION = (0, 5, 22)


class Routes:
    """Answers what is asked of a live server."""

    def __init__(self, settings: Settings, control: Callable[[Connection, Request], None]) -> None:
        self._settings = settings
        self._control = control
        self._gets: dict[str, _Answer] = {
            "/health": self._health,
            "/health_generate": self._health,
            "/v1/models": self._models,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/v1/loads": self._loads,
            "/flush_cache": self._flush_cache,
        }
        self._posts: dict[str, _Answer] = {
            "/abort_request": self._abort,
            "/v1/tokenize": self._tokenize,
            "/tokenize": self._tokenize,
            "/flush_cache": self._flush_cache,
        }
        if settings.metrics:
            self._gets["/metrics"] = self._metrics
        if settings.version >= _READY_VERSION:
            self._gets["/ready"] = self._ready
        if settings.version < _NO_GET_LOAD_VERSION:
            self._gets["/get_load"] = self._old_load
        later = {"/v1/loads": _LOADS_VERSION} | dict.fromkeys(
            ("/server_info", "/model_info"), _INFO_VERSION
        )
        for path in (*settings.missing, *(p for p, v in later.items() if settings.version < v)):
            self._gets.pop(path, None)
            self._posts.pop(path, None)

    def answer(
        self, connection: Connection, request: Request, serving: Serving, state: State
    ) -> None:
        """Answer a request, now or later."""
        path, method = request.head.path, request.head.method
        if self._settings.api_key is not None and not self._authorized(request):
            connection.send(errors.UNAUTHORIZED)
            return
        api = _APIS.get(path)
        if api is not None and method == "POST":
            serving.arrive(connection, api, request)
            return
        route = (self._gets if method == "GET" else self._posts).get(path)
        if method not in {"GET", "POST"} or route is None:
            self._other(connection, request)
        elif state != "stalled" or path not in _SCHEDULER_PATHS:
            route(connection, request, serving, state)

    def _authorized(self, request: Request) -> bool:
        if request.head.path.startswith(_OPEN_PATHS):
            return True
        # Header values come in lower case; a key that differs only in case passes here.
        key = (self._settings.api_key or "").lower().encode()
        return request.head.header(b"authorization") == b"bearer " + key

    def _other(self, connection: Connection, request: Request) -> None:
        path, method = request.head.path, request.head.method
        allowed = [
            each
            for each, routes in (("GET", self._gets), ("POST", {**self._posts, **_APIS}))
            if path in routes
        ]
        if path.startswith("/_sim/"):
            self._control(connection, request)
        elif allowed:
            connection.send(errors.method_not_allowed(", ".join(allowed)))
        elif path.startswith("/v1/models/") and method == "GET":
            connection.send(_model_card(path.removeprefix("/v1/models/"), self._settings))
        else:
            connection.send(errors.NOT_FOUND)

    # --- health ----------------------------------------------------------------------------------

    def _health(self, to: Connection, _request: Request, _serving: Serving, state: State) -> None:
        if state == "stalled":
            delay = _STALLED_HEALTH_S / self._settings.speed
            asyncio.get_running_loop().call_later(delay, to.send, _UNAVAILABLE)
            return
        to.send(_UNAVAILABLE if state in {"starting", "draining"} else _OK)

    def _ready(self, to: Connection, _request: Request, _serving: Serving, state: State) -> None:
        to.send(_UNAVAILABLE if state in {"starting", "draining"} else _OK)

    # --- what it tells ---------------------------------------------------------------------------

    def _metrics(self, to: Connection, _request: Request, serving: Serving, _: State) -> None:
        page = metrics.page(self._settings, serving.engine, aborted=serving.aborted)
        to.send(Reply(200, page, _METRICS_TYPE))

    def _models(self, to: Connection, _request: Request, _serving: Serving, _: State) -> None:
        to.send(_json(info.models(self._settings)))

    def _model_info(self, to: Connection, _request: Request, _serving: Serving, _: State) -> None:
        to.send(_json(info.model_info(self._settings)))

    def _server_info(
        self, to: Connection, _request: Request, serving: Serving, state: State
    ) -> None:
        status = "starting" if state == "starting" else "ready"
        body = info.server_info(
            self._settings, serving.engine, port=serving.record.port, status=status
        )
        to.send(_json(body))

    def _loads(self, to: Connection, _request: Request, serving: Serving, _: State) -> None:
        to.send(_json(info.loads(self._settings, serving.engine)))

    def _old_load(self, to: Connection, _request: Request, serving: Serving, _: State) -> None:
        to.send(_json(info.old_load(serving.engine)))

    # --- what it does ----------------------------------------------------------------------------

    def _flush_cache(self, to: Connection, _request: Request, serving: Serving, _: State) -> None:
        busy = serving.engine.running or serving.engine.waiting
        to.send(Reply(400, b"Flush cache failed.\n", None) if busy else Reply(200, _FLUSHED, None))

    def _abort(self, to: Connection, request: Request, serving: Serving, state: State) -> None:
        try:
            body = msgspec.json.decode(request.body, type=_Abort)
        except msgspec.DecodeError:
            to.send(Reply(422, b'{"detail":"Unprocessable Entity"}'))
            return
        # The answer to the abort comes first, as it does when the scheduler does the rest.
        to.send(_OK)
        if state not in {"hung", "stalled"}:
            serving.abort(body.rid or "", everything=body.abort_all)

    def _tokenize(self, to: Connection, request: Request, _serving: Serving, _: State) -> None:
        try:
            prompt = msgspec.json.decode(request.body, type=_Tokenize).prompt
        except msgspec.DecodeError:
            to.send(errors.bad_request("chat", "prompt is required"))
            return
        count = max(round(len(prompt) * self._settings.tokens_per_char), 1)
        limit = self._settings.context_length
        to.send(
            _json({"tokens": list(range(1, count + 1)), "count": count, "max_model_len": limit})
        )


class _Abort(msgspec.Struct):
    rid: str | None = None
    abort_all: bool = False


class _Tokenize(msgspec.Struct):
    prompt: str


def _json(value: Any) -> Reply:
    return Reply(200, msgspec.json.encode(value))


def _model_card(name: str, settings: Settings) -> Reply:
    if name == settings.model:
        return _json(info.models(settings)["data"][0])
    error = {
        "message": f"The model '{name}' does not exist",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    return Reply(404, msgspec.json.encode({"error": error}))
