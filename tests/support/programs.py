"""Start programs of ours as users do, in processes of their own; where it is the same, at once.

`start` and `run` are `subprocess.Popen` and `subprocess.run`. Of `python -m producer` and the like
the process is forked from one that has imported them (`tests.support.nursery`), which saves most
of what a start costs; with anything that such a process cannot have (another interpreter's
options, a `preexec_fn`) it is started as any other program.
HEADRACE_TEST_EXEC=1 starts all of them so.
"""

import array
import atexit
import ctypes
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from common import leases

REPOSITORY = Path(__file__).resolve().parents[2]
MODULES = frozenset({"producer", "workers", "workers.cli", "workers.simulator"})
ALWAYS_EXEC = "HEADRACE_TEST_EXEC"

_READ_AT_IMPORT = leases.ENVIRONMENT
_READ_AT_THE_START = ("PYTHON", "HEADRACE_TEST_", "LD_", "LC_", "LANG", "MALLOC_", "TZ")
_HARMLESS = {"PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"}
_AS_IMPORTED = dict(os.environ)
"""Before any test could change it for itself."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def start(
    command: Sequence[str | Path], *, dies_with_us: bool = False, **options: Any
) -> "subprocess.Popen[Any]":
    """Start a program (see `subprocess.Popen`).

    Args:
        command: The program and its arguments.
        dies_with_us: A killed pytest takes it along.
        options: Of `subprocess.Popen`.
    """
    words = [str(part) for part in command]
    if _can_fork(words, options):
        return _Forked(words, dies_with_us=dies_with_us, **options)
    if dies_with_us:
        options["preexec_fn"] = die_with_parent
    return _start_anew(words, **options)


def run(
    command: Sequence[str | Path],
    *,
    input: bytes | str | None = None,  # noqa: A002 - as `subprocess.run` has it
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> "subprocess.CompletedProcess[Any]":
    """Run a program to its end (see `subprocess.run`)."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start(command, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


_start_anew: "Callable[..., subprocess.Popen[Any]]" = subprocess.Popen


def die_with_parent() -> None:
    """Be killed when the process that started this one ends; for `preexec_fn`."""
    # A killed pytest must not leave servers behind. Only Linux can promise that.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _can_fork(words: Sequence[str], options: Mapping[str, Any]) -> bool:
    if sys.platform != "linux" or os.environ.get(ALWAYS_EXEC):
        return False
    if words[:2] != [sys.executable, "-m"] or len(words) < 3 or words[2] not in MODULES:
        return False
    known = {"cwd", "env", "stdin", "stdout", "stderr", "text", "start_new_session"}
    return not options.keys() - known and _Nursery.of(options.get("env")).knows(options.get("env"))


class _Nursery:
    """The process that forks: one for each process that runs tests and each length of leases."""

    _born: ClassVar[dict[tuple[int, str], "_Nursery"]] = {}
    _lock = threading.RLock()

    @classmethod
    def of(cls, environment: Mapping[str, str] | None) -> "_Nursery":
        """Find the one whose modules read these settings as they were imported."""
        wanted = os.environ if environment is None else environment
        key = os.getpid(), wanted.get(_READ_AT_IMPORT, "")
        with cls._lock:
            return cls._born.get(key) or cls._born.setdefault(key, cls(*key))

    def __init__(self, pid: int, read_at_import: str) -> None:
        self._pid = pid
        self._environment = {**_AS_IMPORTED, _READ_AT_IMPORT: read_at_import}
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            # It ends when nobody holds the other end any more.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.nursery"],
                stdin=its.fileno(),
                cwd=REPOSITORY,
                env=self._environment,
            )
        self._control = ours
        self._libc = ctypes.CDLL(None)
        atexit.register(self._close)

    def knows(self, environment: Mapping[str, str] | None) -> bool:
        """Whether what it has imported is the same in that environment."""
        wanted = os.environ if environment is None else environment
        for name in wanted.keys() | self._environment.keys():
            if not name.startswith(_READ_AT_THE_START) or name in _HARMLESS:
                continue
            if name == "PYTHONPATH" and wanted.get(name, str(REPOSITORY)) == str(REPOSITORY):
                continue
            if wanted.get(name) != self._environment.get(name):
                return False
        return True

    def fork(self, order: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Have a child of this process that carries out an order; returns its process id."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        with self._lock:
            # For this moment alone: what others orphan is not ours to bury.
            self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                self._control.sendmsg([json.dumps(order).encode()], [rights])
                told = self._control.recv(64)
            finally:
                self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not told:
            raise RuntimeError(f"the nursery has ended: {self._process.wait()}")
        return int(told)

    def _close(self) -> None:
        if self._pid == os.getpid():
            self._control.close()
            self._process.wait()


class _Forked(subprocess.Popen[Any]):
    """A process of the nursery, in all else as `subprocess` has it."""

    def __init__(self, words: Sequence[str], *, dies_with_us: bool, **options: Any) -> None:
        self._dies_with_us = dies_with_us
        super().__init__(words, **options)

    # Nobody else's business, and yet the one place where `Popen` starts what it stands for.
    @override
    def _execute_child(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        given = _EXECUTE_CHILD.bind(self, *args, **kwargs).arguments
        pipes = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        words, env = given["args"], given["env"]
        order = {
            "module": words[2],
            "arguments": words[3:],
            "env": dict(os.environ if env is None else env),
            "folder": os.path.realpath(given["cwd"] or Path.cwd()),
            "parent": os.getpid(),
            "session": given["start_new_session"],
            "dies_with_parent": self._dies_with_us,
        }
        try:
            self.pid = _Nursery.of(env).fork(
                order, [own if pipe == -1 else pipe for own, pipe in enumerate(pipes)]
            )
            self._child_created = True
        finally:
            names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(given[name] for name in names))  # type: ignore[attr-defined]


_EXECUTE_CHILD = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
