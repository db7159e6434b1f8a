"""`workers serve`: a supervised SGLang server on each of some GPUs."""

import asyncio
import logging
import os
import signal
from pathlib import Path
from types import FrameType

import click

from common import connect
from common.address import resolve_redis
from common.errors import HeadraceError
from common.logs import set_up_logs
from common.options import LOG_LEVEL, state_dir
from common.secrecy import hide
from common.stops import on_stop, warn_of_shell
from workers.commands.spanned import spanned
from workers.node.processes import Child, own_command, supervise, watched_by
from workers.options import (
    FIRST_PORT,
    group_name,
    parse_gpus,
    port_of,
    slots_server,
    this_host,
)
from workers.stop_request import BY_PARENT, HURRY, StopRequest
from workers.supervisor.book import only_supervisor
from workers.supervisor.emptying import Emptying
from workers.supervisor.launch_line import API_KEY, DEFAULT_STRATEGY, STRATEGIES, VISIBLE, shown
from workers.supervisor.plan import ServeOptions, plan_launch
from workers.supervisor.supervisor import Supervisor
from workers.timing import timing_from_environment

log = logging.getLogger(__name__)

KILL_S = 60.0
"""What a supervisor needs beyond --drain-limit to end its server whole."""

GIGABYTE = 1e9


@click.command(context_settings={"ignore_unknown_options": False})
@click.option("--gpu", required=True, metavar="N|A-B|A,B", help="Which GPUs, one server each.")
@spanned("`--gpu 0,1 --tp 2` is one server")
@click.option(
    "--model",
    # HEADRACE_MODEL is the name that prompts ask for (`producer enqueue --model`).
    envvar="HEADRACE_SERVE_MODEL",
    required=True,
    metavar="PATH",
    help="The model: a directory, or a name.  [HEADRACE_SERVE_MODEL]",
)
@click.option(
    "--python",
    default="python",
    show_default=True,
    metavar="VENV/bin/python",
    help="The interpreter of SGLang's own environment.",
)
@click.option(
    "--strategy",
    type=click.Choice(STRATEGIES),
    help="How a hybrid model's states are kept; no_radix: no prefix cache at all; best: most "
    f"requests at once.  [default: {DEFAULT_STRATEGY} for a hybrid model]",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="Port of the first server; the others' follow by the numbers of their GPUs."
    f"  [default: {FIRST_PORT} + GPU]",
)
@state_dir("the record of each server is kept, which other commands read")
@click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    default=Path("sglang_logs"),
    show_default=True,
    metavar="DIR",
    help="Where each server's output goes: sglang_gpu0.log, 64 MiB and five older ones.",
)
@click.option(
    "--rss-limit",
    "rss_limit_gb",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB",
    help="Drain a server and launch it anew when its processes hold more of the machine's memory.",
)
@click.option(
    "--drain-limit",
    "drain_limit_s",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="S",
    help="Seconds that open requests get before a server is ended.",
)
@click.option(
    "--start-limit",
    "start_limit_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="Launch a server anew that has given no token by then.  [default: wait]",
)
@click.option("--print-command", is_flag=True, help="Print what would be launched, and end.")
@click.option(
    "--redis",
    metavar="URL",
    help="Where worker groups are told before a server is ended on purpose, so that nothing is "
    "open there.  [default: HEADRACE_REDIS, RQ_REDIS_URL, else nobody is told]",
)
@LOG_LEVEL
@click.argument("arguments", nargs=-1, metavar="[-- SGLANG'S OWN FLAGS]")
def serve(
    *,
    gpu: str,
    tp: int,
    model: str,
    python: str,
    strategy: str | None,
    port: int | None,
    state_dir: Path,
    log_dir: Path,
    rss_limit_gb: float | None,
    drain_limit_s: float,
    start_limit_s: float | None,
    print_command: bool,
    redis: str | None,
    log_level: str,
    arguments: tuple[str, ...],
) -> None:
    """Run an SGLang server on each of these GPUs, and keep it at work.

    Finds out which SGLang is installed and launches it by that version's flags. A server that dies
    or hangs is started again; one that cannot start ends this with exit 4 and the reason. SIGTERM
    or Ctrl-C lets open requests end within --drain-limit; a second one does not wait. Killed, this
    leaves the server running, and the next call takes it over. The key that servers ask for comes
    from HEADRACE_API_KEY.

    \b
    Example:
        workers serve --gpu 0-7 --model /models/Qwen3-Next --python /opt/sglang/bin/python
        workers serve --gpu 0,1 --tp 2 --model /models/big --strategy no_radix
        workers serve --gpu 0 --model /models/m -- --max-running-requests 96
    """
    sets = parse_gpus(gpu, tp)
    host = this_host()
    key = os.environ.get(API_KEY, "")
    hide(key)
    all_options = [
        ServeOptions(
            name=group_name(gpus, host),
            gpus=gpus,
            model=model,
            python=python,
            port=port_of(port, gpus[0], sets[0][0]),
            strategy=strategy,
            arguments=arguments,
            state_dir=state_dir,
            log_dir=log_dir,
            rss_limit_bytes=round(rss_limit_gb * GIGABYTE) if rss_limit_gb else None,
            drain_limit_s=drain_limit_s,
            start_limit_s=start_limit_s,
            api_key=key,
            parent_pid=watched_by(),
            timing=timing_from_environment(),
        )
        for gpus in sets
    ]
    if print_command:
        for options in all_options:
            _print(options)
        return
    raise SystemExit(_serve_all(all_options, redis=redis, tp=tp, log_level=log_level))


def _print(options: ServeOptions) -> None:
    plan = plan_launch(options)
    for note in plan.notes:
        click.echo(f"# {note}", err=True)
    environment = {VISIBLE: plan.devices}
    click.echo(shown(plan.line.arguments, environment, with_key=plan.key))


def _serve_all(
    all_options: list[ServeOptions], *, redis: str | None, tp: int, log_level: str
) -> int:
    set_up_logs(log_level)
    warn_of_shell()
    if len(all_options) == 1:
        return _serve(all_options[0], redis)
    # What no server can be launched with is said once, before there are any.
    plan_launch(all_options[0])
    return _serve_each(all_options, redis=redis, tp=tp, log_level=log_level)


def _serve(options: ServeOptions, redis: str | None) -> int:
    stop = StopRequest()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        stop.on_signal(number)

    on_stop(on_signal)
    for number in (BY_PARENT, HURRY):
        signal.signal(number, on_signal)
    with only_supervisor(options):
        # Not uvloop: what is asked of the loop is looked at a few times a second.
        asyncio.run(Supervisor(options, stop, _emptying(options, redis)).run())
    return 128 + stop.signal if stop.signal is not None else 0


def _emptying(options: ServeOptions, redis: str | None) -> Emptying:
    """Prepare to tell worker groups; a server needs no Redis, so one that is away ends nothing."""
    url = redis or os.environ.get("RQ_REDIS_URL")
    client = None
    if url:
        try:
            client = connect.client_for(resolve_redis(url, create=False))
        except HeadraceError as error:
            log.warning("%s: worker groups will not be told of its ends: %s", options.name, error)
    server = slots_server(f"http://127.0.0.1:{options.port}", this_host())
    return Emptying(client, server=server, name=options.name)


def _serve_each(
    all_options: list[ServeOptions], *, redis: str | None, tp: int, log_level: str
) -> int:
    children = [
        Child(
            options.name,
            own_command(
                "serve",
                *_arguments(options, tp=tp),
                *("--log-level", log_level, "--", *options.arguments),
            ),
            # The address may hold a password, and arguments can be read by everybody.
            env={**os.environ, "HEADRACE_REDIS": redis} if redis else os.environ,
        )
        for options in all_options
    ]
    # The child's own limits come first: killed, it would leave its server to the next call.
    return supervise(children, grace_s=all_options[0].drain_limit_s + KILL_S)


def _arguments(options: ServeOptions, *, tp: int) -> list[str]:
    arguments = ["--gpu", ",".join(map(str, options.gpus)), "--tp", str(tp)]
    arguments += ["--model", options.model, "--python", options.python]
    arguments += ["--port", str(options.port), "--drain-limit", str(options.drain_limit_s)]
    arguments += ["--state-dir", str(options.state_dir), "--log-dir", str(options.log_dir)]
    if options.strategy is not None:
        arguments += ["--strategy", options.strategy]
    if options.rss_limit_bytes is not None:
        arguments += ["--rss-limit", str(options.rss_limit_bytes / GIGABYTE)]
    if options.start_limit_s is not None:
        arguments += ["--start-limit", str(options.start_limit_s)]
    return arguments
