"""Write down every request, so that a test can count from the server's side.

JSON lines, one object each:

    {"e":"start","port":30000,"pid":71,"t":1.5,"cap":72}
    {"e":"begin","port":30000,"rid":"…","hash":"…","n":17,"t":1.6,"open":3}
    {"e":"end","port":30000,"rid":"…","hash":"…","n":17,"t":2.1,"outcome":"stop"}

`t` is Unix time in seconds, `n` counts the requests of a process, `open` is how many requests were
open at that port with this one. Outcomes: `stop`, `length`, `abort` (as finish reasons),
`http_NNN` (an error answer), `disconnected` (the client left), `died` (the server did), or a
fault's kind.

An `end` line is written before its answer is sent, by the same call that writes what is waiting;
`begin` lines wait for the end of the loop's round at most.
"""

import asyncio
import os
import time
from typing import NamedTuple

import msgspec


class Ident(NamedTuple):
    """Which request it is.

    Attributes:
        rid: As sent, or made for it.
        digest: Its `request_hash`.
        number: Its turn among the requests of the process.
    """

    rid: str
    digest: str
    number: int


class Journal:
    """The log of one process; many may append to one file."""

    def __init__(self, path: str | None) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = None if path is None else os.open(path, flags, 0o644)
        self._waiting: list[str] = []
        self._scheduled = False

    def start(self, *, port: int, cap: int) -> None:
        """A server listens: what was open at this port before is gone."""
        if self._file is not None:
            self._waiting.append(
                f'{{"e":"start","port":{port},"pid":{os.getpid()},"t":{time.time():.6f}'
                f',"cap":{cap}}}\n'
            )
            self.flush()

    def begin(self, port: int, ident: Ident, *, open_count: int) -> None:
        """A request has arrived whole."""
        if self._file is None:
            return
        rid, digest, number = ident
        self._waiting.append(
            f'{{"e":"begin","port":{port},"rid":{_quoted(rid)},"hash":"{digest}","n":{number}'
            f',"t":{time.time():.6f},"open":{open_count}}}\n'
        )
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush_round)

    def end(self, port: int, ident: Ident, *, outcome: str) -> None:
        """A request is about to be answered, or has lost its client; on disk on return."""
        if self._file is None:
            return
        rid, digest, number = ident
        self._waiting.append(
            f'{{"e":"end","port":{port},"rid":{_quoted(rid)},"hash":"{digest}","n":{number}'
            f',"t":{time.time():.6f},"outcome":"{outcome}"}}\n'
        )
        self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self._file is not None and self._waiting:
            os.write(self._file, "".join(self._waiting).encode())
            self._waiting.clear()

    def _flush_round(self) -> None:
        self._scheduled = False
        self.flush()

    def close(self) -> None:
        """Write what waits and close the file."""
        self.flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _quoted(text: str) -> str:
    if text.isalnum() and text.isascii():
        return f'"{text}"'
    return msgspec.json.encode(text).decode()
