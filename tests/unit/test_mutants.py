"""The table of mutants fits the code: `make mutants` can prove that each guard is needed."""

import ast
from collections import Counter

import pytest

from tests.mutants.run import Ended, reading
from tests.mutants.table import REPOSITORY, Mutant, functions_of, mutants, rules

MODELLED = 17
"""Rules of the protocol that a model checker has shown necessary."""


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in mutants()}))
def test_each_mutant_takes_one_place_of_the_code_and_leaves_a_program(file: str) -> None:
    source = (REPOSITORY / file).read_text(encoding="utf-8")
    for mutant in mutants():
        if mutant.file == file:
            changed = mutant.applied(source)
            assert changed != source, mutant.name
            if file.endswith(".py"):
                ast.parse(changed)


def test_each_mutant_names_a_test_that_exists_and_a_rule() -> None:
    known = {rule.id for rule in rules()}
    wrong = [
        mutant.name
        for mutant in mutants()
        if mutant.test.partition("::")[2] not in functions_of(mutant.test.partition("::")[0])
        or mutant.rule not in known
    ]
    assert wrong == []


def test_each_rule_has_a_mutant() -> None:
    assert {mutant.rule for mutant in mutants()} == {rule.id for rule in rules()}
    assert sum(rule.modelled for rule in rules()) == MODELLED


def test_no_name_stands_twice() -> None:
    for names in ([mutant.name for mutant in mutants()], [rule.id for rule in rules()]):
        assert max(Counter(names).values()) == 1


def test_a_guard_that_has_gone_is_told() -> None:
    mutant = Mutant(name="x", rule="finish", file="f", old="a", test="t")
    assert mutant.applied("bab") == "bb"
    for source in ("b", "aa"):
        with pytest.raises(ValueError, match=r"stands \d times"):
            mutant.applied(source)


@pytest.mark.parametrize(
    ("code", "text", "word"),
    [
        (1, "E       assert 1 == 2\n1 failed", "red"),
        (0, "1 passed", "GREEN"),
        (None, "", "hung"),
        (1, "E   Failed: Timeout (>150.0s) from pytest-timeout.", "hung"),
        (1, "E   NameError: name 'x' is not defined", "broken"),
        (1, "E   redis.exceptions.ResponseError: Error compiling script (new function)", "broken"),
        (2, "interrupted", "broken"),
        (4, "ERROR: not found: tests/x.py", "broken"),
        (5, "no tests ran", "broken"),
    ],
)
def test_only_a_test_that_fails_for_the_guard_is_red(
    code: int | None, text: str, word: str
) -> None:
    assert reading(Ended(code, text))[0] == word
