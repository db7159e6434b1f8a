"""What `workers up` writes down of its node, and that there is only one of it.

STATE_DIR/up@host.json    how the parts are; replaced whenever something changes
STATE_DIR/up@host.lock    held by the process that runs, as long as it lives
/tmp/headrace-UID/NAME    likewise for each GPU, whatever the state directory
"""

import fcntl
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from common.errors import BackendError, ConflictError, UsageError
from common.replacing import replace_file
from workers.lives import process_start


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One part as the table shows it.

    Attributes:
        name: `redis`, `server gpu0`, `worker group gpu0`, `sink`.
        pid: None while it has no process of ours.
        state: One word of its own (ready, draining, …), or starting, restarting, failed, ended.
        since: Seconds since the epoch: when it came to this state.
        restarts: How often it was started again.
        says: What there is to know, for people.
        log: Where it says more; empty where it has none of ours.
    """

    name: str
    pid: int | None = None
    state: str = "starting"
    since: float = 0.0
    restarts: int = 0
    says: str = ""
    log: str = ""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The node.

    Attributes:
        pid, started: The process of `workers up`; `started` as `process_start` gives it.
        host: Of the node.
        since, at: Seconds since the epoch: when it came to this state, when this was written.
        state: running or stopping.
        redis: Its address, without a password.
        rows: Its parts.
    """

    pid: int
    started: str
    host: str
    since: float
    at: float
    state: str
    redis: str
    rows: list[Row]

    @property
    def alive(self) -> bool:
        """Whether its process still runs."""
        return bool(self.started) and process_start(self.pid) == self.started

    @property
    def broken_off(self) -> bool:
        """Whether it ended without a clean stop, which would be written down here."""
        return self.state == "running" and not self.alive


def record_path(state_dir: Path, host: str) -> Path:
    """Say where the record lies."""
    return state_dir / f"up@{host}.json"


def write_node(state_dir: Path, record: NodeRecord) -> None:
    """Write the record. Raises OSError where the disk does not take it."""
    replace_file(record_path(state_dir, record.host), msgspec.json.encode(record))


def read_node(state_dir: Path, host: str) -> NodeRecord | None:
    """Read the record; None when there is none.

    Raises:
        BackendError: It is no such record, or cannot be read.
    """
    path = record_path(state_dir, host)
    try:
        return msgspec.json.decode(path.read_bytes(), type=NodeRecord)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BackendError(f"{path} cannot be read: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise BackendError(f"{path} is no record of a node ({error}): remove it") from error


@contextmanager
def only_one(state_dir: Path, host: str, units: Sequence[str]) -> Iterator[None]:
    """Be the one `workers up` of a state directory, and of these GPUs on this machine.

    Args:
        state_dir: Made if missing.
        host: This machine's name.
        units: `gpu0@host`, one each.

    Raises:
        ConflictError: Another one runs; the text names its process.
        UsageError: The directory cannot be used.
    """
    here = f"{state_dir.resolve()}"
    with ExitStack() as held:
        _make(state_dir)
        _take(held, state_dir / f"up@{host}.lock", here, f"on {state_dir}")
        folder = _private_folder()
        for unit in units:
            _take(held, folder / f"{unit}.lock", here, f"with {unit}")
        yield


def _take(held: ExitStack, path: Path, here: str, what: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
    held.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid, _, where = os.pread(descriptor, 4096, 0).decode(errors="replace").partition(" ")
        raise ConflictError(
            f"`workers up` (pid {pid or 'unknown'}) already runs {what}, from {where or here}: "
            f"`workers up --status --state-dir {where or here}` shows it, SIGTERM stops it"
        ) from None
    except OSError as error:
        raise UsageError(
            f"{path} needs a disk that can lock files ({error.strerror}): choose a local "
            "--state-dir"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()} {here}".encode(), 0)


def _make(state_dir: Path) -> None:
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--state-dir {state_dir}: {error.strerror or error}") from error


def _private_folder() -> Path:
    """Give a folder of this user's that every process of his on this machine finds."""
    # Not tempfile's: TMPDIR may differ between those that have to meet here.
    folder = Path(f"/tmp/headrace-{os.getuid()}")  # noqa: S108 - checked below
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror or error}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UsageError(f"{folder} belongs to somebody else or is open to others: remove it")
    return folder


def age(record: NodeRecord) -> float:
    """Give the seconds since a record was written."""
    return max(time.time() - record.at, 0.0)
