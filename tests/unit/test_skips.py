import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

SKIPS_IN_EVERY_WAY = """
import pytest
from tests.support.skips import skip_cannot_run

def test_runs(): pass

def test_cannot_run_here(): skip_cannot_run("no such machine")

@pytest.mark.xfail(strict=True, reason="known")
def test_fails_as_expected(): assert False

def test_skips(): pytest.skip("no server")

@pytest.mark.skip
def test_is_marked(): pass

@pytest.fixture
def absent(): pytest.skip("no fixture")

def test_has_a_skipping_fixture(absent): pass
"""
SKIPS_AS_A_MODULE = "import pytest; pytest.importorskip('no_such_module')"


def pytest_in(folder: Path, *, ci: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on a folder that has our conftest, as a session of its own."""
    shutil.copy(REPOSITORY / "tests/conftest.py", folder / "conftest.py")
    environment = {**os.environ, "CI": ci, "PYTHONPATH": str(REPOSITORY)}
    # Nothing of this repository's settings, and no random order.
    plain = ("-c", os.devnull, "--rootdir", str(folder), "-p", "no:randomly")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plain, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("ci", "status", "counts"),
    [
        # A mark and a fixture skip while a test is set up, where a failure is called an error.
        ("true", 1, "1 failed, 1 passed, 1 skipped, 1 xfailed, 2 errors"),
        ("", 0, "1 passed, 4 skipped, 1 xfailed"),
    ],
)
def test_only_what_cannot_run_here_may_be_skipped_in_ci(
    tmp_path: Path, ci: str, status: int, counts: str
) -> None:
    (tmp_path / "test_ways.py").write_text(SKIPS_IN_EVERY_WAY)

    session = pytest_in(tmp_path, ci=ci)

    assert counts in session.stdout.splitlines()[-1]
    assert session.returncode == status


def test_a_module_that_skips_itself_fails_in_ci(tmp_path: Path) -> None:
    (tmp_path / "test_module.py").write_text(SKIPS_AS_A_MODULE)

    session = pytest_in(tmp_path, ci="true")

    assert "no_such_module" in session.stdout
    assert "1 error" in session.stdout.splitlines()[-1]
