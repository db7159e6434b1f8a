"""Faults on request: which there are, which are armed, whom they hit.

A fault is a JSON object (`POST /_sim/faults`) or the same as text (`--fault`):

    {"kind": "queue_full", "count": 20, "retry_after": "2"}       queue_full:count=20,retry_after=2
    {"kind": "poison", "match": "MARKER"}                         poison:match=MARKER
    {"kind": "die", "after_s": 3, "for_s": 5}                     die:after_s=3,for_s=5

Of the server, from now (or `after_s`) on, for `for_s` seconds or until `revive`:

    die        closes its port and resets every connection; with `exit` the whole process exits,
               with `linger_s` the connections drop only so much later, as real ones do
    refuse     closes its port and idle connections; what is open goes on
    starting   /health says 503, requests wait; after a `die` it comes up like this
    draining   /health says 503, requests are served, as after SIGTERM
    hang       accepts everything and answers no generation; /health stays 200
    stall      the same with a stopped scheduler: /health takes 20 s and says 503, /server_info,
               /model_info and /v1/loads hang
    slow       runs at `factor` of its pace
    revive     ends all of these at once

Of requests: the next `count`, those whose body holds `match`, a share `rate` of them (by their
hash, so that a repeat fares the same), or all of them for `for_s` seconds. `REQUEST_KINDS` lists
what each one does.
"""

import math
import time
from typing import Annotated, Literal, get_args

import msgspec

from workers.simulator.hashing import share

ServerKind = Literal["die", "refuse", "starting", "draining", "hang", "stall", "slow", "revive"]
Stage = Literal["arrival", "end"]

_CHANCE = 2  # which of a hash's numbers decides
SERVER_KINDS: frozenset[str] = frozenset(get_args(ServerKind))
# Every kind that hits one request, and when: before anything runs, or instead of the answer of a
# request that has run. `at_end` changes it.
REQUEST_KINDS: dict[str, Stage] = {
    "queue_full": "arrival",  # 503 "The request queue is full."
    "waited": "arrival",  # 503 "Request waiting timeout reached."
    "ran": "end",  # 503 "Request running timeout reached."
    "oom": "end",  # 500 "Out of memory even after retracting …"
    "error_500": "arrival",  # 500 with an error object
    "internal": "arrival",  # 500 in plain text
    "bad_params": "arrival",  # 400 with a sampling error
    "duplicate_rid": "arrival",  # 400 "Duplicate request ID detected"
    "unauthorized": "arrival",  # 401
    "not_found": "arrival",  # 404
    "status": "arrival",  # `status` with a plain body, e.g. 429 or 413
    "abort": "end",  # 200, half the text, finish_reason abort
    "nan": "end",  # 200, finish_reason stop, matched "NaN happened"
    "empty_choices": "end",  # 200 without choices
    "error_200": "end",  # 200 with an error object as the body
    "html_200": "arrival",  # 200 with a web page, as a proxy gives
    "empty_200": "end",  # 200 without a body
    "half": "end",  # half the answer, then the connection closes
    "reset": "arrival",  # RST instead of an answer
    "no_answer": "arrival",  # nothing, ever
    "poison": "arrival",  # the server dies, with all that runs in it
}


class Fault(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One fault as it is armed.

    Attributes:
        kind: One of `REQUEST_KINDS` or `SERVER_KINDS`.
        server: Place of the server, from 0; None means the one asked, or all.
        count: How many requests it still hits; None: no limit.
        match: Only requests whose body holds this text.
        rate: Only this share of requests.
        for_s: How long it lasts; None: until it is used up or revived.
        after_s: Seconds until it begins.
        at_end: Whether it hits a request at its end; None takes the kind's own stage.
        retry_after: Value of the Retry-After header, for 503 and `status`.
        status: Status code of the kind `status`.
        factor: Pace of the kind `slow`.
        exit: Whether the kinds `die` and `poison` end the process.
        linger_s: How long the connections of a dead server stay open.
        starting_s: How long a server that comes back says that it is starting.
    """

    kind: str
    server: int | None = None
    count: Annotated[int, msgspec.Meta(ge=1)] | None = None
    match: str | None = None
    rate: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    for_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    after_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    at_end: bool | None = None
    retry_after: str | None = None
    status: int = 429
    factor: Annotated[float, msgspec.Meta(ge=0)] = 0.5
    exit: bool = False
    linger_s: float = 0.0
    starting_s: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in REQUEST_KINDS and self.kind not in SERVER_KINDS:
            known = ", ".join([*REQUEST_KINDS, *sorted(SERVER_KINDS)])
            raise ValueError(f"unknown fault kind {self.kind!r}; there are: {known}")

    @property
    def stage(self) -> Stage:
        """When it hits a request."""
        if self.at_end is None:
            return REQUEST_KINDS[self.kind]
        return "end" if self.at_end else "arrival"


def parse_fault(text: str) -> Fault:
    """Read a fault from the command line: JSON, or `KIND[:NAME=VALUE,…]`.

    Raises:
        ValueError: If it is neither, or names a kind or field that does not exist.
    """
    try:
        if text.startswith("{"):
            return msgspec.json.decode(text, type=Fault)
        kind, _, rest = text.partition(":")
        pairs = [pair.partition("=") for pair in rest.split(",") if pair]
        fields = {name: value for name, _, value in pairs}
        return msgspec.convert({"kind": kind, **fields}, Fault, strict=False)
    except msgspec.DecodeError as error:
        raise ValueError(f"fault {text!r}: {error}") from error


class FaultBook:
    """The request faults that are armed at one server, in the order they were armed."""

    def __init__(self) -> None:
        self._armed: list[tuple[Fault, float]] = []

    def arm(self, fault: Fault) -> None:
        """Let a fault hit requests from now on; it is changed as it is used up."""
        now = time.monotonic()
        self._armed = [each for each in self._armed if each[1] > now]
        self._armed.append((fault, now + fault.for_s if fault.for_s else math.inf))

    def clear(self) -> None:
        """Disarm everything."""
        self._armed.clear()

    def armed(self) -> list[Fault]:
        """Give what can still hit, with the counts that are left."""
        now = time.monotonic()
        return [fault for fault, until in self._armed if until > now]

    def take(self, raw: bytes, digest: str) -> Fault | None:
        """Find the fault that hits a request, and use it up by one.

        Args:
            raw: Its body, in which `match` is looked for.
            digest: Its hash, which decides whether a `rate` hits it.
        """
        if not self._armed:
            return None
        now = time.monotonic()
        for place, (fault, until) in enumerate(self._armed):
            if until <= now or (fault.match is not None and fault.match.encode() not in raw):
                continue
            if fault.rate is not None and share(digest, _CHANCE) >= fault.rate:
                continue
            if fault.count is not None:
                fault.count -= 1
                if not fault.count:
                    del self._armed[place]
            return fault
        return None
