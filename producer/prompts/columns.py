"""Turn columns of Arrow into plain values of JSON, or say which column JSON cannot hold.

What is decided here, a type at a time:

    text, whole numbers, true and false     as they are, also beyond 64 bits
    floating point                          exactly; NaN and infinite have no JSON: refused
    decimal                                 a number of the same digits, where there is one
    date, time, timestamp                   ISO 8601 text, every digit kept, zones as UTC (`Z`)
    list; struct; map with text as keys     array; object; object
    binary, duration, anything else         refused: to guess an encoding would change the prompt

A null in a struct is an absent member: Parquet gives every struct all members of its schema, so
nobody can tell whether the author wrote it. Nulls in lists and maps were written, and stay.
"""

import importlib
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from producer.prompts.verdicts import Reason, RowRejectedError

_SHOWN_NAME = 60


class UnfitError(RowRejectedError):
    """At least one value of a column cannot be JSON."""

    def __init__(self, column: str, what: str, *, reason: Reason = "bad_type") -> None:
        super().__init__(reason, f"column {column[:_SHOWN_NAME]} {what}")


def plain(array: Any, column: str) -> list[Any]:
    """Give an array's values, None for each null.

    Args:
        array: A `pyarrow.Array`.
        column: Its name for messages, with dots before members.

    Raises:
        UnfitError: If any of them has no JSON.
    """
    types = importlib.import_module("pyarrow.types")
    kind = array.type
    for fits, convert in _CONVERSIONS:
        if any(getattr(types, f"is_{name}")(kind) for name in fits):
            return convert(array, column)
    storage = getattr(array, "storage", None)
    if storage is not None:
        return _extension(array, storage, column)
    if array.null_count == len(array):
        return [None] * len(array)
    raise UnfitError(column, f"is {kind}, which JSON does not know: cast it, or leave it out")


def _as_it_is(array: Any, _column: str) -> list[Any]:
    found: list[Any] = array.to_pylist()
    return found


def _text(array: Any, column: str) -> list[Any]:
    try:
        found: list[Any] = array.to_pylist()
    except UnicodeDecodeError as error:
        raise UnfitError(column, "holds bytes that are not UTF-8", reason="bad_utf8") from error
    return found


def _floats(array: Any, column: str) -> list[Any]:
    found: list[Any] = array.to_pylist()
    if not all(value is None or math.isfinite(value) for value in found):
        raise UnfitError(column, "is NaN or infinite, which JSON does not know")
    return found


def _decimals(array: Any, column: str) -> list[Any]:
    return [None if value is None else _number(value, column) for value in array.to_pylist()]


def _number(value: Decimal, column: str) -> float:
    if value == value.to_integral_value():
        return int(value)
    found = float(value)
    if Decimal(repr(found)) != value:
        raise UnfitError(column, "is a decimal with more digits than a number keeps: cast it")
    return found


def _moments(array: Any, column: str) -> list[Any]:
    arrow = importlib.import_module("pyarrow")
    kind = array.type
    try:
        if getattr(kind, "tz", None) is not None:
            array = array.cast(arrow.timestamp(kind.unit, "UTC"))
        texts: list[str | None] = array.cast(arrow.string()).to_pylist()
    except arrow.ArrowException as error:
        raise UnfitError(column, f"is {kind} and out of range") from error
    return [None if text is None else text.replace(" ", "T", 1) for text in texts]


def _structs(array: Any, column: str) -> list[Any]:
    kind = array.type
    names = [kind.field(at).name for at in range(kind.num_fields)]
    columns = [
        plain(member, f"{column}.{name}" if column else name)
        for name, member in zip(names, array.flatten(), strict=True)
    ]
    if not names:
        found: list[Any] = [{} for _ in range(len(array))]
    else:
        found = [
            {name: value for name, value in zip(names, row, strict=True) if value is not None}
            for row in zip(*columns, strict=True)
        ]
    if array.null_count:
        there = array.is_valid().to_pylist()
        return [row if valid else None for row, valid in zip(found, there, strict=True)]
    return found


def _lists(array: Any, column: str) -> list[Any]:
    return _cut(array, plain(array.flatten(), column))


def _maps(array: Any, column: str) -> list[Any]:
    ends = array.offsets.to_pylist()
    first, size = ends[0], ends[-1] - ends[0]
    names = plain(array.keys.slice(first, size), column)
    if not all(type(name) is str for name in names):
        raise UnfitError(column, "is a map whose keys are no text")
    values = plain(array.items.slice(first, size), column)
    found: list[Any] = []
    for begin, end, there in zip(ends, ends[1:], array.is_valid().to_pylist(), strict=False):
        mine = slice(begin - first, end - first)
        row = dict(zip(names[mine], values[mine], strict=True))
        if len(row) != end - begin:
            raise UnfitError(column, "is a map with one key twice")
        found.append(row if there else None)
    return found


def _cut(array: Any, items: list[Any]) -> list[Any]:
    """Cut the items of all lists into those of each."""
    lengths = importlib.import_module("pyarrow.compute").list_value_length(array).to_pylist()
    found: list[Any] = []
    at = 0
    for length in lengths:
        if length is None:
            found.append(None)
        else:
            found.append(items[at : at + length])
            at += length
    return found


def _encoded(array: Any, column: str) -> list[Any]:
    return plain(array.dictionary_decode(), column)


def _extension(array: Any, storage: Any, column: str) -> list[Any]:
    if getattr(array.type, "extension_name", "") == "arrow.uuid":
        return [None if value is None else str(value) for value in array.to_pylist()]
    return plain(storage, column)


_CONVERSIONS: tuple[tuple[tuple[str, ...], Callable[[Any, str], list[Any]]], ...] = (
    (("string", "large_string", "string_view"), _text),
    (("integer", "boolean", "null"), _as_it_is),
    (("floating",), _floats),
    (("struct",), _structs),
    # A map is a list of pairs, and would pass for one.
    (("map",), _maps),
    (("list", "large_list", "fixed_size_list"), _lists),
    (("dictionary",), _encoded),
    (("decimal",), _decimals),
    (("date", "time", "timestamp"), _moments),
)
"""Names of `pyarrow.types.is_…` and what converts the arrays that they hold for."""


def doubled_name(kind: Any, column: str = "") -> str | None:
    """Name a member that a struct, or the schema, has twice; a row could hold only one of them."""
    fields = [kind.field(at) for at in range(getattr(kind, "num_fields", 0))]
    names = [field.name for field in fields]
    for name in names:
        if names.count(name) > 1:
            return f"{column}.{name}" if column else name
    for field in fields:
        found = doubled_name(field.type, f"{column}.{field.name}" if column else field.name)
        if found is not None:
            return found
    return None
