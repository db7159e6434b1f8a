"""The record of SGLang's options: read, written, made into parsers.

`options.jsonl` has an option a line, with the versions in which it is so.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from typing_extensions import override

from tests.sglang_flags import VERSIONS

PATH = Path(__file__).with_name("options.jsonl")

_WITHOUT_VALUE = frozenset(
    {
        "store_true",
        "DeprecatedAction",
        "DeprecatedStoreConstAction",
        "DeprecatedStoreTrueAction",
    }
)

Options = Sequence[Mapping[str, Any]]


class RefusedError(Exception):
    """The parser refuses an argument; SGLang would end with 2."""


class _Parser(argparse.ArgumentParser):
    @override
    def error(self, message: str) -> NoReturn:
        raise RefusedError(message)


@cache
def recorded() -> dict[str, list[dict[str, Any]]]:
    """The options of each version, in the order of their parser."""
    found: dict[str, list[dict[str, Any]]] = {version: [] for version in VERSIONS}
    for line in PATH.read_text(encoding="utf-8").splitlines():
        option = json.loads(line)
        for version in option.pop("in"):
            found[version].append(option)
    return found


def write(options: Mapping[str, Options]) -> None:
    """Write the record anew; an option that is the same in several versions stands once."""
    lines: dict[str, list[str]] = {}
    for version in VERSIONS:
        for option in options[version]:
            lines.setdefault(json.dumps(option, sort_keys=True), []).append(version)
    text = "".join(
        json.dumps({"in": versions, **json.loads(option)}) + "\n"
        for option, versions in sorted(lines.items())
    )
    PATH.write_text(text, encoding="utf-8")


def same(left: Options, right: Options) -> bool:
    """Whether two lists are the same options, in any order."""
    return _sorted(left) == _sorted(right)


def _sorted(options: Options) -> list[str]:
    return sorted(json.dumps(option, sort_keys=True) for option in options)


@cache
def parser_of(version: str) -> argparse.ArgumentParser:
    """Make the parser of a version again: it takes and refuses what that one does."""
    parser = _Parser(prog="sglang", add_help=False)
    for option in recorded()[version]:
        # The action adds the other one, --no-…, itself.
        both = option["kind"] == "BooleanOptionalAction"
        parser.add_argument(*option["flags"][: 1 if both else None], **_keywords(option))
    return parser


def _keywords(option: Mapping[str, Any]) -> dict[str, Any]:
    kind = option["kind"]
    told: dict[str, Any] = {"default": None}
    if option.get("required"):
        told["required"] = True
    if kind == "BooleanOptionalAction":
        return {**told, "action": argparse.BooleanOptionalAction}
    if kind in _WITHOUT_VALUE and "choices" not in option:
        return {**told, "action": "store_true"}
    if "nargs" in option:
        told["nargs"] = option["nargs"]
    if "type" in option:
        told["type"] = {"int": int, "float": float}[option["type"]]
    if "choices" in option:
        numbers = told.get("type", str)
        told["choices"] = [numbers(each) for each in option["choices"]]
    return told
