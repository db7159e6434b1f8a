"""Read headrace.toml: what holds for every command at its top, and a table for each command.

    redis = "redis://queue:6379/0"      for each command that has --redis

    [producer.enqueue]
    max_tokens = 4096

A value becomes text as it would stand on the command line and is read by the flag itself, so there
is one judge of what is right. A command checks all that could reach it: the top, the names of the
tables, its own table. The tables of other commands are theirs to judge.
"""

import difflib
import stat
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from common.errors import UsageError
from common.flags import flag_of, key_of, options_of

FILE = "headrace.toml"
"""Looked for where the command is called."""

PROGRAMS = ("producer", "workers")

SHARED = ("endpoint_url", "log_level", "notify", "output", "redis")
"""What may stand at the top. The rest means something at one command, and stands in its table."""

ELSEWHERE = {
    "api_key": "set HEADRACE_API_KEY",
    "aws_access_key_id": "S3's keys come from ~/.aws, AWS_PROFILE or the machine's role",
    "aws_secret_access_key": "S3's keys come from ~/.aws, AWS_PROFILE or the machine's role",
}
"""Secrets that people look for a key for."""


class Settings:
    """One headrace.toml.

    Attributes:
        path: The file, as errors name it.

    Raises:
        UsageError: It cannot be read, or is no TOML.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._document = tomllib.load(file)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} is not TOML: {error}") from None
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from None

    def values_for(
        self, command: click.Command, *, program: str, name: str, known: Iterable[str]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Give what the file says to one command.

        Args:
            command: Whose flags decide.
            program: `producer` or `workers`.
            name: The command's.
            known: Names of all commands of the program.

        Returns:
            Value by the flag's name in the code, as `default_map` takes it; file and key by the
            same name, for people.

        Raises:
            UsageError: An unknown key or table, or a value of the wrong kind.
        """
        options = options_of(command)
        self._check_top(options, f"{program}.{name}")
        table = self._table(program, name, tuple(known))
        values: dict[str, Any] = {}
        places: dict[str, str] = {}
        for key in SHARED:
            if key in options and key in self._top():
                self._take(options[key], self._top()[key], key, values, places)
        for key, value in _by_key(table, f"{self.path}: [{program}.{name}]").items():
            place = f"[{program}.{name}] {key}"
            if key not in options:
                raise UsageError(f"{self.path}: {place}: {_no_such(key, options)}")
            self._take(options[key], value, place, values, places)
        return values, places

    def holds_open_secret(self) -> bool:
        """Whether others on this machine can read a password in the file."""
        try:
            mode = self.path.stat().st_mode
        except OSError:
            return False
        open_to_others = stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH)
        return bool(open_to_others) and any(map(_has_password, _texts(self._document)))

    def _top(self) -> dict[str, Any]:
        plain = {key: value for key, value in self._document.items() if key not in PROGRAMS}
        return _by_key(plain, str(self.path))

    def _check_top(self, options: Mapping[str, click.Option], own: str) -> None:
        for key, value in self._top().items():
            if key in SHARED:
                continue
            if isinstance(value, dict):
                near = difflib.get_close_matches(key, PROGRAMS, n=1) or [PROGRAMS[0]]
                hint = f"tables are [producer.…] and [workers.…]; did you mean [{near[0]}.…]?"
                raise UsageError(f"{self.path}: unknown table [{key}]: {hint}")
            if key in options:
                hint = f"it belongs into the table of its command: [{own}]"
            else:
                hint = ELSEWHERE.get(key) or _nearest(key, SHARED)
            raise UsageError(f"{self.path}: unknown key {key} at the top: {hint}")

    def _table(self, program: str, name: str, known: tuple[str, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for each in PROGRAMS:
            tables = self._document.get(each, {})
            if not isinstance(tables, dict):
                raise UsageError(
                    f"{self.path}: {each} is no value but tables, such as [{program}.{name}]"
                )
            for command, table in tables.items():
                if not isinstance(table, dict):
                    raise UsageError(
                        f"{self.path}: [{each}] {command}: flags stand in the table of a command, "
                        f"such as [{program}.{name}], or, if shared ({', '.join(SHARED)}), at the "
                        "top of the file"
                    )
                if each == program and command not in known:
                    raise UsageError(
                        f"{self.path}: unknown table [{each}.{command}]: "
                        f"{_nearest(command, known)}"
                    )
                if (each, command) == (program, name):
                    found = table
        return found

    def _take(
        self,
        option: click.Option,
        value: Any,
        place: str,
        values: dict[str, Any],
        places: dict[str, str],
    ) -> None:
        assert option.name is not None  # noqa: S101 - click gives every flag one
        try:
            values[option.name] = _as_typed(option, value)
        except TypeError as error:
            raise UsageError(f"{self.path}: {place}: {error}") from None
        places[option.name] = f"{self.path}, {place}"


def find(given: str | None) -> Path | None:
    """Give the file to read: the one that is named, else the one here, else None.

    Raises:
        UsageError: The one that is named is not there.
    """
    if not given:
        return Path(FILE) if Path(FILE).exists() else None
    if not Path(given).exists():
        raise UsageError(f"--config {given}: there is no such file")
    return Path(given)


def _as_typed(option: click.Option, value: Any) -> Any:
    """Give a value as click gets it from a command line.

    Raises:
        TypeError: It is of another kind than the flag takes; the text says which.
    """
    if option.is_flag and isinstance(option.type, click.types.BoolParamType):
        if not isinstance(value, bool):
            raise TypeError(f"must be true or false, as {flag_of(option)} takes no value")
        return value
    if option.multiple or option.nargs != 1:
        if not isinstance(value, list):
            raise TypeError('must be a list, such as ["a", "b"]')
        return [_text(each) for each in value]
    return _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        kinds = {bool: "true or false", list: "a list", dict: "a table"}
        raise TypeError(f"must be text or a number, not {kinds.get(type(value), 'a date')}")
    return str(value)


def _by_key(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Read `max-tokens` as `max_tokens`.

    Raises:
        UsageError: One key stands there in both spellings.
    """
    found: dict[str, Any] = {}
    for name, value in table.items():
        key = name.replace("-", "_")
        if key in found:
            raise UsageError(f"{where}: {key} stands there twice, as {name} too")
        found[key] = value
    return found


def _no_such(key: str, options: Mapping[str, click.Option]) -> str:
    if key in ELSEWHERE:
        return f"no key of this file: {ELSEWHERE[key]}"
    for option in options.values():
        if f"--{key.replace('_', '-')}" in option.opts:
            return f"write {key_of(option)}"
    return f"there is no such flag; {_nearest(key, options)}"


def _nearest(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, list(known), n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str):
        yield value


def _has_password(text: str) -> bool:
    if "://" not in text:
        return False
    try:
        parts = urlsplit(text)
    except ValueError:
        return True  # an address that cannot be read may hold anything
    return bool(parts.password) or "password=" in parts.query
