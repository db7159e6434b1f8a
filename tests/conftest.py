"""What every test gets: asyncio, the folder of cases, and a CI that takes no quiet skip."""

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.cases.table import TESTS
from tests.support import programs
from tests.support.once import read_once
from tests.support.skips import refuse_quiet_skip, skip_cannot_run
from workers.simulator import launch

REPOSITORY = Path(__file__).parents[1]
IN_CI = os.environ.get("CI") == "true"

# A shared machine is slow by spells; how long one example took says nothing about the code.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")


launch.start_program = programs.start
read_once()

# Whoever calls the suite under nohup ignores this signal, and so would all that tests start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The one loop that production runs on."""
    return "asyncio"


@pytest.fixture(scope="session")
def cases_folder() -> Path:
    """The recorded faults, which lie beside the checkout and not in it."""
    folder = (REPOSITORY / os.environ.get("CASES", "../shared/cases")).resolve()
    if not folder.is_dir():
        skip_cannot_run(f"no folder of cases at {folder} (set CASES)")
    return folder


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that the table of cases names, before a `-m` picks among all."""
    for item in items:
        if item.nodeid.partition("[")[0] in TESTS or item.path.parent.name == "cases":
            item.add_marker(pytest.mark.cases)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """See each test's report last, when it is known whether a failure was expected."""
    report = yield
    if IN_CI:
        refuse_quiet_skip(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """See the skips of whole modules too: they never become tests."""
    report = yield
    if IN_CI:
        refuse_quiet_skip(report)
    return report
