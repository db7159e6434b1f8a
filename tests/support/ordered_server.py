"""A supervisor's side of a server's records, in a thread: carries orders out as it is told to."""

import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from workers.lives import process_start
from workers.supervisor.records import Process, ServerRecord, read_wanted, write_record

NAME = "gpu0@test"
CAPS = {"extra_buffer": 32, "no_buffer": 72}
LOOK_S = 0.01


class OrderedServer:
    """One server without a process: what the restart of it sees on disk.

    Args:
        state_dir: Where its record is.
        url: Of the server.
        refuses: Why it takes orders back; empty where it carries them out.
        never: It does not become ready.

    Attributes:
        taken: Orders that it has looked at, oldest first.
    """

    def __init__(
        self, state_dir: Path, url: str, *, refuses: str = "", never: bool = False, **fields: Any
    ) -> None:
        self._state_dir = state_dir
        self.refuses = refuses
        self.never = never
        self.taken: list[Any] = []
        self.at_s: list[float] = []
        self._ended = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        fields = {"strategy": "extra_buffer", "cap": 32, "version": "0.5.23", **fields}
        self.record = ServerRecord(
            name=NAME,
            gpus=(0,),
            url=url,
            port=int(url.rpartition(":")[2]),
            supervisor=Process(os.getpid(), process_start(os.getpid())),
            state="ready",
            flags="f",
            log="/logs/sglang_gpu0.log",
            **fields,
        )
        self.tell()

    def tell(self, **fields: Any) -> None:
        """Write the record."""
        # A test and this thread both do: one draft of the file at a time.
        with self._writing:
            self.record = msgspec.structs.replace(self.record, **fields)
            write_record(self._state_dir, self.record)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            order = read_wanted(self._state_dir, NAME)
            if order is None or order.serial <= self.record.serial:
                continue
            self.taken.append(order)
            self.at_s.append(time.monotonic())
            self.tell(state="draining")
            self.tell(state="starting", detail="no token yet", serial=order.serial)
            if self.refuses:
                self.tell(refused=self.refuses)
            else:
                strategy = order.strategy or self.record.strategy
                self.tell(strategy=strategy, cap=CAPS.get(strategy), refused="")
            if not self.never:
                self.tell(state="ready", detail="")
