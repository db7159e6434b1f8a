"""Find out why a line is no JSON object line, once the fast decoder has refused it.

The decoder says only that it refused; here the standard library's slower one is asked what it
sees, so that the person gets the place and the kind of the fault.
"""

import json
from typing import Any

from producer.prompts.verdicts import RowRejectedError

NESTING_LIMIT = 200
"""Levels of arrays and objects: what decodes here must decode in every process after this one."""

_decoder = json.JSONDecoder()
_lax = json.JSONDecoder(strict=False)

_OPEN_ENDS = ("{", "[", ",", ":")


def explain(line: bytes) -> RowRejectedError:
    """Say what is wrong with `line` (not blank, without byte-order mark), which did not decode."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        if _half_pair(line):
            return RowRejectedError("lone_surrogate", "holds half of a surrogate pair as bytes")
        return RowRejectedError(
            "bad_utf8",
            f"byte {error.start} of the line (0x{line[error.start]:02x}) is not UTF-8: convert "
            "the file to UTF-8",
        )
    try:
        return _explain_text(text.strip(" \t\r\n"))
    except RecursionError:
        return RowRejectedError("bad_json", "is nested too deeply")


def _explain_text(text: str) -> RowRejectedError:
    try:
        value, end = _decoder.raw_decode(text)
    except json.JSONDecodeError as error:
        return _explain_fault(text, error)
    except ValueError:
        # An integer of more digits than Python converts.
        return RowRejectedError("bad_json", "holds a number with too many digits")
    if end < len(text):
        return _explain_rest(text, end)
    if not _encodable(value):
        return RowRejectedError(
            "lone_surrogate",
            "holds half of a surrogate pair (\\ud800 to \\udfff alone), which is no character",
            row=value,
        )
    return RowRejectedError(
        "bad_json", "holds a number that JSON does not know (NaN, Infinity, or out of range)"
    )


def _explain_fault(text: str, error: json.JSONDecodeError) -> RowRejectedError:
    try:
        value = _lax.decode(text)
    except ValueError:
        where = f"at character {error.pos + 1}"
        if error.pos >= len(text):
            where = "it ends too early"
        return RowRejectedError("bad_json", f"is not JSON: {where} ({error.msg})")
    return RowRejectedError(
        "control_char",
        f"character {error.pos + 1} is a raw control character inside a string: write it as "
        "\\n, \\t or \\u00XX",
        row=value,
    )


def _explain_rest(text: str, end: int) -> RowRejectedError:
    if _separate_lines(text):
        return RowRejectedError(
            "line_ends",
            "has lines that end with a lone carriage return (CR): convert them to LF, for "
            "example with tr '\\r' '\\n'",
        )
    return RowRejectedError(
        "bad_json", f"there is more after the first object, at character {end + 1}"
    )


def _separate_lines(text: str) -> bool:
    parts = [part for part in text.split("\r") if part.strip()]
    if len(parts) < 2:  # noqa: PLR2004 - one part is one line
        return False
    return all(part.lstrip().startswith("{") for part in parts[:2]) and is_complete(parts[0])


def is_too_deep(row: dict[str, Any]) -> bool:
    """Tell whether a row has more levels than NESTING_LIMIT."""
    level: list[Any] = [row]
    for _ in range(NESTING_LIMIT):
        level = [
            item
            for value in level
            for item in (value.values() if type(value) is dict else value)
            if type(item) in (dict, list)
        ]
        if not level:
            return False
    return True


def is_complete(text: str) -> bool:
    """Tell whether `text` is one JSON value."""
    try:
        _decoder.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def is_cut_open(line: bytes) -> bool:
    """Tell whether a line is the beginning of JSON that goes on in the next one."""
    text = line.decode(errors="replace").strip()
    if not text.endswith(_OPEN_ENDS):
        return False
    try:
        _decoder.decode(text)
    except json.JSONDecodeError as error:
        return error.pos >= len(text)
    except (ValueError, RecursionError):
        return False
    return False


def _encodable(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _half_pair(line: bytes) -> bool:
    """Tell whether the only fault is a surrogate written as three bytes (CESU)."""
    try:
        line.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return True
