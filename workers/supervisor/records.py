"""What the supervisor of a server writes down on its own disk, and what is asked of it there.

Two files a server below the state directory, each replaced at one instant:

    servers/gpu0@host.json           written by the supervisor alone: what runs, who watches it
    servers/gpu0@host.wanted.json    written by `ask`: what a restart wants of it

The host is part of the names because nodes often share the folder that commands are called in. An
order holds until the supervisor is called with other flags: `over` says which ones it was given
over, and one given over others is void. It is carried out when the record's `serial` has reached
its own; `refused` then says why not, if it was not.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from common.errors import BackendError, UsageError
from common.replacing import replace_file
from workers.lives import process_start
from workers.options import this_host

FOLDER = "servers"
_ORDER_BYTES = 4096
"""More than an order takes, unless somebody passes pages of flags."""

State = Literal["starting", "ready", "draining", "down", "failed", "stopped"]


class Process(msgspec.Struct, frozen=True):
    """A process that no later one with its pid can be taken for.

    Attributes:
        pid: On the host of the record.
        started: As `process_start` gives it.
    """

    pid: int
    started: str

    @property
    def alive(self) -> bool:
        """Whether it runs still."""
        return bool(self.started) and process_start(self.pid) == self.started


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One server as its supervisor has it.

    Attributes:
        name: `gpu0@host`, as its worker group's.
        gpus: Which ones it spans.
        url, port: Where it is reached.
        supervisor: Who writes this; not alive means that nobody watches.
        server: The first process of the server; None while there is none.
        mark: What the environment of each of the server's processes bears.
        log_writer: The process that writes its log.
        state: starting, ready, draining, down (it died or hangs; the next one is coming), failed
            (given up), stopped (told to).
        detail: Why, for people.
        strategy: The one it was launched with, empty where its model has none.
        version: SGLang's.
        cap: Requests that it runs at once, effectively.
        kv_tokens, mamba_states: Room of its pools.
        flags: What the supervisor was called with, as far as it decides the launch: `Wanted.over`.
        launch: Hash of the whole launch line and its environment's part.
        serial: Of the last order that was dealt with; 0 for none.
        refused: Why that order was not carried out; empty when it was.
        started_at: Seconds since the epoch: when this server was launched.
        restarts: How many were launched after the first, by this supervisor.
        log: Path.
    """

    name: str
    gpus: tuple[int, ...]
    url: str
    port: int
    supervisor: Process
    server: Process | None = None
    mark: str = ""
    log_writer: Process | None = None
    state: State = "starting"
    detail: str = ""
    strategy: str = ""
    version: str = ""
    cap: int | None = None
    kv_tokens: int | None = None
    mamba_states: int | None = None
    flags: str = ""
    launch: str = ""
    serial: int = 0
    refused: str = ""
    started_at: float = 0.0
    restarts: int = 0
    log: str = ""

    @property
    def times_restarted(self) -> str:
        """How often its server was started again, in words."""
        return "once" if self.restarts == 1 else f"{self.restarts} times"


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a server's supervisor.

    Attributes:
        serial: Greater than that of every earlier order.
        asked_at: Seconds since the epoch.
        over: `ServerRecord.flags` that it is given over.
        strategy: In the place of the flag's; None leaves that.
        arguments: SGLang's own, after those of the flags: the later one wins; None for none.
        held_strategy, held_arguments: Those of the order that held when this one was given: what
            holds again where this one is refused.
    """

    serial: int
    asked_at: float
    over: str
    strategy: str | None = None
    arguments: tuple[str, ...] | None = None
    held_strategy: str | None = None
    held_arguments: tuple[str, ...] | None = None


_Record = TypeVar("_Record", ServerRecord, Wanted)


def record_path(state_dir: Path, name: str) -> Path:
    """Say where the record of a server lies."""
    return state_dir / FOLDER / f"{name}.json"


def wanted_path(state_dir: Path, name: str) -> Path:
    """Say where the order to a server lies."""
    return state_dir / FOLDER / f"{name}.wanted.json"


def write_record(state_dir: Path, record: ServerRecord) -> None:
    """Write a record. Raises OSError where the disk does not take it."""
    replace_file(record_path(state_dir, record.name), msgspec.json.encode(record))


def read_record(state_dir: Path, name: str) -> ServerRecord | None:
    """Read a server's record; None when there is none.

    Raises:
        BackendError: It is no such record, or cannot be read.
    """
    return _read(record_path(state_dir, name), ServerRecord)


def read_records(state_dir: Path, host: str | None = None) -> list[ServerRecord]:
    """Read the records of all servers of a host, by GPU.

    Args:
        state_dir: Where their supervisors keep them.
        host: This one when None.

    Raises:
        BackendError: One is no such record, or cannot be read.
    """
    ending = f"@{this_host() if host is None else host}"
    try:
        paths = sorted((state_dir / FOLDER).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    names = [
        path.name.removesuffix(".json")
        for path in paths
        if path.name.endswith(f"{ending}.json") and not path.name.startswith(".")
    ]
    found = [read_record(state_dir, name) for name in names]
    return sorted((record for record in found if record), key=lambda record: record.gpus)


def read_wanted(state_dir: Path, name: str) -> Wanted | None:
    """Read what is asked of a server; None when nothing is.

    Raises:
        BackendError: It is no such order, or cannot be read.
    """
    return _read(wanted_path(state_dir, name), Wanted)


def ask(
    state_dir: Path,
    name: str,
    *,
    strategy: str | None = None,
    arguments: Sequence[str] | None = None,
) -> Wanted:
    """Ask a server's supervisor to launch it anew.

    Args:
        state_dir: Where the supervisor keeps its records.
        name: Of the server, `gpu0@host`.
        strategy: None leaves the one that an earlier order set, or the flag's.
        arguments: Likewise; an empty sequence takes an earlier order's away.

    Returns:
        The order; the record's `serial` reaches its own when it has been dealt with.

    Raises:
        UsageError: No supervisor has ever been there.
        BackendError: A record cannot be read, or the order not be written.
    """
    record = read_record(state_dir, name)
    if record is None:
        raise UsageError(
            f"no supervisor of {name} keeps its record in {state_dir / FOLDER}: give the "
            "--state-dir that it was started with"
        )
    earlier = read_wanted(state_dir, name)
    held_strategy, held_arguments = _held(record, earlier)
    strategy = held_strategy if strategy is None else strategy
    arguments = held_arguments if arguments is None else arguments
    wanted = Wanted(
        serial=max(record.serial, earlier.serial if earlier else 0) + 1,
        asked_at=time.time(),
        over=record.flags,
        strategy=strategy,
        arguments=None if arguments is None else tuple(arguments),
        held_strategy=held_strategy,
        held_arguments=held_arguments,
    )
    path = wanted_path(state_dir, name)
    with _told_of(path):
        replace_file(path, msgspec.json.encode(wanted))
    return wanted


def refuse_full_disk(state_dir: Path, name: str) -> None:
    """Raise BackendError where an order could not be written: none shall drain for it in vain."""
    path = wanted_path(state_dir, name)
    trial = path.with_suffix(".trial")
    with _told_of(path):
        replace_file(trial, bytes(_ORDER_BYTES))
        trial.unlink(missing_ok=True)


@contextmanager
def _told_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BackendError(f"{path} cannot be written: {error.strerror or error}") from error


def _held(record: ServerRecord, order: Wanted | None) -> tuple[str | None, tuple[str, ...] | None]:
    """Say what of earlier orders holds now: strategy and arguments, None where nothing does."""
    if order is None or order.over != record.flags:
        return None, None
    if record.refused and record.serial >= order.serial:
        # What was asked for does not start, and must not come along with what is asked next.
        return order.held_strategy, order.held_arguments
    return order.strategy, order.arguments


def _read(path: Path, kind: type[_Record]) -> _Record | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BackendError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BackendError(
            f"{path} is no record of a server's supervisor ({error}): stop that one, remove the "
            "file, and start it again"
        ) from error
