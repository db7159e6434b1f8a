"""A whole node in one process: it runs the parts, starts again what dies, stops them in order.

    servers, worker groups, sink    children; nothing waits for another to be there, each does so
                                    itself
    Redis                           given, or embedded: that one is started, and again when it dies

Stop. The worker groups drain first, within their grace; then nothing comes to a server or a stream
any more, and servers and sink end together; an embedded Redis is the last. A second signal hurries
all of them. When this process itself is killed, its children see it and end in their own time.

A part that cannot run (its exit code says so) is said once, and takes no other down. Only when no
GPU of the node can be served there is nothing to do here: all stops, with that exit code.
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import msgspec

from common.errors import HeadraceError
from common.stops import on_stop
from workers.lives import process_start
from workers.node.node_record import NodeRecord, Row, write_node
from workers.node.part_log import PartLog
from workers.node.plan import Kind, Part
from workers.node.processes import KILL_MARGIN_S, POLL_S, Child
from workers.node.redis_side import RedisSide
from workers.node.rows import row_of
from workers.supervisor.records import Process, ServerRecord, read_records

log = logging.getLogger(__name__)

SHOW_S = 0.5
BOUND_LOGS_S = 10.0
WELL = frozenset({"ready", "running"})
MOST_SAID = 20
"""Lines of a part between two times that it is well."""


class NodeTold(msgspec.Struct, frozen=True, kw_only=True):
    """What the node's process needs beside its parts.

    Attributes:
        state_dir: Where its record and the parts' logs lie, and the servers' records.
        host: This machine's name.
        grace_s: What each kind of part may take to end, before it is killed.
    """

    state_dir: Path
    host: str
    grace_s: dict[Kind, float]


class Node:
    """The parts of one machine.

    Args:
        parts: What to run.
        children: Their processes, in the same order.
        redis: Looks at Redis.
        told: The rest.
        show: Is given the record whenever there is something new to see.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        children: Sequence[Child],
        redis: RedisSide,
        told: NodeTold,
        show: Callable[[NodeRecord], None],
    ) -> None:
        self._parts = list(zip(parts, children, strict=True))
        self._redis = redis
        self._told = told
        self._show = show
        # The children's own, which know where the lines of a part's present life begin.
        self._logs = [
            child.log or PartLog(told.state_dir / "logs" / part.log) for part, child in self._parts
        ]
        self._rows: dict[str, Row] = {}
        self._stopped_by: list[int] = []
        self._stopping = False
        self._patience = 1
        self._since = time.time()
        self._shown_s = self._bound_s = 0.0
        self._complaint = ""
        # By part, what was said of it since it was well.
        self._said: dict[str, set[str]] = {}
        self._own = Process(os.getpid(), process_start(os.getpid()))

    def run(self) -> int:
        """Run until a signal, or until there is nothing to do here.

        Returns:
            128 and the signal's number; the exit code of what cannot run; what the sink said of
            the runs' end.
        """
        on_stop(self._on_signal)
        self._redis.start()
        code = self._watch()
        self._stop()
        self._redis.close(stop_embedded_too=True)
        self._look(at_once=True)
        return 128 + self._stopped_by[0] if self._stopped_by else code

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._stopped_by.append(number)

    # --- while it runs ---------------------------------------------------------------------------

    def _watch(self) -> int:
        while not self._stopped_by:
            for _, child in self._parts:
                child.look(time.monotonic())
            self._look()
            code = self._nothing_to_do()
            if code is not None:
                return code
            time.sleep(POLL_S)
        return 0

    def _nothing_to_do(self) -> int | None:
        for part, child in self._parts:
            if part.kind == "sink" and child.ended is not None:
                how = child.log.last_line() if child.log else ""
                log.info("all that was asked for has ended%s", f": {how}" if how else "")
                return child.ended
        failed: dict[str, int] = {}
        for part, child in self._parts:
            if part.unit and child.failed is not None:
                failed[part.unit] = child.failed
        if failed.keys() >= {part.unit for part, _ in self._parts if part.unit}:
            log.error("no GPU here can be served: stopping")
            return max(failed.values())
        return None

    # --- the stop --------------------------------------------------------------------------------

    def _stop(self) -> None:
        self._stopping = True
        self._since = time.time()
        # A stop that nobody asked for by a signal is hurried by the first one.
        self._patience = min(len(self._stopped_by), 1)
        log.info("stopping: the worker groups first, then %s",
                 "servers and sink" if self._of("server") else "the sink")  # fmt: skip
        self._end(self._of("worker group"), self._told.grace_s["worker group"])
        rest = [*self._of("server"), *self._of("sink")]
        self._end(rest, max(self._told.grace_s["server"], self._told.grace_s["sink"]))

    def _of(self, kind: Kind) -> list[Child]:
        return [child for part, child in self._parts if part.kind == kind]

    def _end(self, children: Sequence[Child], grace_s: float) -> None:
        """Tell them to stop, hurry them on a second signal, kill what does not listen."""
        for child in children:
            child.tell_to_stop()
        hurried = False
        deadline_s = time.monotonic() + grace_s + KILL_MARGIN_S
        while any(child.alive for child in children) and time.monotonic() < deadline_s:
            if len(self._stopped_by) > self._patience and not hurried:
                hurried = True
                for child in children:
                    child.hurry()
            self._look()
            time.sleep(POLL_S)
        for child in children:
            if child.alive:
                log.error("%s does not end: killing it", child.name)
            child.send(signal.SIGKILL)

    # --- what there is to see --------------------------------------------------------------------

    def _look(self, *, at_once: bool = False) -> None:
        now_s = time.monotonic()
        if now_s - self._bound_s > BOUND_LOGS_S:
            self._bound_s = now_s
            for each in self._logs:
                each.bound()
        if now_s - self._shown_s < SHOW_S and not at_once:
            return
        self._shown_s = now_s
        record = self._record()
        for row in record.rows:
            self._say_change(row)
        self._rows = {row.name: row for row in record.rows}
        self._write(record)
        self._show(record)

    def _record(self) -> NodeRecord:
        servers = self._servers()
        rows = [self._redis_row()]
        for (part, child), part_log in zip(self._parts, self._logs, strict=True):
            figures = self._redis.figures.get(child.pid or 0)
            row = row_of(part, child, part_log, server=servers.get(part.unit), figures=figures)
            rows.append(self._with_since(row))
        return NodeRecord(
            pid=self._own.pid,
            started=self._own.started,
            host=self._told.host,
            since=self._since,
            at=time.time(),
            state="stopping" if self._stopping else "running",
            redis=self._redis.address,
            rows=rows,
        )

    def _with_since(self, row: Row) -> Row:
        before = self._rows.get(row.name)
        same = before is not None and (before.state, before.pid) == (row.state, row.pid)
        since = before.since if before is not None and same else time.time()
        return msgspec.structs.replace(row, since=since)

    def _redis_row(self) -> Row:
        redis = self._redis
        return Row(
            name="redis",
            state=redis.state,
            since=redis.since,
            restarts=redis.restarts,
            says=redis.says,
        )

    def _servers(self) -> dict[str, ServerRecord]:
        try:
            return {each.name: each for each in read_records(self._told.state_dir)}
        except HeadraceError as error:
            self._complain(str(error))
            return {}

    def _say_change(self, row: Row) -> None:
        """Say that a part has come to another state; not again while it has not been well."""
        before = self._rows.get(row.name)
        if before is not None and before.state == row.state:
            return
        said = self._said.setdefault(row.name, set())
        text = f"{row.name}: {row.state}" + (f": {row.says}" if row.says else "")
        if row.state in WELL:
            said.clear()
        elif text in said or len(said) > MOST_SAID:
            return
        said.add(text)
        log.info("%s", text)

    def _write(self, record: NodeRecord) -> None:
        try:
            write_node(self._told.state_dir, record)
        except OSError as error:
            self._complain(f"the node's record cannot be written: {error.strerror or error}")

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            self._complaint = text
            log.warning("%s", text)
