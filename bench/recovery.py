"""How long a death costs: a dead worker group's prompts run again, a dead server is seen.

With the lease, the timers and the limits that users have, so this takes minutes. Judged by the
servers' log and by what the worker group says of its server.
"""

import time

from bench.stage import Row, fleet, verdict, wait
from common.queue import Groups
from tests.support.fleet import Fleet, write_prompts
from workers.simulator.log import Served

RUN = "bench"
SLOTS = 16
PROMPTS = 20_000
LIMIT_S = 300.0


def recovery() -> list[Row]:
    """Kill a worker group, then a server that is busy, an idle one, and one that only hangs."""
    return [dead_group(), *(dead_server(kind) for kind in ("killed", "killed, idle", "hung"))]


def dead_group() -> Row:
    """SIGKILL one of two worker groups: how long until the other asked for all that it held."""
    with fleet(servers=2, latency="lognormal:1:1", cap=SLOTS) as made:
        made.enqueue(write_prompts(made.folder / f"{RUN}.jsonl", PROMPTS))
        for gpu in (0, 1):
            made.start_group(gpu, "--concurrency", str(SLOTS))
        wait(lambda: _open(made, 0) == SLOTS and _open(made, 1) == SLOTS, LIMIT_S)
        dead = made.processes.pop("gpu0")
        killed_at = time.time()
        dead.kill()
        lost = {served.digest for served in of_server(made, 0) if _was_open(served, killed_at)}
        wait(lambda: lost <= {served.digest for served in of_server(made, 1)}, LIMIT_S)
        again = [served.begin for served in of_server(made, 1) if served.digest in lost]
    took_s = max(again) - killed_at
    return Row(
        f"a killed worker group's {len(lost)} open prompts run again at another",
        f"within {took_s:.0f} s",
        verdict(met=took_s <= 120, asked="≤ 120 s"),
    )


def dead_server(kind: str) -> Row:
    """Take the server away in one way: how long until its worker group says `down`."""
    with fleet(latency="lognormal:1:1", cap=SLOTS) as made:
        if kind != "killed, idle":
            made.enqueue(write_prompts(made.folder / f"{RUN}.jsonl", PROMPTS))
        made.start_group(0, "--concurrency", str(SLOTS))
        wait(lambda: state(made) == "ready", LIMIT_S)
        if kind != "killed, idle":
            wait(lambda: _open(made, 0) == SLOTS, LIMIT_S)
        began_s = time.monotonic()
        if kind == "hung":
            made.simulator.control("hang")
        else:
            made.simulator.kill()
        wait(lambda: state(made) == "down", LIMIT_S)
        took_s = time.monotonic() - began_s
    asked_s = 60 if kind == "hung" else 30
    return Row(
        f"a server is seen to be gone: {kind}",
        f"after {took_s:.1f} s",
        verdict(met=took_s <= asked_s, asked=f"≤ {asked_s} s"),
    )


def state(made: Fleet) -> str:
    """What the worker group says of its server; empty while there is none."""
    return next((group.state for group in Groups(made.client).fresh()), "")


def of_server(made: Fleet, index: int) -> list[Served]:
    """Requests for prompts that this server got."""
    port = made.simulator.ports[index]
    served = made.served()
    return [s for s in served if s.port == port and not s.rid.startswith("headrace-probe")]


def _open(made: Fleet, index: int) -> int:
    return sum(served.end is None for served in of_server(made, index))


def _was_open(served: Served, at: float) -> bool:
    return served.begin <= at and (served.end is None or served.end >= at)
