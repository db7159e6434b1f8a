"""`workers start`: one process a worker group, watched by the process that was called."""

import logging
import os

import click

from common import connect
from common.address import resolve_redis
from common.errors import UsageError
from common.logs import set_up_logs
from workers.group import SlotWorker
from workers.options import (
    DEFAULT_GRACE_S,
    DEFAULT_RAMP,
    GroupOptions,
    group_name,
    parse_gpus,
    server_url,
    this_host,
)
from workers.processes import Child, own_command, supervise

log = logging.getLogger(__name__)


class Concurrency(click.ParamType):
    """`auto`, or how many requests may be open at a server."""

    name = "auto|N"

    def convert(self, value, param, ctx):  # noqa: ANN001, ANN201
        """See click."""
        if value == "auto" or isinstance(value, int):
            return value
        if str(value).isdecimal() and int(value) > 0:
            return int(value)
        return self.fail(f"{value!r} is neither auto nor a number from 1", param, ctx)


@click.command()
@click.option(
    "--gpu", required=True, metavar="N|A-B|A,B", help="Which GPUs, one worker group each."
)
@click.option(
    "--tp",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="GPUs that one server spans: `--gpu 0,1 --tp 2` is one worker group.",
)
@click.option(
    "--server",
    metavar="URL",
    help="The SGLang server; {gpu} stands for the GPU's number."
    "  [default: http://127.0.0.1:{30000+gpu}]",
)
@click.option(
    "--redis",
    "-u",
    "--url",
    "redis_url",
    metavar="URL",
    help="Redis, or embedded:DIR.  [default: HEADRACE_REDIS, RQ_REDIS_URL, localhost:6379]",
)
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
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    default=DEFAULT_GRACE_S,
    show_default=True,
    help="Seconds that open requests get after SIGTERM.",
)
@click.option(
    "--run", "runs", multiple=True, help="Serve only this run; repeatable.  [default: all]"
)
@click.option(
    "--log-level",
    default="INFO",
    show_default=True,
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"]),
)
def start(
    gpu: str,
    tp: int,
    server: str | None,
    redis_url: str | None,
    concurrency: int | str,
    ramp: float,
    grace_s: float,
    runs: tuple[str, ...],
    log_level: str,
) -> None:
    """Serve prompts on these GPUs, each with the SGLang server beside it.

    One process a worker group; one that dies is started again. SIGTERM or Ctrl-C stops claims,
    lets open requests end within --grace, and gives the rest back; a second one does not wait. The
    servers' key comes from HEADRACE_API_KEY.

    \b
    Example:
        workers start --gpu 0-7 --redis redis://queue:6379/0
    """
    sets = parse_gpus(gpu, tp)
    if len(sets) > 1 and server is not None and "{gpu}" not in server:
        raise UsageError(
            f"--server {server!r} names one server for {len(sets)} worker groups: use {{gpu}}"
        )
    url = resolve_redis(redis_url)
    set_up_logs(log_level)
    host = this_host()
    if len(sets) > 1:
        common_args = _arguments(tp, server, url, concurrency, ramp, grace_s, runs, log_level)
        children = [
            Child(
                group_name(gpus, host),
                own_command("start", "--gpu", ",".join(map(str, gpus)), *common_args),
            )
            for gpus in sets
        ]
        raise SystemExit(supervise(children, grace_s=grace_s))
    options = GroupOptions(
        group=group_name(sets[0], host),
        server=server_url(server, sets[0][0]),
        host=host,
        concurrency=concurrency,  # type: ignore[arg-type]
        ramp=ramp,
        grace_s=grace_s,
        runs=runs,
        api_key=os.environ.get("HEADRACE_API_KEY"),
    )
    client = connect.connect(url)
    SlotWorker(list(runs), connection=client, options=options).work(logging_level=log_level)


def _arguments(
    tp: int,
    server: str | None,
    url: str,
    concurrency: int | str,
    ramp: float,
    grace_s: float,
    runs: tuple[str, ...],
    log_level: str,
) -> list[str]:
    # The address may hold a password, and arguments can be read by anybody on the host.
    os.environ["HEADRACE_REDIS"] = url
    arguments = ["--tp", str(tp), "--concurrency", str(concurrency), "--ramp", str(ramp)]
    arguments += ["--grace", str(grace_s), "--log-level", log_level]
    if server is not None:
        arguments += ["--server", server]
    for run in runs:
        arguments += ["--run", run]
    return arguments
