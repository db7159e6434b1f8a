"""The processes of one server: started, found again, measured, ended whole.

    session      the server leads one of its own: Ctrl-C in a terminal does not reach it
    mark         a variable in the environment of its processes, unlike that of any other start: by
                 it and the session they are found though the first one has died, and nobody
                 else's are
    output       a pipe to `log_writer`, a process of its own that lives as long as they do

When its supervisor is killed the server goes on, and the next supervisor takes it over: loading a
model takes minutes, and the worker group beside it loses nothing. Rejected: a server that dies
with its supervisor, which costs those minutes and all that is in flight for nothing.
"""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from workers.lives import process_start
from workers.supervisor import log_writer
from workers.supervisor.records import Process

MARK = "HEADRACE_SERVER_MARK"
TITLE = "sglang"

KILL_LIMIT_S = 20.0
LOOK_S = 0.05
WRITER_LIMIT_S = DYING_LIMIT_S = 5.0


class LogRoom(msgspec.Struct, frozen=True):
    """How much of a server's output is kept.

    Attributes:
        most_bytes: Of one file.
        files: Older ones beside the newest.
    """

    most_bytes: int = 64 << 20
    files: int = 5


class ServerProcesses:
    """One start of a server, by whichever supervisor it was.

    Attributes:
        first: Its first process.
        mark: Of all its processes.
        writer: The process that writes its log.
    """

    def __init__(
        self,
        first: Process,
        mark: str,
        writer: Process | None,
        *,
        child: "subprocess.Popen[bytes] | None" = None,
        output: int | None = None,
    ) -> None:
        self.first = first
        self.mark = mark
        self.writer = writer
        self._child = child
        self._writer_child: subprocess.Popen[bytes] | None = None
        self._output = output

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        mark: str,
        log: Path,
        room: LogRoom,
        secret: str,
        heading: str,
    ) -> "ServerProcesses":
        """Start a server.

        Args:
            command: Its launch line.
            env: Its environment, whole.
            mark: Unlike that of any other start.
            log: Where its output goes.
            room: How much of that is kept.
            secret: What is not written there.
            heading: A line written there first.

        Raises:
            OSError: It cannot be started.
        """
        reads, writes = os.pipe()
        try:
            writer = _start_writer(reads, log, room, secret)
            os.write(writes, f"{heading}\n".encode())
            child = subprocess.Popen(  # noqa: S603 - what the user told us to launch
                list(command),
                env={**env, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=writes,
                stderr=writes,
                start_new_session=True,
            )
        except BaseException:
            os.close(reads)
            raise
        finally:
            os.close(writes)
        made = cls(_named(child.pid), mark, _named(writer.pid), child=child, output=reads)
        made._writer_child = writer
        return made

    @classmethod
    def found(cls, first: Process | None, mark: str, writer: Process | None) -> "ServerProcesses":
        """Find a start of an earlier supervisor.

        Args:
            first: None where that one ended before it knew it: then it is looked for by the mark.
            mark: Of its processes.
            writer: Of its log.
        """
        made = cls(first or Process(0, ""), mark, writer)
        if first is None:
            leads = [each.pid for each in made.members() if os.getsid(each.pid) == each.pid]
            made.first = _named(leads[0]) if leads else made.first
        return made

    @classmethod
    def unrecorded(cls, family: str) -> "ServerProcesses | None":
        """Find a start of which no record tells; None when there is none.

        Args:
            family: Of its mark: see `new_mark`.
        """
        for pid in psutil.pids():
            with suppress(psutil.Error, OSError):
                mark = psutil.Process(pid).environ().get(MARK, "")
                if mark.startswith(f"{family}-") and process_start(pid):
                    return cls.found(None, mark, None)
        return None

    @property
    def alive(self) -> bool:
        """Whether its first process runs."""
        if self._child is not None:
            return self._child.poll() is None
        return self.first.alive

    @property
    def exit_code(self) -> int | None:
        """How its first process ended: a signal's number is negative; None where nobody knows."""
        return self._child.returncode if self._child is not None else None

    def drain(self) -> None:
        """Ask it to end when what is open has ended."""
        self._send(signal.SIGTERM)

    def end(self) -> list[int]:
        """End all its processes at once and wait for that; list those that the kernel keeps."""
        deadline_s = time.monotonic() + KILL_LIMIT_S
        left = list(self.members())
        while left and time.monotonic() < deadline_s:
            for process in left:
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    process.kill()
            self._reap(left)
            time.sleep(LOOK_S)
            left = list(self.members())
        self._close()
        return [process.pid for process in left]

    def rss_bytes(self) -> int:
        """Say how much memory all its processes have, what they share counted with each."""
        total = 0
        for process in self.members():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_info().rss
        return total

    def members(self) -> Iterator[psutil.Process]:
        """List its processes that run, its log's writer not among them."""
        own = os.getpid()
        for pid in psutil.pids():
            if pid == own or not process_start(pid):
                continue
            with suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                if self._is_ours(process):
                    yield process

    def keep_writer(self, log: Path, room: LogRoom, secret: str) -> bool:
        """Start the log's writer again where it has died; say whether it had."""
        if self._writer_child is not None:
            alive = self._writer_child.poll() is None
        else:
            alive = self.writer is not None and self.writer.alive
        if alive or not self.alive:
            return False
        if self._output is None:
            # Whoever opens a pipe by one of its ends gets the end that he asks for.
            self._output = os.open(f"/proc/{self.first.pid}/fd/1", os.O_RDONLY | os.O_CLOEXEC)
        self._writer_child = _start_writer(self._output, log, room, secret)
        self.writer = _named(self._writer_child.pid)
        return True

    def _is_ours(self, process: psutil.Process) -> bool:
        if process.uids().real != os.getuid():
            return False
        if process.environ().get(MARK) == self.mark:
            return True
        # SGLang's children write their titles over their environment.
        titled = next(iter(process.cmdline()), "").startswith(TITLE)
        return titled and os.getsid(process.pid) == self.first.pid

    def _send(self, number: int) -> None:
        if self.alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.first.pid, number)

    def _reap(self, killed: Sequence[psutil.Process]) -> None:
        """Take note of the ends of our children; as PID 1 of a container all orphans are ours."""
        if self._child is not None:
            self._child.poll()
        for process in killed:
            if self._child is None or process.pid != self._child.pid:
                with suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)

    def _close(self) -> None:
        """Let the writer write what is left in the pipe."""
        if self._child is not None:
            with suppress(subprocess.TimeoutExpired):
                # It is dying: a machine under load takes its time to take a large process down.
                self._child.wait(DYING_LIMIT_S)
        if self._output is not None:
            os.close(self._output)
            self._output = None
        if self._writer_child is not None:
            with suppress(subprocess.TimeoutExpired):
                self._writer_child.wait(WRITER_LIMIT_S)
            self._writer_child.poll()


def mark_family(state_dir: Path, name: str) -> str:
    """Say how all marks of one server begin, by where its records lie and its name."""
    return hashlib.sha256(f"{state_dir.resolve()}\0{name}".encode()).hexdigest()[:16]


def new_mark(family: str) -> str:
    """Make the mark of a start."""
    return f"{family}-{os.urandom(8).hex()}"


def _start_writer(reads: int, log: Path, room: LogRoom, secret: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(  # noqa: S603 - our own file
        [
            *(sys.executable, "-I", "-S", str(Path(log_writer.__file__).resolve())),
            *(str(log.resolve()), str(room.most_bytes), str(room.files)),
        ],
        env={"HEADRACE_API_KEY": secret},
        stdin=reads,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )


def _named(pid: int) -> Process:
    return Process(pid, process_start(pid))
