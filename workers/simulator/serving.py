"""The life of a generation request in one server process, from arrival to answer.

One `Serving` is one process of the real server: when a server dies and comes back, it gets a new
one, and the totals that its metrics show start again at zero.
"""

import asyncio
import itertools
import math
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec

from workers.simulator import checks, errors, strikes
from workers.simulator.answers import AnswerWriter, Outcome, natural_outcome
from workers.simulator.checks import Body, Plan
from workers.simulator.engine import End, Engine
from workers.simulator.errors import Api
from workers.simulator.faults import Fault
from workers.simulator.hashing import request_hash
from workers.simulator.journal import Ident
from workers.simulator.open_request import OpenRequest
from workers.simulator.record import ServerRecord
from workers.simulator.settings import Settings
from workers.simulator.wire import Connection, Reply, Request

_decode = msgspec.json.Decoder().decode
_LENGTH, _LATENCY = 0, 1  # which of a hash's numbers decides what
_UNANSWERED = frozenset({"disconnected", "died", "reset"})
# The plan of a request that a fault ends before it is read.
_UNREAD = Plan((), "", 1, 1, 0, 1, batch=False, ignore_eos=False, thinking=False)
_ENDS: dict[End, Reply] = {
    "waited": errors.WAITED_TOO_LONG,
    "ran": errors.RAN_TOO_LONG,
    "oom": errors.OUT_OF_MEMORY,
}
NUMBERS = itertools.count(1)


class Serving:
    """The requests of one server, while it lives.

    Attributes:
        record: What outlives it.
        engine: Runs them.
        aborted: How many were aborted so far.
    """

    def __init__(
        self, settings: Settings, record: ServerRecord, on_poison: Callable[[Fault], None]
    ) -> None:
        self.record = record
        self.engine = Engine(settings, self._ended)
        self.aborted = 0
        self._settings = settings
        self._on_poison = on_poison
        self._answers = AnswerWriter(settings)
        self._by_rid: dict[str, OpenRequest] = {}
        self._by_connection: dict[Connection, OpenRequest] = {}
        self._epoch = secrets.token_hex(8)
        self._new = settings.version >= checks.NEW_VERSION
        self._dead = False

    # --- arrival ---------------------------------------------------------------------------------

    def arrive(self, connection: Connection, api: Api, raw: Request) -> None:
        """Take a POST to one of the generation APIs."""
        if b"application/json" not in raw.head.content_type:
            connection.send(errors.wrong_content_type())
            return
        try:
            body = _decode(raw.body)
            digest = request_hash(body)
        except (msgspec.DecodeError, UnicodeError, AttributeError) as error:
            connection.send(self._malformed(api, raw.body, error))
            return
        number = next(NUMBERS)
        ident = Ident(_first_rid(body) or f"{self._epoch}{number:016x}", digest, number)
        self._begin(ident)
        fault = self.record.faults.take(raw.body, digest)
        if fault is not None and fault.stage == "arrival":
            self._strike(connection, api, fault, ident)
            return
        plan = self._accept(api, body, ident.rid)
        if isinstance(plan, Reply):
            self._close(ident, f"http_{plan.status}")
            connection.send(plan)
            return
        self._run(self._open(connection, api, plan, ident, fault))

    def _accept(self, api: Api, body: Body, rid: str) -> Plan | Reply:
        if body.get("stream"):
            return errors.bad_request(api, "Streaming is not simulated; send stream: false.")
        try:
            plan = checks.read_plan(api, body, self._settings)
        except (TypeError, AttributeError, ValueError) as error:
            return errors.bad_request(api, f"The simulator cannot read this request: {error}")
        if isinstance(plan, Plan) and rid in self._by_rid:
            return errors.duplicate_rid(api, rid)
        return plan

    def _open(
        self,
        connection: Connection,
        api: Api,
        plan: Plan,
        ident: Ident,
        fault: Fault | None = None,
    ) -> OpenRequest:
        settings = self._settings
        natural = settings.answer_tokens.draw(ident.digest, _LENGTH)
        if plan.ignore_eos or math.isinf(natural):
            natural = plan.max_tokens + 1
        natural = max(round(natural), plan.min_tokens, 1)
        tokens = min(natural, plan.max_tokens)
        latency = settings.latency
        work = tokens if latency is None else latency.draw(ident.digest, _LATENCY)
        return OpenRequest(
            connection=connection,
            api=api,
            plan=plan,
            ident=ident,
            tokens=tokens,
            natural_tokens=natural,
            arrived_s=time.monotonic(),
            work=work,
            prompt_tokens=plan.prompt_tokens,
            fault=fault,
        )

    def _run(self, request: OpenRequest) -> None:
        self._by_rid[request.ident.rid] = request
        self._by_connection[request.connection] = request
        if not self.engine.submit(request):
            self._finish(request, errors.QUEUE_FULL, "http_503")

    def _malformed(self, api: Api, body: bytes, error: Exception) -> Reply:
        cut = "truncated" in str(error) or not body
        new_words = "unexpected end of data" if cut else "unexpected character"
        words = new_words if self._new else "Expecting value"
        return errors.malformed_json(api, len(body.decode(errors="replace")), words, new=self._new)

    # --- the end ---------------------------------------------------------------------------------

    def _ended(self, request: OpenRequest, end: End) -> None:
        """The engine is done with a request."""
        if request.left:
            self._by_rid.pop(request.ident.rid, None)
            return
        if end != "done":
            reply = _ENDS[end]
            self._finish(request, reply, f"http_{reply.status}")
        elif request.fault is not None:
            fault, request.fault = request.fault, None
            self._strike_late(request, fault)
        else:
            outcome = natural_outcome(request)
            self._finish(
                request, Reply(200, self._answers.write(request, outcome)), outcome.reason
            )

    def _finish(self, request: OpenRequest, reply: Reply, outcome: str) -> None:
        self._forget(request)
        self._close(request.ident, outcome)
        request.connection.send(reply)

    def _forget(self, request: OpenRequest) -> None:
        self._by_rid.pop(request.ident.rid, None)
        self._by_connection.pop(request.connection, None)

    def _begin(self, ident: Ident) -> None:
        tally = self.record.tally
        tally.open += 1
        tally.max_open = max(tally.max_open, tally.open)
        self.record.journal.begin(self.record.port, ident, open_count=tally.open)

    def _close(self, ident: Ident, outcome: str) -> None:
        tally = self.record.tally
        tally.open -= 1
        tally.served += outcome not in _UNANSWERED
        tally.refused += outcome == "http_400"
        self.record.journal.end(self.record.port, ident, outcome=outcome)

    # --- what comes in between -------------------------------------------------------------------

    def left(self, connection: Connection) -> None:
        """The client has closed; its request goes on until the server's next look."""
        request = self._by_connection.pop(connection, None)
        if request is None or self._dead:
            return
        request.left = True
        self._close(request.ident, "disconnected")
        delay = self._settings.disconnect_poll_s / self._settings.speed
        asyncio.get_running_loop().call_later(delay, self._notice, request)

    def _notice(self, request: OpenRequest) -> None:
        if self._by_rid.get(request.ident.rid) is request and not self._dead:
            del self._by_rid[request.ident.rid]
            self.engine.remove(request)
            self.aborted += 1

    def abort(self, prefix: str, *, everything: bool) -> int:
        """End requests as /abort_request does; give how many.

        The scheduler compares by prefix. With `known_rids_only` a prefix that is not itself an
        open rid is dropped before it gets there.
        """
        if not everything and not prefix:
            return 0
        if not everything and self._settings.known_rids_only and prefix not in self._by_rid:
            return 0
        hit = [
            request
            for rid, request in self._by_rid.items()
            if everything or rid.startswith(prefix)
        ]
        for request in hit:
            waiting = not request.admitted_s
            tokens = self.engine.remove(request)
            self.aborted += 1
            if request.left:
                self._by_rid.pop(request.ident.rid, None)
                continue
            message = "Abort in waiting queue" if waiting else "Aborted"
            outcome = Outcome("abort", tokens, None, message)
            self._finish(request, Reply(200, self._answers.write(request, outcome)), "abort")
        return len(hit)

    def die(self) -> None:
        """End as a killed process: note it for all that were open."""
        self._dead = True
        self.engine.stop()
        for request in self._by_connection.values():
            self._close(request.ident, "died")
        self._by_connection.clear()
        self._by_rid.clear()

    # --- faults ----------------------------------------------------------------------------------

    def _strike(self, connection: Connection, api: Api, fault: Fault, ident: Ident) -> None:
        """Let a fault answer a request that nothing has run of."""
        if fault.kind in strikes.NEEDS_REQUEST:
            request = self._open(connection, api, _UNREAD, ident)
            self._by_rid[ident.rid] = request
            self._by_connection[connection] = request
            self._strike_late(request, fault)
            return
        reply = strikes.reply(fault, api, ident.rid)
        self._close(ident, fault.kind)
        connection.send(reply)

    def _strike_late(self, request: OpenRequest, fault: Fault) -> None:
        """Let a fault take the place of a request's answer."""
        kind = fault.kind
        if kind == "poison":
            # Not from inside the engine, which is about to be thrown away.
            asyncio.get_running_loop().call_soon(self._on_poison, fault)
            return
        if kind == "no_answer":
            return
        outcome = strikes.outcome(fault, natural_outcome(request))
        if outcome is None:
            reply = strikes.reply(fault, request.api, request.ident.rid)
        else:
            reply = Reply(200, self._answers.write(request, outcome))
        connection = request.connection
        if kind not in {"half", "reset"}:
            self._finish(request, reply, kind)
            return
        self._forget(request)
        self._close(request.ident, kind)
        if kind == "reset":
            connection.reset()
        else:
            connection.close(data=strikes.half(reply))


def _first_rid(body: Any) -> str:
    rid = body.get("rid")
    if isinstance(rid, list) and rid:
        rid = rid[0]
    return rid if isinstance(rid, str) else ""
