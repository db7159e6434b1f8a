"""Read the simulator's log back: what the servers saw, whatever the clients believe.

Bound, redo and mix-ups are judged with this. Several files of several simulators may be read
together, also those of simulators that were killed: a request without an end counts as open
until its port is started again, or to the end of the log.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

# Finish reasons that make an answer a completion.
COMPLETED = frozenset({"stop", "length"})


class Line(msgspec.Struct, rename={"event": "e", "time": "t", "number": "n", "digest": "hash"}):
    """One line of the log; see `journal`."""

    event: str
    port: int
    time: float
    number: int = 0
    rid: str = ""
    digest: str = ""
    outcome: str = ""


class Served(msgspec.Struct):
    """One request as a server saw it.

    Attributes:
        port: Of the server.
        rid: As sent, or as the server made it.
        digest: Its `request_hash`.
        begin, end: Unix time in seconds; end is None when nothing tells of it.
        outcome: How it ended; empty when nothing tells.
    """

    port: int
    rid: str
    digest: str
    begin: float
    end: float | None = None
    outcome: str = ""


class Account:
    """What the log says, counted.

    Attributes:
        served: Every request, in order of arrival.
        by_hash: How many requests had this hash.
        outcomes: How many ended in this way; those that nothing tells of as an empty string.
        max_open: By port, the most requests that were open at once.
    """

    def __init__(self, lines: Iterable[Line]) -> None:
        self.served: list[Served] = []
        self.max_open: Counter[int] = Counter()
        self._read(lines)
        self.by_hash = Counter(each.digest for each in self.served)
        self.outcomes = Counter(each.outcome for each in self.served)

    @property
    def requests(self) -> int:
        """Requests in all."""
        return len(self.served)

    @property
    def repeated(self) -> list[str]:
        """Hashes with more than one request."""
        return [digest for digest, count in self.by_hash.items() if count > 1]

    @property
    def completed_again(self) -> list[str]:
        """Hashes that were answered with a completion more than once."""
        done = Counter(each.digest for each in self.served if each.outcome in COMPLETED)
        return [digest for digest, count in done.items() if count > 1]

    def mean_open(
        self, *, port: int | None = None, begin: float | None = None, end: float | None = None
    ) -> float:
        """Average the number of open requests over a window.

        Args:
            port: Only this server's; None sums over all.
            begin: Unix time; None means the first arrival.
            end: Unix time; None means the last end.

        Returns:
            Requests open at a moment of the window, on average; 0 for an empty one.
        """
        chosen = [each for each in self.served if port in {None, each.port}]
        if not chosen:
            return 0.0
        last = max(each.end or each.begin for each in chosen)
        begin = chosen[0].begin if begin is None else begin
        end = last if end is None else end
        if end <= begin:
            return 0.0
        inside = (min(each.end or last, end) - max(each.begin, begin) for each in chosen)
        return sum(span for span in inside if span > 0) / (end - begin)

    def _read(self, lines: Iterable[Line]) -> None:
        open_now: dict[int, dict[int, Served]] = {}
        for line in lines:
            port = line.port
            if line.event == "start":
                for lost in open_now.get(port, {}).values():
                    lost.end = line.time
                open_now[port] = {}
                continue
            current = open_now.setdefault(port, {})
            if line.event == "begin":
                served = Served(port, line.rid, line.digest, line.time)
                self.served.append(served)
                current[line.number] = served
                self.max_open[port] = max(self.max_open[port], len(current))
            elif line.number in current:
                ended = current.pop(line.number)
                ended.end, ended.outcome = line.time, line.outcome


def read_log(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> Account:
    """Read one or more logs and count.

    A last line that a kill cut off is left out.

    Raises:
        OSError: If a file cannot be read.
        msgspec.DecodeError: If a line is not of the log.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    lines = [line for path in paths for line in _lines(Path(path))]
    # Appended by several processes, a file is nearly in order, several files are not.
    lines.sort(key=lambda line: line.time)
    return Account(lines)


def _lines(path: Path) -> Iterator[Line]:
    decode = msgspec.json.Decoder(Line).decode
    with path.open("rb") as file:
        for raw in file:
            if raw.endswith(b"\n"):
                yield decode(raw)
