"""What may stand in the repository: nothing of one machine, no secret, and pins with hashes."""

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import REPOSITORY
from tests.support.skips import skip_cannot_run

TOP_LEVEL = re.compile(
    r"pyproject\.toml|producer|workers|common|tests|deploy|bench|(README|CHANGELOG|CONTRIBUTING)\.md"
    r"|Makefile|requirements[\w.-]*\.txt|\.ci|\.gitignore|\.gitattributes"
)
FORBIDDEN = {
    "a registry's host": r"(pypi|pythonhosted|npmjs|debian|ubuntu|crates)\.(org|com|net|io)",
    "a path of one machine": r"(?<![A-Za-z0-9_.])/(work|farm|root)/",
    "an AWS access key": r"\b(AKIA|ASIA)[0-9A-Z]{16}\b",
    "an AWS secret key": r"(?i)secret_access_key\W{1,4}[A-Za-z0-9/+]{40}\b",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "an API token": r"\b(hf_|gh[pousr]_|github_pat_|sk-|xox[abprs]-)[A-Za-z0-9_-]{20,}",
    "a signed token": r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}",
    "a password in a URL": r"://[^/\s:@\"'`]*:[^/\s:@\"'`]+@",
}
# A made-up secret says so, and a placeholder holds the sign of one.
MADE_UP = re.compile(r"(?i)example|secret|passw|fake|dummy|placeholder|\.\.\.|[{<$…]")
# URLs and options through which a requirements file would name where it was made.
SOURCES = re.compile(
    r"(?i)https?:|file:|^\s*(-[ief]|--(extra-)?index-url|--find-links|--editable)\b"
)


@cache
def files() -> list[Path]:
    """The files that git tracks or would add, so that a slip shows before its commit."""
    if shutil.which("git") is None or not (REPOSITORY / ".git").exists():
        skip_cannot_run("this is no git checkout, or git is not installed")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    names = sorted(set(filter(None, listed.stdout.split("\0"))))
    return [REPOSITORY / name for name in names if (REPOSITORY / name).is_file()]


def forbidden(text: str) -> Iterator[str]:
    """What in the text may not stand there, with its line's number and never its words."""
    for number, line in enumerate(text.splitlines(), start=1):
        for what, pattern in FORBIDDEN.items():
            for hit in re.finditer(pattern, line):
                if not (what.startswith("a password") and MADE_UP.search(hit[0])):
                    yield f"{number}: {what}"


def requirements(name: str) -> dict[str, list[Requirement]]:
    """The file's entries by distribution; one may stand more than once, under other markers."""
    entries: dict[str, list[Requirement]] = {}
    for line in entry_lines(REPOSITORY / name):
        requirement = Requirement(line.split(" --hash", maxsplit=1)[0])
        entries.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return entries


def entry_lines(path: Path) -> list[str]:
    """Each entry with its hashes on one line, without comments."""
    bare = re.sub(r"(?m)(^|\s)#.*$", "", path.read_text())
    joined = re.sub(r"\s*\\\n\s*", " ", bare)
    return [line.strip() for line in joined.splitlines() if line.strip()]


def declared(*, groups: bool) -> list[Requirement]:
    """What pyproject.toml asks for: at run time, with `embedded`, and the groups or not."""
    pyproject = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    project = pyproject["project"]
    lines = project["dependencies"] + project["optional-dependencies"]["embedded"]
    if groups:
        lines += [line for group in pyproject["dependency-groups"].values() for line in group]
    return [Requirement(line) for line in lines if isinstance(line, str)]


def test_only_the_agreed_entries_stand_at_the_top() -> None:
    tops = {path.relative_to(REPOSITORY).parts[0] for path in files()}

    assert [top for top in sorted(tops) if not TOP_LEVEL.fullmatch(top)] == []


def test_no_file_holds_a_registry_host_a_path_of_one_machine_or_a_secret() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{what}"
        for path in files()
        for what in forbidden(path.read_text(errors="replace"))
    ]

    assert found == []


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("see https://" + "pypi" + ".org/simple", "a registry's host"),
        ("cd /" + "work/main", "a path of one machine"),
        ("key = " + "AKIA" + "Z" * 16, "an AWS access key"),
        ("AWS_SECRET_ACCESS_KEY=" + "a" * 40, "an AWS secret key"),
        ("-----BEGIN RSA " + "PRIVATE KEY-----", "a private key"),
        ("token: hf_" + "a" * 34, "an API token"),
        ("Bearer " + "eyJ" + "a" * 20 + ".eyJ" + "b" * 20, "a signed token"),
        ("redis://:" + "q7w8e9@10.0.0.1", "a password in a URL"),
    ],
)
def test_each_forbidden_thing_is_found(line: str, what: str) -> None:
    assert list(forbidden(f"first line\n{line}\n")) == [f"2: {what}"]


@pytest.mark.parametrize(
    "line",
    ["redis://user:secret@host:6379", "http://127.0.0.1:30000", "s3://bucket/work/x", "a/root/b"],
)
def test_a_made_up_secret_and_a_plain_address_may_stand(line: str) -> None:
    assert list(forbidden(line)) == []


@pytest.mark.parametrize(
    "name", ["requirements.txt", "requirements-runtime.txt", "requirements-rq2.txt"]
)
def test_requirements_are_pinned_with_hashes_and_name_no_index(name: str) -> None:
    path = REPOSITORY / name
    lines = entry_lines(path)
    pinned = re.compile(r"==\S+ .*--hash=sha256:[0-9a-f]{64}")

    assert lines
    assert [line for line in lines if not pinned.search(line)] == []
    assert [line for line in path.read_text().splitlines() if SOURCES.search(line)] == []


@pytest.mark.parametrize(
    ("name", "groups"), [("requirements.txt", True), ("requirements-runtime.txt", False)]
)
def test_requirements_hold_what_pyproject_asks_for(name: str, *, groups: bool) -> None:
    pins = requirements(name)

    unmet = [
        str(asked)
        for asked in declared(groups=groups)
        if not any(
            asked.specifier.contains(next(iter(pin.specifier)).version)
            for pin in pins.get(canonicalize_name(asked.name), [])
        )
    ]

    assert unmet == [], "run make lock"


def test_both_requirements_files_pin_the_same_versions() -> None:
    everything = requirements("requirements.txt")

    for name, pins in requirements("requirements-runtime.txt").items():
        assert {str(pin.specifier) for pin in pins} == {str(p.specifier) for p in everything[name]}
