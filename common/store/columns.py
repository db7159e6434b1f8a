"""The columns of a completion in Parquet: shards and `producer export --format parquet` alike.

Flat where one looks for a value (the first choice's content, tokens, model), lists of structs for
`messages` and for the choices beyond the first, and JSON text for what has any shape: tools,
params, extra, tool calls.
The schema is fixed: a column in which a file has nothing still has its type, so files of one run,
and of others, go together. What this version has no column for stands as JSON text in `more`, of
the row as of a message and of a choice (`choice_more` for the first): nothing is dropped because
it is new. An `id` that is a number stands in `id` as its text, and in `more` as it is.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from common.errors import UsageError

T = TypeVar("T")

Members = dict[str, msgspec.Raw]

ROW = "row"
"""The column with the very JSON line, which shards have."""

_MESSAGE = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
_CHOICE = ("content", "reasoning_content", "finish_reason", "tool_calls")
_IDS = ("token_ids", "loss_mask")
_TEXTS = (
    "id",
    "key",
    "fingerprint",
    "source",
    "endpoint",
    "prompt",
    "params",
    "params_hash",
    "model",
    "server_version",
    "server",
    "completed_at",
    "extra",
    "tools",
)
_NUMBERS = ("sample", "line", "try", "attempts")
_TOKENS = ("prompt_tokens", "completion_tokens", "reasoning_tokens", "cached_tokens")

_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]

_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_lists = msgspec.json.Decoder(list[dict[str, msgspec.Raw]] | None).decode
_text = msgspec.json.Decoder(str).decode
_whole = msgspec.json.Decoder(_Int64 | None).decode
_real = msgspec.json.Decoder(float | None).decode
_numbers = msgspec.json.Decoder(list[_Int64] | None).decode
_words = msgspec.json.Decoder(list[str] | None).decode


def arrow() -> tuple[Any, Any]:
    """Import pyarrow and its Parquet part.

    Raises:
        UsageError: It is not installed.
    """
    # Imported here: a hundred megabytes that most never need.
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UsageError("Parquet needs pyarrow: pip install pyarrow") from error


def schema(*, with_row: bool) -> Any:
    """Give the Arrow schema; with `with_row` the row itself is its last column."""
    pa, _ = arrow()
    text, number = pa.string(), pa.int64()
    texts = [(name, text) for name in _TEXTS]
    message = pa.struct([(name, text) for name in (*_MESSAGE, "more")])
    ids = [(name, pa.list_(number)) for name in _IDS]
    first = [*((name, text) for name in _CHOICE), *ids]
    choice = pa.struct([("index", number), *first, ("more", text)])
    return pa.schema(
        [
            *texts[:3],
            *((name, number) for name in _NUMBERS),
            *texts[3:5],
            ("messages", pa.list_(message)),
            *texts[5:6],
            *first,
            ("choice_more", text),
            ("further_choices", pa.list_(choice)),
            *((name, number) for name in _TOKENS),
            *texts[6:12],
            ("latency_s", pa.float64()),
            ("flags", pa.list_(text)),
            *texts[12:],
            ("more", text),
            *([(ROW, text)] if with_row else []),
        ]
    )


def record(row: bytes) -> dict[str, Any]:
    """Give the values of a row's columns, `row` aside; what does not fit its column is in `more`.

    Raises:
        msgspec.MsgspecError: It is no JSON object.
    """
    members = _members(row)
    id_json = members.get("id", msgspec.Raw(b"null"))
    values: dict[str, Any] = {name: _take(members, name, _plain) for name in _TEXTS}
    values.update((name, _take(members, name, _whole)) for name in _NUMBERS)
    usage = _take(members, "usage", _members) or {}
    values.update((name, _take(usage, name, _whole)) for name in _TOKENS)
    if usage:
        members["usage"] = msgspec.Raw(msgspec.json.encode(usage))
    values["latency_s"] = _take(members, "latency_s", _real)
    values["flags"] = _take(members, "flags", _words)
    values["messages"] = _take(members, "messages", _messages)
    first, *further = _take(members, "choices", _choices) or [{}]
    values.update((name, first.get(name)) for name in (*_CHOICE, *_IDS))
    values["choice_more"] = first.get("more")
    values["further_choices"] = further or None
    if not bytes(id_json).startswith(b'"'):
        # 1 and "1" are two ids, and one text.
        members["id"] = id_json
    values["more"] = _rest(members)
    return values


def table(rows: Sequence[bytes], *, with_row: bool) -> Any:
    """Bring rows (JSON lines without newline) to an Arrow table of `schema`."""
    pa, _ = arrow()
    records = [record(row) for row in rows]
    kinds = schema(with_row=with_row)
    columns = [
        pa.array(
            [row.decode() for row in rows]
            if kind.name == ROW
            else [values[kind.name] for values in records],
            kind.type,
        )
        for kind in kinds
    ]
    return pa.Table.from_arrays(columns, schema=kinds)


def _messages(raw: msgspec.Raw) -> list[dict[str, Any]] | None:
    found = _lists(raw)
    return None if found is None else [_texts(members, _MESSAGE) for members in found]


def _choices(raw: msgspec.Raw) -> list[dict[str, Any]] | None:
    found = _lists(raw)
    return None if found is None else [_choice(members) for members in found]


def _choice(members: Members) -> dict[str, Any]:
    values: dict[str, Any] = {name: _take(members, name, _numbers) for name in _IDS}
    values["index"] = _take(members, "index", _whole)
    return {**values, **_texts(members, _CHOICE)}


def _texts(members: Members, names: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {name: _take(members, name, _plain) for name in names}
    values["more"] = _rest(members)
    return values


def _take(members: Members, name: str, read: Callable[[msgspec.Raw], T]) -> T | None:
    """Move a member out and read it; one of another type stays."""
    raw = members.pop(name, None)
    if raw is None:
        return None
    try:
        return read(raw)
    except msgspec.MsgspecError:
        members[name] = raw
        return None


def _plain(raw: msgspec.Raw) -> str | None:
    """Give a text as it is, null as None, and anything else as its JSON."""
    text = bytes(raw)
    if text.startswith(b'"'):
        return _text(text)
    return None if text == b"null" else text.decode()


def _rest(members: Members) -> str | None:
    return msgspec.json.encode(members).decode() if members else None
