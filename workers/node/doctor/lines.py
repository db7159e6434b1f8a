"""What `workers doctor` tells: one line a check. Pure."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from common.harmless import one_line
from common.secrecy import without_secrets

Level = Literal["ok", "warning", "fault"]

MOST_TEXT = 600


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One check.

    Attributes:
        part: redis, store, machine, or the server's name.
        check: A word for what was looked at.
        level: A fault keeps work from going on or loses some; a warning costs time, or will.
        text: What was found.
        advice: What to do; empty where nothing need be done.
    """

    part: str
    check: str
    level: Level
    text: str
    advice: str = ""


class Scribe:
    """Writes the lines of one part, without secrets and fit for a terminal.

    Args:
        part: See `Line`.
    """

    def __init__(self, part: str) -> None:
        self.part = part
        self.lines: list[Line] = []

    def ok(self, check: str, text: str) -> None:
        """All is well."""
        self._add(check, "ok", text, "")

    def warning(self, check: str, text: str, advice: str = "") -> None:
        """It works, and costs something."""
        self._add(check, "warning", text, advice)

    def fault(self, check: str, text: str, advice: str = "") -> None:
        """It does not work, or loses something."""
        self._add(check, "fault", text, advice)

    def failed(self, check: str, error: Exception) -> None:
        """Tell an error of ours: what is to be done stands behind its last colon or semicolon."""
        self.fault(check, str(error))

    def _add(self, check: str, level: Level, text: str, advice: str) -> None:
        self.lines.append(
            Line(
                part=self.part,
                check=check,
                level=level,
                text=one_line(without_secrets(text), MOST_TEXT),
                advice=one_line(without_secrets(advice), MOST_TEXT),
            )
        )


def summary(lines: Sequence[Line]) -> dict[str, Any]:
    """Give the one object of `--json`: ok, faults, warnings, lines."""
    faults = sum(line.level == "fault" for line in lines)
    return {
        "ok": not faults,
        "faults": faults,
        "warnings": sum(line.level == "warning" for line in lines),
        "lines": [msgspec.to_builtins(line) for line in lines],
    }
