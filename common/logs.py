"""Set up logs: on stderr, one line a fact, never a prompt, an answer or a password."""

import logging
import sys

from typing_extensions import override

LONGEST_LINE_CHARS = 2_000


class _Bounded(logging.Formatter):
    """Cuts what would fill a disk: a server's text in an error can be as long as its prompt."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        """Format one record as at most `LONGEST_LINE_CHARS` characters."""
        text = super().format(record)
        if len(text) <= LONGEST_LINE_CHARS:
            return text
        return text[:LONGEST_LINE_CHARS] + f" … ({len(text)} characters)"


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
    for name in ("common", "producer", "workers", "headrace"):
        logging.getLogger(name).setLevel(level)
