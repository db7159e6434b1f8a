"""Keep a shard as Parquet: for readers that stream from s3:// and take no compressed JSON lines.

Flat columns and `messages` for training (`token_ids` and `loss_mask` where the run keeps token
ids), and beside them `row`: the very JSON line that a
.jsonl.zst shard would hold. So nothing of a row is lost to a schema, its hash is the same in both
formats, and whoever reads a shard back (export, verify, a rebuild) gets the same bytes.

Needs pyarrow, which nothing else does: `pip install 'headrace[parquet]'`.
"""

import importlib
import io
from collections.abc import Sequence
from typing import Any

import msgspec

from common.errors import StoreDamagedError, UsageError

SUFFIX = "parquet"
LEVEL = 3


class _Choice(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    loss_mask: list[int] | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Row(msgspec.Struct, frozen=True):
    """What has a column of its own; the first choice stands for the answer."""

    id: msgspec.Raw
    key: str
    sample: int = 0
    source: str = ""
    line: int = 0
    model: str = ""
    messages: list[dict[str, Any]] | None = None
    choices: list[_Choice] = []
    usage: _Usage = _Usage()


_decoder = msgspec.json.Decoder(_Row)


def to_parquet(rows: Sequence[bytes]) -> bytes:
    """Write rows (JSON lines without newline, at least one) as one Parquet file.

    Raises:
        UsageError: pyarrow is not installed.
    """
    arrow, parquet = _pyarrow()
    decoded = [_decoder.decode(row) for row in rows]
    first = [row.choices[0] if row.choices else _Choice() for row in decoded]
    text, number = arrow.string(), arrow.int64()
    message = arrow.struct([("role", text), ("content", text)])
    columns: dict[str, tuple[Any, list[Any]]] = {
        "id": (text, [bytes(row.id).decode() for row in decoded]),
        "key": (text, [row.key for row in decoded]),
        "sample": (number, [row.sample for row in decoded]),
        "source": (text, [row.source for row in decoded]),
        "line": (number, [row.line for row in decoded]),
        "model": (text, [row.model for row in decoded]),
        "messages": (arrow.list_(message), [_messages(row.messages) for row in decoded]),
        "content": (text, [choice.content for choice in first]),
        "reasoning_content": (text, [choice.reasoning_content for choice in first]),
        "finish_reason": (text, [choice.finish_reason for choice in first]),
        "prompt_tokens": (number, [row.usage.prompt_tokens for row in decoded]),
        "completion_tokens": (number, [row.usage.completion_tokens for row in decoded]),
        "row": (text, [row.decode() for row in rows]),
    }
    # All rows of a run have them or none has, so all its shards have the same columns.
    if any(choice.token_ids is not None for choice in first):
        columns["token_ids"] = (arrow.list_(number), [each.token_ids for each in first])
        columns["loss_mask"] = (arrow.list_(arrow.int8()), [each.loss_mask for each in first])
    table = arrow.table(
        {name: arrow.array(values, kind) for name, (kind, values) in columns.items()}
    )
    file = io.BytesIO()
    parquet.write_table(table, file, compression="zstd", compression_level=LEVEL)
    return file.getvalue()


def from_parquet(data: bytes) -> bytes:
    """Give back the rows of a shard as JSON lines, byte for byte.

    Raises:
        StoreDamagedError: It is no shard of ours.
        UsageError: pyarrow is not installed.
    """
    arrow, parquet = _pyarrow()
    try:
        column = parquet.read_table(io.BytesIO(data), columns=["row"]).column("row")
    except (arrow.ArrowException, KeyError, OSError) as error:
        raise StoreDamagedError(f"no shard in Parquet ({type(error).__name__})") from error
    return "\n".join([*column.to_pylist(), ""]).encode()


def check_pyarrow() -> None:
    """Refuse a run in Parquet before anything is generated where it could not be stored."""
    _pyarrow()


def _messages(messages: list[dict[str, Any]] | None) -> list[dict[str, str | None]] | None:
    """Bring messages to role and text; content in parts stays as its JSON."""
    if messages is None:
        return None
    return [
        {"role": _text(one.get("role")), "content": _text(one.get("content"))} for one in messages
    ]


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()


def _pyarrow() -> tuple[Any, Any]:
    # Imported here: a hundred megabytes that most never need.
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UsageError(
            "this run has format parquet, which needs pyarrow: pip install 'headrace[parquet]'"
        ) from error
