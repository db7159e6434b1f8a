"""Run each mutant's test on a copy of the tree without its guard: it must fail.

    make mutants                      all of them, three at a time
    make mutants ARGS="--only finish" those whose name or rule holds `finish`
    make mutants ARGS="--list"        the rules, and what stands for each

First every named test must pass on an unchanged copy. Then: red, the test fails without the guard;
GREEN, it passes: nothing proves that the guard is needed; hung, it did not end in time; broken,
the change is no program any more, so that its failure says nothing. Exit code 1 unless all red.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import psutil

from tests.mutants.table import REPOSITORY, Mutant, mutants, rules

LIMIT_S = 240.0
TEST_LIMIT_S = 150
BASELINE_LIMIT_S = 3600.0

_NO_PROGRAM = re.compile(
    r"SyntaxError|IndentationError|NameError|UnboundLocalError|Error compiling script"
    r"|Script attempted to access nonexistent|attempt to (call|index|perform|compare|concatenate)"
)
_REASON = re.compile(r"^E {3,}(\S.*)$", re.MULTILINE)


class Ended(NamedTuple):
    """A pytest that has ended; `code` is None where it was ended."""

    code: int | None
    text: str


class Verdict(NamedTuple):
    """What became of one mutant."""

    mutant: Mutant
    word: str
    took_s: float
    why: str


class Copy:
    """A copy of the tree whose code is what its tests import.

    Args:
        folder: Where; it is made.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=REPOSITORY,
            capture_output=True,
            check=True,
        ).stdout.decode()
        for name in filter(None, listed.split("\0")):
            source, target = REPOSITORY / name, folder / name
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        (folder / ".venv").symlink_to(REPOSITORY / ".venv")
        cases = os.environ.get("CASES", "../shared/cases")
        self._env = {
            **os.environ,
            "PYTHONPATH": str(folder),
            "CASES": str((REPOSITORY / cases).resolve()),
            # A test that was left out has proved nothing.
            "CI": "true",
        }
        self._check()

    def _check(self) -> None:
        """See that it is this copy that is imported: the environment knows the tree as well."""
        code = (
            "import common, producer, workers, tests\n"
            "print(*(m.__path__[0] for m in (common, producer, workers, tests)))"
        )
        told = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.root,
            env=self._env,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        if any(Path(path).parent != self.root for path in told):
            raise RuntimeError(f"{self.root}: its tests would import {told}")

    def pytest(self, arguments: Sequence[str], *, limit_s: float) -> Ended:
        """Run tests; whatever they started ends with them."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        with subprocess.Popen(
            command,
            cwd=self.root,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            try:
                text, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                _end(process.pid)
                text, _ = process.communicate()
                return Ended(None, text)
        return Ended(process.returncode, text)

    def write(self, name: str, text: str) -> None:
        """Replace a file, and forget what was compiled of it."""
        path = self.root / name
        path.write_text(text, encoding="utf-8")
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()


def say(text: str) -> None:
    """Tell one line at once: a run takes minutes."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _end(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def judge(copy: Copy, mutant: Mutant) -> Verdict:
    """Take the guard away, run the test, and put the guard back."""
    source = (copy.root / mutant.file).read_text(encoding="utf-8")
    began_s = time.monotonic()
    copy.write(mutant.file, mutant.applied(source))
    try:
        ended = copy.pytest(
            ["-x", "-n", "0", "--timeout", str(TEST_LIMIT_S), mutant.test], limit_s=LIMIT_S
        )
    finally:
        copy.write(mutant.file, source)
    word, why = reading(ended)
    return Verdict(mutant, word, time.monotonic() - began_s, why)


def reading(ended: Ended) -> tuple[str, str]:
    """Say what a pytest's end means: a word, and the first reason that it gives. Pure."""
    reasons = _REASON.findall(ended.text)
    why = reasons[0][:110] if reasons else ended.text.strip()[-110:].replace("\n", " ")
    if ended.code is None or "Timeout (>" in ended.text:
        return "hung", why
    if ended.code == 0:
        return "GREEN", "the test passes without the guard"
    if ended.code != 1 or any(_NO_PROGRAM.search(reason) for reason in reasons):
        return "broken", why
    return "red", why


def baseline(copy: Copy, wanted: Iterable[Mutant], *, jobs: int) -> str:
    """Run every named test on the unchanged copy; returns what failed, empty as it should be."""
    tests = sorted({mutant.test for mutant in wanted})
    ended = copy.pytest(["-n", str(jobs), *tests], limit_s=BASELINE_LIMIT_S)
    return "" if ended.code == 0 else ended.text[-4000:]


def run_all(folder: Path, wanted: Sequence[Mutant], *, jobs: int, base: bool) -> list[Verdict]:
    """Judge mutants, some at a time, each worker with a copy of its own.

    Raises:
        RuntimeError: A named test fails with all guards in place.
    """
    copies = [Copy(folder / f"copy{number}") for number in range(jobs)]
    if base:
        failed = baseline(copies[0], wanted, jobs=jobs)
        if failed:
            raise RuntimeError(f"a named test fails though no guard is missing:\n{failed}")
        say(f"{len({m.test for m in wanted})} tests pass with all guards in place")
    free: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def one(mutant: Mutant) -> Verdict:
        copy = free.get()
        try:
            verdict = judge(copy, mutant)
        finally:
            free.put(copy)
        say(f"{verdict.word:7}{verdict.took_s:5.0f} s  {mutant.name:34} {verdict.why}")
        return verdict

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, wanted))


def show_rules(wanted: Sequence[Mutant]) -> None:
    """Print each rule with its mutants."""
    for rule in rules():
        mark = "●" if rule.modelled else " "
        say(f"{mark} {rule.id}: {rule.text}")
        for mutant in wanted:
            if mutant.rule == rule.id:
                say(f"      {mutant.name:34} {mutant.file}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge what is asked for; the exit code."""
    parser = argparse.ArgumentParser(prog="make mutants")
    parser.add_argument("--only", action="append", default=[], help="part of a name or rule")
    parser.add_argument("-j", "--jobs", type=int, default=3)
    parser.add_argument("--no-base", action="store_true", help="not the tests on unchanged code")
    parser.add_argument("--list", action="store_true", help="show the rules and their mutants")
    asked = parser.parse_args(arguments)
    wanted = [
        mutant
        for mutant in mutants()
        if not asked.only or any(part in f"{mutant.name} {mutant.rule}" for part in asked.only)
    ]
    if asked.list:
        show_rules(wanted)
        return 0
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headrace-mutants-") as folder:
        try:
            verdicts = run_all(Path(folder), wanted, jobs=asked.jobs, base=not asked.no_base)
        except RuntimeError as error:
            say(str(error))
            return 1
    words = Counter(verdict.word for verdict in verdicts)
    for verdict in verdicts:
        if verdict.word != "red":
            say(f"{verdict.word}: {verdict.mutant.name}: {verdict.mutant.test}")
    told = ", ".join(f"{count} {word}" for word, count in sorted(words.items()))
    say(f"{len(verdicts)} mutants: {told}; {time.monotonic() - began_s:.0f} s")
    return int(words["red"] != len(verdicts))
