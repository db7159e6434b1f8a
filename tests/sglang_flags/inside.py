"""Print the options of the argument parser in an unpacked wheel: `python inside.py FOLDER`.

SGLang's arguments stand in modules that import torch and much more, which is not there. So every
module that is not on a short list of SGLang's own ones is a stand-in whose names are empty types.
What depends on them (the parsers of reasoning, by name) has no choices in the record.
"""

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

OWN = (
    "sglang.srt.server_args",
    "sglang.srt.arg_groups",
    "sglang.srt.environ",
)

MADE_ELSEWHERE = frozenset({"--reasoning-parser", "--tool-call-parser", "--lora-target-modules"})
"""Their choices come from modules that are not read here."""


class _Empty(type):
    """An empty type that has every attribute, each an empty type again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Empty(name, (), {})
        setattr(cls, name, made)
        return made

    @override
    def __call__(cls, *_args: Any, **_named: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __getitem__(cls, _key: Any) -> Any:
        return cls

    def __bool__(cls) -> bool:
        return True

    @override
    def __or__(cls, other: Any) -> Any:
        return other

    __ror__ = __or__
    __add__ = __radd__ = __or__
    __lt__ = __le__ = __gt__ = __ge__ = lambda *_: False


class _StandIn(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    @override
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Empty(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds SGLang's own modules in the folder, and a stand-in for all others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @override
    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(name == own or name.startswith(f"{own}.") for own in OWN):
            base = self._folder / name.replace(".", "/")
            for path in (base / "__init__.py", base.with_suffix(".py")):
                if path.exists():
                    places = [str(base)] if path.name == "__init__.py" else None
                    return importlib.util.spec_from_file_location(
                        name, path, submodule_search_locations=places
                    )
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    @override
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    @override
    def exec_module(self, module: types.ModuleType) -> None:
        del module


def _kind(action: argparse.Action) -> str:
    word = type(action).__name__
    names = {"_StoreAction": "store", "_StoreTrueAction": "store_true", "_AppendAction": "append"}
    return names.get(word, word.lstrip("_"))


def _option(action: argparse.Action) -> dict[str, Any]:
    found: dict[str, Any] = {"flags": list(action.option_strings), "kind": _kind(action)}
    if action.type in {int, float}:
        found["type"] = action.type.__name__
    if action.nargs is not None and action.nargs != 0:
        found["nargs"] = action.nargs
    if not MADE_ELSEWHERE.intersection(action.option_strings):
        choices = sorted(map(str, action.choices or ()))
        found |= {"choices": choices} if choices else {}
    if action.required:
        found["required"] = True
    error = getattr(action, "error_message", None)
    if error:
        found["error"] = str(error)
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    sys.meta_path.append(_Finder(folder))
    module = importlib.import_module("sglang.srt.server_args")
    parser = argparse.ArgumentParser(add_help=False)
    module.ServerArgs.add_cli_args(parser)
    sys.stdout.write(json.dumps([_option(action) for action in parser._actions]))


if __name__ == "__main__":
    main()
