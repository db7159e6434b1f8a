"""Look at all parts at once, each in a thread with a limit of time."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from common import connect
from common.address import resolve_redis
from common.errors import HeadraceError
from workers.node.doctor.lines import Line, Scribe
from workers.node.doctor.machine_part import examine_machine
from workers.node.doctor.redis_part import examine_redis, outputs_of_runs
from workers.node.doctor.server_part import Target, examine_servers
from workers.node.doctor.store_part import examine_store

MOST_OUTPUTS = 3


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What to look at.

    Attributes:
        redis: As `--redis` says.
        output, endpoint_url: A store; None for those of the runs that Redis knows.
        targets: Servers.
        state_dir: Where this machine's own things are kept.
        limit_s: How long a part may take.
    """

    redis: str | None
    output: str | None
    endpoint_url: str | None
    targets: tuple[Target, ...]
    state_dir: Path
    limit_s: float


def examine(asked: Asked) -> list[Line]:
    """Look at everything; returns after the limit at the latest, and some seconds.

    Raises:
        UsageError: An address is none.
    """
    connect.redis_url(asked.redis)  # a typing error is told at once
    redis, store, machine = Scribe("redis"), Scribe("store"), Scribe("machine")
    servers = [Scribe(target.name) for target in asked.targets]
    parts: list[tuple[Sequence[Scribe], Callable[[], None]]] = [
        ((machine,), lambda: examine_machine(machine, state_dir=asked.state_dir)),
        ((redis,), lambda: examine_redis(redis, resolve_redis(asked.redis))),
        ((store,), lambda: _examine_stores(store, asked)),
        (servers, lambda: examine_servers(servers, asked.targets)),
    ]
    if not servers:
        machine.ok("servers", "none looked at: --gpu 0-7 names those beside this, --server one")
    threads = [_start(says, call) for says, call in parts]
    deadline = time.monotonic() + asked.limit_s
    for thread, (says, _) in zip(threads, parts, strict=True):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            for say in says:
                say.fault(
                    "time",
                    f"not all was looked at within {asked.limit_s:.0f} s",
                    "what was asked last does not answer; --time-limit gives it longer",
                )
    # A thread that hangs may still write; what is told is what stands here now.
    return [line for say in (redis, store, *servers, machine) for line in tuple(say.lines)]


def _start(says: Sequence[Scribe], call: Callable[[], None]) -> threading.Thread:
    def guarded() -> None:
        try:
            call()
        except HeadraceError as error:
            for say in says:
                say.failed("reachable", error)
        except Exception as error:  # noqa: BLE001 - one part's bug must not hide the others
            for say in says:
                say.fault("bug", f"looking at it failed: {type(error).__name__}: {error}")

    # A daemon: a store or a disk that hangs must not keep the command from ending.
    thread = threading.Thread(target=guarded, name=f"doctor-{len(says)}", daemon=True)
    thread.start()
    return thread


def _examine_stores(say: Scribe, asked: Asked) -> None:
    if asked.output is not None:
        examine_store(say, asked.output, asked.endpoint_url)
        return
    try:
        url = resolve_redis(asked.redis)
        found = outputs_of_runs(url, MOST_OUTPUTS)
    except HeadraceError:
        # Told by the part of Redis.
        say.ok("output", "not looked at: --output names one, and Redis tells of none")
        return
    if not found:
        say.ok("output", "not looked at: no run has one yet, and --output names none")
    for output, endpoint_url in found:
        examine_store(say, output, asked.endpoint_url or endpoint_url)
