"""The rules of the protocol, and for each the changes that take one guard of it away.

`rules.toml` names the rules in short words; the other tables beside it hold the mutants. A mutant
replaces one piece of text that stands once in its file, so it moves with the code; a test of its
own says when that text has gone. It names the one test that must fail without the guard.
"""

import ast
import tomllib
from functools import cache
from pathlib import Path

import msgspec

FOLDER = Path(__file__).parent
REPOSITORY = FOLDER.parents[1]


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule.

    Attributes:
        id: What mutants name it by.
        text: The rule in a few words.
        modelled: A model checker has shown that without it some schedule of kills, freezes, lost
            answers and rewinds loses, doubles or strands a prompt.
    """

    id: str
    text: str
    modelled: bool = False


class Mutant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One guard less.

    Attributes:
        name: What `--only` takes.
        rule: Id of the rule that the guard serves.
        file: Path from the repository's top.
        old: Text that stands there exactly once.
        new: What takes its place.
        test: Node id of the test that must fail, without parameters to run all of them.
    """

    name: str
    rule: str
    file: str
    old: str
    new: str = ""
    test: str

    def applied(self, source: str) -> str:
        """Give the file's text without the guard.

        Raises:
            ValueError: The guard's text is not there, or stands there more than once.
        """
        found = source.count(self.old)
        if found != 1:
            raise ValueError(
                f"mutant {self.name}: its text stands {found} times in {self.file}: bring "
                "tests/mutants up to the code"
            )
        return source.replace(self.old, self.new)


class _Rules(msgspec.Struct, forbid_unknown_fields=True):
    rule: list[Rule]


class _Mutants(msgspec.Struct, forbid_unknown_fields=True):
    mutant: list[Mutant]


@cache
def rules() -> list[Rule]:
    """Give every rule."""
    text = (FOLDER / "rules.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), _Rules).rule


@cache
def mutants() -> list[Mutant]:
    """Give every mutant, table after table."""
    tables = sorted(path for path in FOLDER.glob("*.toml") if path.name != "rules.toml")
    return [
        mutant
        for path in tables
        for mutant in msgspec.convert(
            tomllib.loads(path.read_text(encoding="utf-8")), _Mutants
        ).mutant
    ]


@cache
def functions_of(file: str) -> frozenset[str]:
    """Name the test functions of a module, `Class::test` for methods."""
    tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}::{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }
        elif isinstance(node, ast.Assign):
            # A state machine of hypothesis: `TestX = Machine.TestCase`.
            found |= {
                f"{target.id}::runTest" for target in node.targets if isinstance(target, ast.Name)
            }
    return frozenset(found)
