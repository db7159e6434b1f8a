"""SGLang's command line as the parser of each version takes it, 0.5.7 to 0.5.23.

`sglang_flags.json` holds, for each flag, from which version to which it exists and what it takes;
read from the argument parsers of thirteen released versions. A version between two of them is
taken for the earlier one.
"""

import argparse
import functools
from importlib.resources import files
from typing import Any, Literal

import msgspec

Kind = Literal["switch", "value", "many", "any", "maybe"]

_NARGS: dict[Kind, str] = {"many": "+", "any": "*", "maybe": "?"}
_TYPES = {"int": int, "float": float, "str": str}
SERVE_VERSION = (0, 5, 20)
"""From here on the parser calls itself `sglang serve`, however it was called."""


class Flag(msgspec.Struct, array_like=True, frozen=True):
    """One flag over a span of versions.

    Attributes:
        flag: As it is typed.
        since, until: First and last version that has it like this; empty: no bound.
        dest: What it sets; several flags may set the same.
        kind: `switch` takes nothing, `many` one or more, `any` none or more, `maybe` at most one.
        type: Of its values.
        choices: The only values, where that matters here.
    """

    flag: str
    since: str
    until: str
    dest: str
    kind: Kind
    type: Literal["int", "float", "str"] = "str"
    choices: tuple[str, ...] | None = None


class _Table(msgspec.Struct):
    versions: list[str]
    flags: list[Flag]


def version_key(version: str) -> tuple[int, ...]:
    """Give a version as numbers that compare: `0.5.12.post1` is (0, 5, 12, 1)."""
    numbers = [int(part.removeprefix("post")) for part in version.split(".")]
    return tuple([*numbers, 0, 0][:4])


def parser(version: str) -> argparse.ArgumentParser:
    """Make the parser of a version; what was not given is None.

    It ends the process as the real one does: exit 2 and a line on stderr that names what is wrong.
    """
    key = version_key(version)
    made = argparse.ArgumentParser(
        prog="sglang serve" if key >= SERVE_VERSION else "launch_server.py"
    )
    for (dest, kind, of_type, choices), spelled in _flags_of(key).items():
        more: dict[str, Any] = {"dest": dest, "default": None}
        if kind == "switch":
            made.add_argument(*spelled, action="store_true", **more)
            continue
        if kind in _NARGS:
            more["nargs"] = _NARGS[kind]
        made.add_argument(*spelled, type=_TYPES[of_type], choices=choices, **more)
    return made


def _flags_of(
    key: tuple[int, ...],
) -> dict[tuple[str, Kind, str, tuple[str, ...] | None], list[str]]:
    """Group the spellings of what is one argument."""
    known = [version for version in _table().versions if version_key(version) <= key]
    at = version_key(known[-1] if known else _table().versions[0])
    found: dict[tuple[str, Kind, str, tuple[str, ...] | None], list[str]] = {}
    for each in _table().flags:
        begun = not each.since or version_key(each.since) <= at
        if begun and (not each.until or at <= version_key(each.until)):
            one = (each.dest, each.kind, each.type, each.choices)
            found.setdefault(one, []).append(each.flag)
    return found


@functools.cache
def _table() -> _Table:
    text = (files("workers.simulator") / "sglang_flags.json").read_bytes()
    return msgspec.json.decode(text, type=_Table)
