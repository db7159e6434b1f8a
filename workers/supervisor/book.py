"""Keep the record of one server, and the right to be its only supervisor."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from common.errors import BackendError, ConflictError
from workers.lives import process_start
from workers.supervisor.got import Got
from workers.supervisor.orders import Orders
from workers.supervisor.plan import Plan, ServeOptions
from workers.supervisor.processes import ServerProcesses
from workers.supervisor.records import (
    FOLDER,
    Process,
    ServerRecord,
    State,
    read_record,
    write_record,
)

log = logging.getLogger(__name__)


@contextmanager
def only_supervisor(options: ServeOptions) -> Iterator[None]:
    """Be the only supervisor of a server, as long as this process lives.

    Raises:
        ConflictError: There is one already.
        BackendError: The state directory cannot be used.
    """
    path = options.state_dir / FOLDER / f"{options.name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise BackendError(
            f"{path} cannot be written ({error.strerror}): give another --state-dir"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found = read_record(options.state_dir, options.name)
            by = f" (pid {found.supervisor.pid})" if found else ""
            raise ConflictError(
                f"{options.name} has a supervisor already{by}, and a GPU has one server: stop "
                "that one first, or give another --state-dir if it is another machine's"
            ) from None
        except OSError as error:
            log.warning("%s cannot be locked (%s): see that nobody else serves", path, error)
        yield
    finally:
        os.close(descriptor)


class Book:
    """The record of one server.

    Attributes:
        earlier: What the supervisor before wrote last; None when there was none.
    """

    def __init__(self, options: ServeOptions) -> None:
        self._state_dir = options.state_dir
        self.earlier = read_record(options.state_dir, options.name)
        self._unwritten = ""
        self._record = ServerRecord(
            name=options.name,
            gpus=options.gpus,
            url=f"http://127.0.0.1:{options.port}",
            port=options.port,
            supervisor=Process(os.getpid(), process_start(os.getpid())),
            flags=options.flags,
            log=str(options.log.resolve()),
        )

    def tell(self, state: State | None = None, detail: str | None = None, **fields: Any) -> None:
        """Write what has changed; a disk that does not take it ends nothing."""
        if state is not None:
            fields["state"] = state
        if detail is not None:
            fields["detail"] = detail
        self._record = msgspec.structs.replace(self._record, **fields)
        try:
            write_record(self._state_dir, self._record)
        except OSError as error:
            why = error.strerror or str(error)
            if why != self._unwritten:
                self._unwritten = why
                log.warning(
                    "%s is supervised, but its record is not written: %s", self._record.name, why
                )
        else:
            self._unwritten = ""

    def launching(self, mark: str, *, at_s: float, restarts: int) -> None:
        """Write by which mark the processes of the next start will be found."""
        self.tell(
            "starting",
            "no process yet",
            server=None,
            mark=mark,
            launch="",
            started_at=at_s,
            restarts=restarts,
        )

    def started(self, plan: Plan, processes: ServerProcesses, orders: Orders) -> None:
        """Write that a server is launched, or taken over."""
        self.tell(
            "starting",
            "no token yet",
            server=processes.first,
            mark=processes.mark,
            log_writer=processes.writer,
            url=f"http://{plan.line.host}:{self._record.port}",
            version=plan.version,
            strategy=plan.strategy,
            launch=plan.hash,
            serial=orders.serial,
            refused=orders.refused,
            cap=None,
            kv_tokens=None,
            mamba_states=None,
        )

    def ready(self, found: Got) -> None:
        """Write what a launch came to."""
        self.tell(
            "ready",
            "",
            version=found.version,
            strategy=found.strategy,
            cap=found.cap,
            kv_tokens=found.kv_tokens,
            mamba_states=found.mamba_states,
        )
