"""A bar with a rate for what takes longer than a second, nothing for what does not."""

import pytest

from producer import meter
from producer.meter import Meter


def test_what_is_quick_shows_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with Meter("reading", 10, shown=True) as bar:
        bar.show(1_000)

    assert capfd.readouterr().err == ""


def test_what_takes_long_shows_its_rate(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "_QUIET_S", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")

    with Meter("reading", 10, shown=True) as bar:
        bar.show(1_000, part=5)

    told = capfd.readouterr().err
    assert "reading" in told
    assert "1,000 rows" in told


def test_without_a_terminal_nothing_is_shown(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "_QUIET_S", 0.0)

    with Meter("reading") as bar:
        bar.show(1_000)

    assert capfd.readouterr().err == ""
