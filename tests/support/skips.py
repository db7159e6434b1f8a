"""When a test may be left out: where the machine cannot run it, and never quietly in CI."""

from typing import NoReturn

import pytest

# The one beginning of a skip's reason that CI accepts.
CANNOT_RUN = "cannot run here: "


def skip_cannot_run(reason: str) -> NoReturn:
    """Leave the test out because this machine lacks what it needs and cannot be given it.

    Not for what `.ci/run` or `make install` brings: that must be there, so let the test fail.
    """
    pytest.skip(f"{CANNOT_RUN}{reason}")


def refuse_quiet_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure, unless its reason says that it cannot run here."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = _reason(report)
    if reason.startswith(CANNOT_RUN):
        return
    report.outcome = "failed"
    report.longrepr = (
        f"{report.nodeid} was skipped in CI: {reason}\n"
        "A skip hides what this machine could have tested. Bring what it needs, "
        "or call tests.support.skips.skip_cannot_run where that is impossible."
    )


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The words given to skip(): pytest keeps (file, line, words)."""
    where_and_why = report.longrepr
    words = where_and_why[2] if isinstance(where_and_why, tuple) else str(where_and_why)
    return words.removeprefix("Skipped: ")
