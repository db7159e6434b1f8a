"""Set up logs: on stderr, one line a fact, never a prompt, an answer or a password."""

import logging
import sys
from types import TracebackType

from typing_extensions import override

from common.harmless import harmless
from common.secrecy import without_secrets

LONGEST_LINE_BYTES = 3_000

_Raised = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class _Bounded(logging.Formatter):
    """Keeps a fact to one short line: a server's text in an error can be as long as its prompt.

    Line breaks and what a terminal would act on are shown as numbers, so that no text of others
    can pass for a line of ours.
    """

    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format one record, without its traceback."""
        record.message = harmless(without_secrets(record.message)).replace("\n", "\\x0a")
        return bounded(super().formatMessage(record))

    @override
    def formatException(self, ei: _Raised) -> str:
        """Format a traceback, each of its lines bounded too."""
        lines = without_secrets(super().formatException(ei)).splitlines()
        return "\n".join(bounded(harmless(line)) for line in lines)


def bounded(text: str, most_bytes: int = LONGEST_LINE_BYTES) -> str:
    """Cut a line to so many bytes, and say how long it was."""
    data = text.encode(errors="backslashreplace")
    if len(data) <= most_bytes:
        return text
    return data[:most_bytes].decode(errors="ignore") + f" … ({len(data)} bytes)"


def set_up_logs(level: str = "INFO") -> None:
    """Log to stderr from `level` on; libraries only from warnings on.

    Args:
        level: DEBUG, INFO, WARNING or ERROR.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Bounded("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    # A full disk under the log ends nothing, and needs no traceback for each line.
    logging.raiseExceptions = False
    for name in ("common", "producer", "workers", "headrace"):
        logging.getLogger(name).setLevel(level)


def bound_other_logs() -> None:
    """Let the warnings of a program without logs be as harmless: those of libraries, and ours."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Bounded("%(message)s"))
