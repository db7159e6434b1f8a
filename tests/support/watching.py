"""Look at worker groups of a `Fleet` from outside: figures, leases, requests, exit codes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from common import names
from common.group_figures import GroupFigures
from common.queue import Groups
from tests.support.fleet import Fleet
from tests.support.server_process import ServerProcess
from workers.simulator.log import Served

QUICK_SINK = ("--batch-seconds", "0.5", "--first-batch-seconds", "0.5", "--poll", "0.1")
"""Options of a sink that does not let a test wait for its shards."""

NONE = GroupFigures(group="", epoch="", host="", pid=0, server="", state="")


def write_rows(path: Path, texts: Sequence[str], **body: object) -> Path:
    """Write prompts with the ids p0, p1, … and these texts."""
    rows = [{"id": f"p{i}", "prompt": text, **body} for i, text in enumerate(texts)]
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return path


def timed(**timing: float) -> dict[str, str]:
    """The environment of worker groups with another clockwork, see `workers.timing`."""
    return {"HEADRACE_TIMING": json.dumps({"publish_every_s": 0.2, **timing})}


def figures(fleet: Fleet, name: str) -> GroupFigures:
    """The figures that the process of this name has published; empty ones before it has."""
    pid = fleet.processes[name].pid if name in fleet.processes else None
    groups = Groups(fleet.client).fresh()
    return next((each for each in groups if each.pid == pid), NONE)


def state(fleet: Fleet, name: str = "gpu0") -> str:
    return figures(fleet, name).state


def wait_state(fleet: Fleet, *states: str, name: str = "gpu0", limit_s: float = 30) -> None:
    fleet.wait(
        lambda: state(fleet, name) in states, f"{name} to be {' or '.join(states)}", limit_s
    )


def of_prompts(fleet: Fleet) -> list[Served]:
    """The requests that were no probes."""
    return [each for each in fleet.served() if not each.rid.startswith("headrace-probe")]


def open_now(fleet: Fleet, index: int = 0) -> int:
    return int(fleet.simulator.state(index)["open"])


def members(fleet: Fleet, member: str) -> list[int]:
    """A counter of every job that is in Redis."""
    keys = list(fleet.client.scan_iter(f"{names.RQ_JOB_STEM}*"))
    return [int(fleet.client.hget(key, member) or 0) for key in keys]


def leased(fleet: Fleet, run: str) -> list[str]:
    found = cast("list[bytes]", fleet.client.zrange(names.leases(run), 0, -1))
    return [key.decode() for key in found]


def age_leases(fleet: Fleet, run: str) -> None:
    """Let every lease of the run have run out."""
    for key in leased(fleet, run):
        fleet.client.zadd(names.leases(run), {key: 1})


def exit_code(process: ServerProcess) -> int | None:
    return process._process.returncode


def mark_of(row: Mapping[str, Any]) -> str:
    """The first word of a failed prompt."""
    content = row["request"]["body"]["messages"][0]["content"]
    return str(content).split()[0]
