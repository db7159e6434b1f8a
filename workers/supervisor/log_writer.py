"""Write a server's output into a bounded log: `python -I -S log_writer.py PATH BYTES FILES`.

A process of its own between the server and its log, so that a log can be turned over without a
line lost, and so that the server depends on nobody: when its supervisor is killed, this goes on
until the last process that can write to the pipe has ended. It never stops reading. What a full
disk does not take is dropped and counted, since a server that waits for its log serves nothing.

The key of the servers (HEADRACE_API_KEY) is taken out: SGLang writes all its arguments there.
Only Python's own library is used, so that it starts in milliseconds and holds 10 MB.
"""

import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path

READ_BYTES = 1 << 16
LONGEST_LINE_BYTES = 1 << 18
"""A longer line is written in parts."""

FLUSH_S = 0.5
"""For so long the end of a line is awaited: a bar of progress has none."""


class Log:
    """The log and those before it.

    Args:
        path: Where the newest lines go; older ones in PATH.1, PATH.2 …
        most_bytes: Of one file.
        files: How many older ones are kept.
        secret: What is written nowhere; empty for nothing.
    """

    def __init__(self, path: Path, *, most_bytes: int, files: int, secret: bytes = b"") -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._files = files
        self._secret = secret
        self._rest = b""
        self._lost_bytes = 0
        self._descriptor = -1
        self._bytes = 0

    def take(self, data: bytes) -> None:
        """Write the whole lines in what has come, and keep the rest."""
        data = self._rest + data
        end = data.rfind(b"\n") + 1
        if not end and len(data) > LONGEST_LINE_BYTES:
            end = len(data)
        self._rest = data[end:]
        self._write(data[:end])

    def flush(self) -> None:
        """Write what has no end of line yet."""
        rest, self._rest = self._rest, b""
        self._write(rest)

    def _write(self, data: bytes) -> None:
        if not data:
            return
        if self._secret:
            data = data.replace(self._secret, "…".encode())
        try:
            if self._lost_bytes:
                lost = f"[headrace] {self._lost_bytes} bytes of this log are lost: no room\n"
                self._put(lost.encode())
                self._lost_bytes = 0
            self._put(data)
        except OSError:
            self._lost_bytes += len(data)

    def _put(self, data: bytes) -> None:
        self._open()
        if self._bytes and self._bytes + len(data) > self._most_bytes:
            self._turn_over()
        while data:
            written = os.write(self._descriptor, data)
            self._bytes += written
            data = data[written:]

    def _open(self) -> None:
        if self._descriptor >= 0:
            if os.fstat(self._descriptor).st_nlink:
                return
            os.close(self._descriptor)  # somebody has removed it
            self._descriptor = -1
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(
            self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
        )
        self._bytes = os.fstat(self._descriptor).st_size

    def _turn_over(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1
        with suppress(OSError):
            for number in range(self._files, 0, -1):
                older = self._numbered(number - 1) if number > 1 else self._path
                if older.exists():
                    older.replace(self._numbered(number))
            if not self._files:
                self._path.unlink()
        self._open()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def main() -> None:
    """Write until all who can write to stdin have ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    path, most_bytes, files = sys.argv[1:4]
    secret = os.environ.get("HEADRACE_API_KEY", "").encode(errors="surrogateescape")
    log = Log(Path(path), most_bytes=int(most_bytes), files=int(files), secret=secret)
    while True:
        if not select.select([0], [], [], FLUSH_S)[0]:
            log.flush()
            continue
        data = os.read(0, READ_BYTES)
        if not data:
            break
        log.take(data)
    log.flush()


if __name__ == "__main__":
    main()
