"""The output file of OpenAI's batches, and their error file.

    {"id","custom_id","response":{"status_code","request_id","body"},"error":null}

The body is what the route answers with: chat.completion, or text_completion (for /generate too,
whose answers have the same parts). `custom_id` is the prompt's id as text; the samples of a prompt
have one custom_id and tell themselves apart by `id`, which is made of the key. An error line has
the HTTP answer with its body.error where there was one, else `error` with code and message.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec
from typing_extensions import override

from common.errors import StoreDamagedError
from common.models import FailureRow, Usage
from producer.formats.base import ExportedRow, LineFormat, id_text, read_row
from producer.outfile import OutFile

_encode = msgspec.json.Encoder().encode
_failures = msgspec.json.Decoder(FailureRow)
_LEAST_ERROR = 400
_CODES = {"cancelled": "batch_cancelled"}


class OpenAi(LineFormat):
    """A line is a request, with all its choices."""

    def __init__(self) -> None:
        super().__init__()
        self._samples = self._numbers = self._digits = False

    @override
    def lines(self, row: bytes) -> Sequence[bytes]:
        """Give the line of a request."""
        found = read_row(row)
        self._samples |= found.sample > 0
        custom_id = id_text(found.id)
        quoted = bytes(found.id).startswith(b'"')
        self._numbers |= not quoted
        self._digits |= quoted and custom_id[-1:].isdigit() and _is_number(custom_id)
        response = {
            "status_code": 200,
            "request_id": f"{found.key}-{found.try_}",
            "body": _body(found),
        }
        return (_line(found.key, custom_id, response=response),)

    @override
    def write(self, to: OutFile, rows: Iterable[bytes]) -> None:
        """Write the file, and say where a custom_id names more than one line."""
        super().write(to, rows)
        if self._samples:
            self.tally.notes.append(
                "the samples of a prompt have one custom_id, and each its own id"
            )
        if self._numbers and self._digits:
            self.tally.notes.append(
                'custom_id is text: prompts with the ids 1 and "1" can\'t be told apart by it'
            )

    @override
    def failure(self, row: bytes) -> bytes:
        """Give the line of the error file."""
        try:
            found = _failures.decode(row)
        except msgspec.MsgspecError as why:
            raise StoreDamagedError(f"a row of failures/ is no failure: {why}") from why
        code = _CODES.get(found.outcome, found.reason)
        if found.status is None or found.status < _LEAST_ERROR:
            error = {"code": code, "message": found.message or found.reason}
            return _line(found.key, id_text(found.id), error=error)
        response = {
            "status_code": found.status,
            "request_id": f"{found.key}-{found.try_}",
            "body": {
                "error": {
                    "message": found.message,
                    "type": "invalid_request_error" if found.status < 500 else "server_error",  # noqa: PLR2004
                    "param": None,
                    "code": code,
                }
            },
        }
        return _line(found.key, id_text(found.id), response=response)


def _line(
    key: str,
    custom_id: str,
    *,
    response: dict[str, Any] | None = None,
    error: dict[str, Any] | None = None,
) -> bytes:
    return _encode(
        {"id": f"batch_req_{key}", "custom_id": custom_id, "response": response, "error": error}
    )


def _body(row: ExportedRow) -> dict[str, Any]:
    chat = row.endpoint == "chat"
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{row.key}",
        "object": "chat.completion" if chat else "text_completion",
        "created": _seconds(row.completed_at),
        "model": row.model,
        "choices": [_choice(choice, chat=chat) for choice in row.choices],
        "usage": _usage(row.usage or Usage(prompt_tokens=0, completion_tokens=0)),
        "system_fingerprint": None,
    }


def _choice(choice: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    ends = {"logprobs": choice.get("logprobs"), "finish_reason": choice.get("finish_reason")}
    if not chat:
        return {"index": choice.get("index", 0), "text": choice.get("content") or "", **ends}
    message = {"role": "assistant", "content": choice.get("content"), "refusal": None}
    for name in ("reasoning_content", "tool_calls"):
        if choice.get(name) is not None:
            message[name] = choice[name]
    return {"index": choice.get("index", 0), "message": message, **ends}


def _usage(usage: Usage) -> dict[str, Any]:
    told: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.cached_tokens:
        told["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if usage.reasoning_tokens:
        told["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return told


def _seconds(completed_at: str) -> int:
    try:
        return int(datetime.fromisoformat(completed_at).timestamp())
    except ValueError:
        return 0


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def make() -> OpenAi:
    """Make what writes one file."""
    return OpenAi()
