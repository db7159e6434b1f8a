"""The table of cases holds what it says: every case of ours, and only tests that exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases.table import CASES, TESTS

ROOT = Path(__file__).parents[2]
INPUT_TO_QUEUE = [
    *range(1, 60),
    *range(61, 70),
    *range(71, 97),
    98,
]
"""Numbers of the cases that this table answers for, as far as they exist."""


def test_every_case_has_its_tests(cases_folder: Path) -> None:
    text = (cases_folder / "cases.md").read_text()
    known = set(re.findall(r"^### (B\d+)\b", text, re.MULTILINE))

    assert set(CASES) == {f"B{number:02}" for number in INPUT_TO_QUEUE} & known
    assert all(CASES.values())


@pytest.fixture(scope="module")
def collected() -> set[str]:
    """Node ids, without parameters, of what the files of the table hold under the mark `cases`."""
    files = sorted({test.partition("::")[0] for test in TESTS})
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "cases", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,  # on a busy machine
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return {line.partition("[")[0] for line in ended.stdout.splitlines() if "::" in line}


def test_each_test_of_the_table_exists_and_make_cases_runs_it(collected: set[str]) -> None:
    assert TESTS - collected == set()


def test_no_test_that_names_a_case_of_ours_is_missing_from_the_table(collected: set[str]) -> None:
    named = {
        (case, test)
        for test in collected
        for case in re.findall(r"b(\d\d)(?=_)", test.rpartition("::")[2])
        if f"B{case}" in CASES
    }

    assert [test for case, test in sorted(named) if test not in CASES[f"B{case}"]] == []
