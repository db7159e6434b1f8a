"""What the servers saw, read while it is written: open requests now, all requests at the end."""

from collections import deque
from pathlib import Path

import msgspec

from workers.simulator.log import Line, Served

PROBE = "headrace-probe"


class ServerLog:
    """The log of one simulated server, over all its lives; probes are left out.

    Attributes:
        served: Every request, in order of arrival.
        open: Those that are open in the present life, by number.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""
        self._decode = msgspec.json.Decoder(Line).decode
        self.served: list[Served] = []
        self.open: dict[int, Served] = {}
        self._ended: deque[Served] = deque(maxlen=5_000)

    def read(self) -> None:
        """Take in what was written since the last time."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = self._rest + file.read()
            self._offset = file.tell()
        *lines, self._rest = data.split(b"\n")
        for line in lines:
            # A kill may have cut a line off; the next life's first line then follows on it.
            start = line.rfind(b'{"e":"start"')
            self._take(self._decode(line[start:] if start > 0 else line))

    def at_risk(self, since: float) -> frozenset[str]:
        """Give the digests of what is open, or has ended since then (Unix time)."""
        self.read()
        recent = {each.digest for each in self._ended if (each.end or 0.0) >= since}
        return frozenset(recent | {each.digest for each in self.open.values()})

    def _take(self, line: Line) -> None:
        if line.event == "start":
            for lost in self.open.values():
                lost.end = line.time
            self.open.clear()
        elif line.event == "begin" and not line.rid.startswith(PROBE):
            served = Served(line.port, line.rid, line.digest, line.time)
            self.served.append(served)
            self.open[line.number] = served
        elif line.number in self.open:
            ended = self.open.pop(line.number)
            ended.end, ended.outcome = line.time, line.outcome
            self._ended.append(ended)
