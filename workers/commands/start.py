"""`workers start`: one process a worker group, watched by the process that was called."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import click
from typing_extensions import override

from common import connect
from common.address import resolve_redis
from common.errors import UsageError
from common.logs import set_up_logs
from common.options import LOG_LEVEL, REDIS, grace, state_dir
from common.stops import warn_of_shell
from workers.commands.spanned import spanned
from workers.group import SlotWorker
from workers.node.processes import Child, own_command, supervise, watched_by
from workers.options import (
    DEFAULT_GRACE_S,
    DEFAULT_RAMP,
    GroupOptions,
    group_name,
    parse_gpus,
    server_url,
    this_host,
)
from workers.supervisor.log_place import log_finder
from workers.timing import timing_from_environment


class Concurrency(click.ParamType[int | str]):
    """`auto`, or how many requests may be open at a server."""

    name = "auto|N"

    @override
    def convert(self, value: Any, param: Any, ctx: Any) -> int | str:
        """See click."""
        if value == "auto":
            return "auto"
        if str(value).isdecimal() and int(value) > 0:
            return int(value)
        return self.fail(f"{value!r} is neither auto nor a number from 1", param, ctx)


@click.command()
@click.option(
    "--gpu", required=True, metavar="N|A-B|A,B", help="Which GPUs, one worker group each."
)
@spanned("`--gpu 0,1 --tp 2` is one worker group")
@click.option(
    "--server",
    metavar="URL",
    help="The SGLang server; {gpu} stands for the GPU's number."
    "  [default: http://127.0.0.1:{30000+gpu}]",
)
@click.option(
    "--server-log",
    metavar="PATH",
    help="The server's log, which tells what its pages leave out; {gpu} as in --server."
    "  [default: what its supervisor writes, or sglang_logs/sglang_gpu{gpu}.log]",
)
@state_dir("supervisors of servers keep their records")
@REDIS
@click.option(
    "--concurrency",
    type=Concurrency(),
    default="auto",
    show_default=True,
    help="Most requests open at a server; auto follows the server's own cap.",
)
@click.option(
    "--ramp",
    type=click.FloatRange(min=0, min_open=True),
    default=DEFAULT_RAMP,
    show_default=True,
    help="New requests a second until the server is full once.",
)
@grace(DEFAULT_GRACE_S, "open requests")
@click.option(
    "--start-limit",
    "start_limit_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="Give up (exit 4) when a server has given no token by then.  [default: wait]",
)
@click.option(
    "--run",
    "runs",
    multiple=True,
    metavar="NAME",
    help="Serve only this run; repeatable.  [default: all]",
)
@LOG_LEVEL
def start(
    *,
    gpu: str,
    tp: int,
    server: str | None,
    server_log: str | None,
    state_dir: Path,
    redis: str | None,
    concurrency: int | Literal["auto"],
    ramp: float,
    grace_s: float,
    start_limit_s: float | None,
    runs: tuple[str, ...],
    log_level: str,
) -> None:
    """Serve prompts on these GPUs.

    Each has an SGLang server beside it. One process a worker group; of several, one that dies is
    started again. SIGTERM or Ctrl-C stops claims, lets open requests end within --grace, and gives
    the rest back; a second one does not wait. The servers' key comes from HEADRACE_API_KEY.

    \b
    Example:
        workers start --gpu 0-7 --redis redis://queue:6379/0
        workers start --gpu 0,1 --tp 2 --server http://127.0.0.1:30000
    """
    sets = parse_gpus(gpu, tp)
    _refuse_one_for_all(len(sets), {"--server": server, "--server-log": server_log})
    url = resolve_redis(redis)
    set_up_logs(log_level)
    warn_of_shell()
    host = this_host()
    client = connect.connect(url)
    all_options = [
        GroupOptions(
            group=group_name(gpus, host),
            server=server_url(server, gpus[0]),
            host=host,
            concurrency=concurrency,
            ramp=ramp,
            grace_s=grace_s,
            start_limit_s=start_limit_s,
            runs=runs,
            api_key=os.environ.get("HEADRACE_API_KEY"),
            parent_pid=watched_by(),
            find_log=log_finder(
                server_log, group=group_name(gpus, host), gpu=gpus[0], state_dir=state_dir
            ),
            timing=timing_from_environment(),
        )
        for gpus in sets
    ]
    if len(sets) > 1:
        client.close()
        rest = ["--log-level", log_level, "--state-dir", str(state_dir)]
        rest += ["--server-log", server_log] if server_log else []
        raise SystemExit(_start_each(sets, all_options, url=url, tp=tp, rest=rest))
    worker = SlotWorker(list(runs), connection=client, options=all_options[0])
    worker.work()
    if worker.stopped_by is not None:
        raise SystemExit(128 + worker.stopped_by)


def _refuse_one_for_all(count: int, patterns: Mapping[str, str | None]) -> None:
    for flag, said in patterns.items():
        if count > 1 and said is not None and "{gpu}" not in said:
            raise UsageError(f"{flag} names one for {count} worker groups: write {{gpu}} in it")


def _start_each(
    sets: list[tuple[int, ...]],
    all_options: list[GroupOptions],
    *,
    url: str,
    tp: int,
    rest: list[str],
) -> int:
    children = [
        Child(
            options.group,
            own_command(
                "start",
                "--gpu",
                ",".join(map(str, gpus)),
                "--tp",
                str(tp),
                *_arguments(options),
                *rest,
            ),
            # The address may hold a password, and arguments can be read by anybody on the host.
            env={**os.environ, "HEADRACE_REDIS": url},
        )
        for gpus, options in zip(sets, all_options, strict=True)
    ]
    return supervise(children, grace_s=all_options[0].grace_s)


def _arguments(options: GroupOptions) -> list[str]:
    arguments = ["--server", options.server, "--concurrency", str(options.concurrency)]
    arguments += ["--ramp", str(options.ramp), "--grace", str(options.grace_s)]
    if options.start_limit_s is not None:
        arguments += ["--start-limit", str(options.start_limit_s)]
    for run in options.runs:
        arguments += ["--run", run]
    return arguments
