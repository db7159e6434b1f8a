"""Set up logs: on stderr, one line a fact, never a prompt, an answer or a password."""

import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

from typing_extensions import override

from common.harmless import harmless
from common.secrecy import without_secrets

LONGEST_LINE_BYTES = 3_000

MINUTE_S = 60.0
MOST_ALIKE = 30
"""Lines of one kind in a minute that are written."""
MOST_KIND_CHARS = 200
MOST_KINDS = 500
"""Of the kinds that are told apart in a minute."""

_DIGITS = re.compile(r"[0-9]+")

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


class _Sparing(logging.StreamHandler[Any]):
    """Lets a kind of line through so many times a minute, then counts, and says how many.

    What goes wrong again and again (a server that flaps, a store that refuses each of a thousand
    partitions) must not fill a disk, wherever in the code it is said. Debug asks for everything.

    Args:
        stream: Where lines go.
        clock: Seconds on a clock that never goes back.
    """

    def __init__(self, stream: Any, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._began_s = clock()
        # Kind of line -> how often it came in this minute. Under the handler's lock.
        self._came: Counter[str] = Counter()

    @override
    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or count it."""
        self._tell_more()
        said = record.getMessage() if record.msg == "%s" else str(record.msg)
        kind = f"{record.levelname} {_DIGITS.sub('0', said[:MOST_KIND_CHARS])}"
        if kind not in self._came and len(self._came) >= MOST_KINDS:
            kind = f"{record.levelname} others"
        self._came[kind] += 1
        if self._came[kind] <= MOST_ALIKE or record.levelno <= logging.DEBUG:
            super().emit(record)

    @override
    def close(self) -> None:
        """Say what was counted last."""
        self._tell_more(at_once=True)
        super().close()

    def _tell_more(self, *, at_once: bool = False) -> None:
        now_s = self._clock()
        if now_s - self._began_s < MINUTE_S and not at_once:
            return
        for kind, count in self._came.items():
            if count > MOST_ALIKE and not kind.startswith("DEBUG"):
                level, _, text = kind.partition(" ")
                more = f"{count - MOST_ALIKE:,} more lines like this within a minute: {text}"
                super().emit(
                    logging.LogRecord(
                        __name__, logging.getLevelName(level), "", 0, more, None, None
                    )
                )
        self._came.clear()
        self._began_s = now_s


def set_up_logs(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Log to stderr from `level` on; libraries only from warnings on.

    Args:
        level: DEBUG, INFO, WARNING or ERROR.
        stream: In the place of stderr, where that shows something else.
    """
    handler = _Sparing(sys.stderr if stream is None else stream)
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
