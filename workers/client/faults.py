"""Say whose fault it is when a request gives no completion, and what then: protocol.md §4. Pure.

    what came                                          kind        charged
    -------------------------------------------------  ----------  -----------------------------
    a completion, `length` included                    COMPLETED
    400, 413, 414, 422, 431                            PROMPT      fails at once
    400 "Duplicate request ID"                         NEW_RID     no
    401, 403, 404, wrong model, 3xx, any other 4xx     CONFIG      no; stop claiming, alarm
    200 with error body, abort, NaN, no choices …      ANSWER      an attempt
    503 "Request running timeout reached."             ANSWER      an attempt
    408, 429, any other 503                            LOAD        no; wait
    our time limit, 500 and other 5xx                  PROBE       `after_probe` decides:
      while the server answers a one-token probe         ANSWER      an attempt
      while it does not                                  SERVER      no, a server death
    200 whose encoding cannot be undone                PROBE       as above
    no descriptor or port left here                    LOAD        no; wait
    refused: no connection                             SERVER      no
    reset, half an answer, no HTTP                     SERVER      no, a server death

`PROBE` is a question, not a verdict: the caller asks the server for one token, then calls
`after_probe`. Other 4xx than a prompt can cause are read as configuration, because a mistake there
stops the flow and says so, while the other way round it would fail every prompt of the run.

Where the run keeps token ids, an answer that lacks them, or has other than its usage counts, is
no completion: `token_ids`, charged.

An answer without any text is a completion with the flag `empty` if tokens were generated (a model
may end at once), or if none were asked for. Nothing at all for a request that asked for tokens is
a server that cut the prompt to nothing: `empty_output`, charged.

SGLang tells some of these apart only by their text (a duplicate id is a plain 400, both time-outs
are a plain 503), so this is the one place where texts are compared.
"""

import math
import re
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from common.errors import HeadraceError
from workers.client.answers import Answer, BadAnswerError, read_answer
from workers.client.requests import Request
from workers.client.token_ids import with_token_ids
from workers.client.tolerant import error_code, error_text


class AttemptError(HeadraceError):
    """A request ended without an HTTP answer."""


class ServerGoneError(AttemptError):
    """Refused, reset, half an answer, or something that is no HTTP: the server's fault.

    Attributes:
        reached: Whether a connection stood, so that the server may have begun with the request.
    """

    def __init__(self, message: str, *, reached: bool = True) -> None:
        super().__init__(message)
        self.reached = reached


class AttemptTimeoutError(AttemptError):
    """Our own time limit ended the request; it has been aborted at the server."""


class NotSentError(AttemptError):
    """The request was not sent: its slot had run out before its connection stood."""


class LocalLimitError(AttemptError):
    """This machine has no descriptor, port or memory left for another connection."""


class BadEncodingError(AttemptError):
    """The body is not encoded as its Content-Encoding says: a gateway's fault, or the server's."""


class AnswerTooLargeError(AttemptError):
    """The answer's body is larger than any row may be."""


class ServerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What came over HTTP.

    Attributes:
        status: HTTP status.
        body: The whole body, decoded if it was compressed.
        headers: Names in lower case; filled in only when the status is not 200.
        latency_s: From sending the request to the last byte of its answer.
    """

    status: int
    body: bytes
    latency_s: float
    headers: Mapping[str, str] = {}


class Kind(StrEnum):
    """What to do next; the table above."""

    COMPLETED = "completed"
    PROMPT = "prompt"
    ANSWER = "answer"
    NEW_RID = "new_rid"
    LOAD = "load"
    SERVER = "server"
    CONFIG = "config"
    PROBE = "probe"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt came to.

    Attributes:
        kind: What to do next.
        reason: One word for a failure row and for counting; empty for a completion.
        status: HTTP status, None when there was no answer.
        message: The server's own text, at most 2,000 characters. It may quote the prompt: for
            failure rows, never for a log.
        retry_after_s: How long the server asks to be left alone, None when it does not say.
        answer: The completion.
        flags: What the answer and its request tell, of `common.quality.FLAGS`.
    """

    kind: Kind
    reason: str = ""
    status: int | None = None
    message: str = ""
    retry_after_s: float | None = None
    answer: Answer | None = None
    flags: tuple[str, ...] = ()


FIRST_WAIT_S = 0.5
"""How long a slot waits after the first refusal."""

LONGEST_WAIT_S = 300.0
"""A server may not keep a slot waiting for longer, whatever it says."""

_OK = 200
_PROMPT_STATUS = {
    400: "bad_request",
    413: "too_large",
    414: "bad_request",
    422: "bad_request",
    431: "bad_request",
}
_CONFIG_STATUS = {401: "unauthorized", 403: "forbidden", 404: "not_found"}
_LOAD_STATUS = {408: "server_timeout", 429: "rate_limited", 503: "server_full"}
_FIRST_SERVER_STATUS = 500

_DUPLICATE_RID = "Duplicate request ID"
_RAN_TOO_LONG = "running timeout"
_CONTEXT = re.compile(
    r"model's context length|maximum context length|maximum allowed length"
    r"|max_completion_tokens is too large"
)


def classify(request: Request, outcome: ServerAnswer | AttemptError) -> Verdict:
    """Say what an attempt came to.

    Args:
        request: What was sent.
        outcome: What came back, or the error that `SGLangClient.generate` raised.

    Returns:
        The verdict. `Kind.PROBE` asks for a one-token probe and `after_probe`.
    """
    if isinstance(outcome, ServerAnswer):
        return _of_answer(request, outcome)
    if isinstance(outcome, AttemptTimeoutError):
        return Verdict(kind=Kind.PROBE, reason="timeout", message=str(outcome))
    if isinstance(outcome, LocalLimitError):
        return Verdict(kind=Kind.LOAD, reason="local_limit", message=str(outcome))
    if isinstance(outcome, BadEncodingError):
        return Verdict(kind=Kind.PROBE, reason="bad_response", message=str(outcome))
    if isinstance(outcome, AnswerTooLargeError):
        return Verdict(kind=Kind.ANSWER, reason="too_large", message=str(outcome))
    reached = not isinstance(outcome, ServerGoneError) or outcome.reached
    reason = "server_gone" if reached else "refused"
    return Verdict(kind=Kind.SERVER, reason=reason, message=str(outcome))


def after_probe(verdict: Verdict, *, alive: bool) -> Verdict:
    """Settle a `PROBE`: a server that answers others has answered this prompt with its fault."""
    kind = Kind.ANSWER if alive else Kind.SERVER
    return msgspec.structs.replace(verdict, kind=kind)


def _of_answer(request: Request, answer: ServerAnswer) -> Verdict:
    status = answer.status
    if status == _OK:
        return _of_ok(request, answer)
    text = error_text(answer.body)
    if status == 400 and _DUPLICATE_RID in text:  # noqa: PLR2004 - HTTP
        return Verdict(kind=Kind.NEW_RID, reason="duplicate_rid", status=status, message=text)
    if status in _PROMPT_STATUS:
        reason = "context_overflow" if _CONTEXT.search(text) else _PROMPT_STATUS[status]
        return Verdict(kind=Kind.PROMPT, reason=reason, status=status, message=text)
    if status in _LOAD_STATUS:
        return _of_load(answer, text)
    if status >= _FIRST_SERVER_STATUS:
        return Verdict(kind=Kind.PROBE, reason="server_error", status=status, message=text)
    reason = _CONFIG_STATUS.get(status, "unexpected_status")
    if error_code(answer.body) == "model_not_found":
        reason = "wrong_model"
    return Verdict(kind=Kind.CONFIG, reason=reason, status=status, message=text)


def _of_load(answer: ServerAnswer, text: str) -> Verdict:
    status = answer.status
    if status == 503 and _RAN_TOO_LONG in text:  # noqa: PLR2004 - HTTP
        # The server's own limit, reached while running: waiting would only repeat it.
        return Verdict(kind=Kind.ANSWER, reason="server_timeout", status=status, message=text)
    return Verdict(
        kind=Kind.LOAD,
        reason=_LOAD_STATUS[status],
        status=status,
        message=text,
        retry_after_s=_retry_after_s(answer.headers),
    )


def _of_ok(request: Request, answer: ServerAnswer) -> Verdict:
    try:
        found = read_answer(request.endpoint, answer.body, output_ids=request.reads_output_ids)
        if request.keeps_token_ids:
            found = with_token_ids(found, request)
    except BadAnswerError as error:
        return Verdict(
            kind=Kind.ANSWER, reason=error.reason, status=answer.status, message=error.detail
        )
    if found.empty and not found.usage.completion_tokens and request.max_tokens != 0:
        return Verdict(
            kind=Kind.ANSWER,
            reason="empty_output",
            status=answer.status,
            message="no token was generated",
        )
    flags = (
        ("empty", found.empty),
        ("truncated", found.truncated),
        ("reasoning_cut", found.reasoning_cut),
        ("repeating", found.repeating),
        ("unparsed_reasoning", found.unparsed_reasoning),
        ("clamped", request.clamped),
    )
    return Verdict(
        kind=Kind.COMPLETED,
        status=answer.status,
        answer=found,
        flags=tuple(name for name, holds in flags if holds),
    )


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Read Retry-After in seconds; a date there is not worth a clock's trust."""
    try:
        seconds = float(headers["retry-after"])
    except (KeyError, ValueError):
        return None
    return None if math.isnan(seconds) else min(max(seconds, FIRST_WAIT_S), LONGEST_WAIT_S)


def wait_s(verdict: Verdict, *, refusals: int, jitter: float) -> float:
    """Say how long a slot waits after a `LOAD`.

    Args:
        verdict: Of kind LOAD.
        refusals: How many came in a row, at least 1.
        jitter: Drawn evenly from 0 to 1 by the caller.

    Returns:
        Seconds: what the server asks for and up to a quarter more, else 0.5 s doubled with each
        refusal up to 30 s, of which the last half is spread by `jitter`.
    """
    if verdict.retry_after_s is not None:
        return verdict.retry_after_s * (1 + jitter / 4)
    full = min(FIRST_WAIT_S * 2.0 ** min(refusals - 1, 10), 30.0)
    return full * (1 + jitter) / 2
