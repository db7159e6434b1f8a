"""Say in one line how a part of a node is: from its process, its record, its figures, its log."""

from common.group_figures import GroupFigures
from workers.node.node_record import Row
from workers.node.part_log import PartLog
from workers.node.plan import Part
from workers.node.processes import Child
from workers.supervisor.records import ServerRecord


def row_of(
    part: Part,
    child: Child,
    log: PartLog,
    *,
    server: ServerRecord | None,
    figures: GroupFigures | None,
) -> Row:
    """Give the row of one part.

    Args:
        part: Which.
        child: Its process.
        log: What its process says.
        server: Of a server: the record of its supervisor, whoever that was.
        figures: Of a worker group: what its process last said to Redis.
    """
    state: str = child.standing
    says = ""
    if state == "restarting" and child.killed_by:
        # The last that it said has nothing to do with it.
        says = f"killed by {child.killed_by}"
    if state == "running":
        state = "draining" if child.told else "starting"
        if part.kind == "sink":
            state = "running"
        elif part.kind == "server" and server is not None and server.supervisor.pid == child.pid:
            state, says = server.state, of_server(server)
        elif part.kind == "worker group" and figures is not None and not _unasked(figures):
            state, says = figures.state, of_group(figures)
            if state == "ready" and not figures.in_flight and not figures.completed:
                # What it waits for before its first request, as for slots after Redis began anew.
                says = "; ".join(filter(None, [says, log.last_line()]))
    return Row(
        name=part.name,
        pid=child.pid,
        state=state,
        restarts=max(child.lives - 1, 0),
        says=says or ("" if state == "ended" else log.last_line()),
        log=str(log.path),
    )


def _unasked(figures: GroupFigures) -> bool:
    """Whether a worker group has not asked its server yet, and so cannot say how that is."""
    return figures.state == "waiting" and not figures.detail


def of_server(record: ServerRecord) -> str:
    """Say what a server is, or what is wrong with it."""
    if record.state == "stopped":
        return "told to stop"
    if record.state != "ready":
        return record.detail
    parts = [
        f"SGLang {record.version}" if record.version else "",
        record.strategy,
        f"cap {record.cap}" if record.cap else "",
        f"{record.kv_tokens:,} KV tokens" if record.kv_tokens else "",
        f"restarted {record.times_restarted}" if record.restarts else "",
    ]
    return ", ".join(filter(None, parts))


def of_group(figures: GroupFigures) -> str:
    """Say what a worker group does, or what it waits for."""
    done = f"{figures.completed:,} done"
    if figures.state not in {"ready", "draining"}:
        # Its server gives no token: why stands first, where a narrow table does not cut it off.
        return ", ".join(filter(None, [figures.detail, done if figures.completed else ""]))
    parts = [
        f"{figures.in_flight} of {figures.bound} open" if figures.bound else "",
        f"{figures.gen_tokens_per_s:,.0f} tok/s" if figures.gen_tokens_per_s is not None else "",
        done,
        figures.detail,
    ]
    return ", ".join(filter(None, parts))
