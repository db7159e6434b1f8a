"""Look at this machine: descriptors, disks, and what `workers serve` keeps of its servers."""

import resource
from collections.abc import Sequence
from pathlib import Path

from common.descriptors import ENOUGH, SPARE, raise_limit
from common.errors import BackendError
from workers.node.doctor.lines import Scribe
from workers.node.doctor.store_part import tell_free
from workers.node.node_record import NodeRecord, read_node
from workers.options import this_host
from workers.supervisor.records import ServerRecord, read_records

_STATES = {
    "failed": "fault",
    "down": "warning",
    "starting": "warning",
    "draining": "warning",
}


def examine_machine(say: Scribe, *, state_dir: Path) -> None:
    """Tell of this machine.

    Args:
        say: Gets the lines.
        state_dir: Where `workers` keeps what is this machine's own.
    """
    limit, hard = raise_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    judge_descriptors(say, limit, None if hard == resource.RLIM_INFINITY else hard)
    tell_free(say, state_dir, "state")
    records, error = records_of(state_dir)
    if error:
        say.fault("serve", error)
    try:
        node = read_node(state_dir, this_host())
    except BackendError as error:
        node = None
        say.failed("up", error)
    judge_records(say, records, of_up=node is not None and node.broken_off)
    judge_node(say, node)


def records_of(state_dir: Path) -> tuple[list[ServerRecord], str]:
    """Read the records of `workers serve` here; and why not, where they cannot be read."""
    try:
        return read_records(state_dir), ""
    except BackendError as error:
        return [], str(error)
    except OSError as error:
        return [], f"{state_dir} cannot be read: {error.strerror}"


def judge_descriptors(say: Scribe, limit: int, hard: int | None) -> None:
    """Judge how many files a process may open.

    Args:
        say: Gets the lines.
        limit: As raised as it may be.
        hard: What it may be raised to; None: anything.
    """
    requests = max(limit - SPARE, 0)
    told = f"{limit:,} open files a process: {requests:,} requests open in each worker process"
    if requests < ENOUGH // 64:
        say.warning("descriptors", told, "raise it: `ulimit -Hn`, LimitNOFILE= in a unit")
    elif hard is not None and hard < limit:
        say.warning("descriptors", told)
    else:
        say.ok("descriptors", told)


def judge_slots(say: Scribe, limit: int, bound: int) -> None:
    """Judge whether a worker group may open as many requests as its server takes.

    Args:
        say: Gets the lines.
        limit: Open files a process.
        bound: Requests that are to be open at the server.
    """
    if bound + SPARE > limit:
        say.fault(
            "descriptors",
            f"{bound:,} requests are to be open there, and a process may open {limit:,} files",
            f"raise the limit to {bound + SPARE:,} (`ulimit -n`, LimitNOFILE= in a unit)",
        )


def judge_node(say: Scribe, node: NodeRecord | None) -> None:
    """Judge what `workers up` says of its parts here; nothing is said where it never ran."""
    if node is None:
        return
    if node.broken_off:
        say.warning("up", "workers up ended without a clean stop", "call it again")
    if not node.alive:
        return
    failed = [row for row in node.rows if row.state == "failed"]
    for row in failed:
        log = f"; {row.log} says more" if row.log else ""
        say.fault("up", f"{row.name} has failed: {row.says or 'no reason is known'}{log}")
    if not failed:
        # Its first line says how many there are likewise, without the Redis that it shows too.
        parts = [row for row in node.rows if row.name != "redis"]
        say.ok("up", f"{len(parts)} parts of workers up")


def judge_records(say: Scribe, records: Sequence[ServerRecord], *, of_up: bool = False) -> None:
    """Judge the servers that `workers serve` has launched here.

    Args:
        say: Gets the lines.
        records: Of its servers.
        of_up: Their supervisors died with a `workers up`.
    """
    for record in records:
        told = f"{record.name}: {record.state}{f', {record.detail}' if record.detail else ''}"
        told += f", started again {record.times_restarted}" if record.restarts else ""
        if record.refused:
            say.warning(
                "serve", f"{record.name}: the last order was not carried out: {record.refused}"
            )
        if record.state == "stopped":
            continue
        if not record.supervisor.alive and record.state != "failed":
            serve = f"it is taken over by `workers serve --gpu {','.join(map(str, record.gpus))}`"
            say.warning(
                "serve",
                f"{told}; its supervisor is gone, nobody starts it again",
                "`workers up`, called again, takes it over" if of_up else serve,
            )
            continue
        level = _STATES.get(record.state, "ok")
        advice = f"{record.log} says why" if record.log else "its log says why"
        if level == "fault":
            say.fault("serve", told, advice)
        elif level == "warning":
            say.warning("serve", told, advice)
        else:
            say.ok("serve", told)
