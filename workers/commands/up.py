"""`workers up`: a whole node from one command."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.live import Live

from common import connect
from common.address import resolve_redis
from common.errors import UsageError
from common.help import Sectioned
from common.last_words import tell
from common.logs import set_up_logs
from common.options import LOG_LEVEL, REDIS, state_dir
from common.program import values_of
from common.stops import warn_of_shell
from workers.commands.serve import KILL_S
from workers.commands.spanned import spanned
from workers.commands.start import Concurrency
from workers.node.node import Node, NodeTold
from workers.node.node_record import NodeRecord, only_one, read_node
from workers.node.part_log import PartLog
from workers.node.plan import Kind, Part, Told, plan
from workers.node.processes import PASSING_CODES, Child, own_command
from workers.node.redis_side import RedisSide
from workers.node.table import console, page
from workers.options import FIRST_PORT, this_host
from workers.simulator.environment import simulated_model, simulated_python
from workers.supervisor.launch_line import STRATEGIES

EMBEDDED = "embedded:"

_SECTIONS = {
    "Servers to start": "gpu tp model python strategy port",
    "Or servers that run, or none": "attach simulate speed",
    "The other parts": "redis run concurrency ramp grace no_sink until_done",
    "Looking at it": "status json state_dir log_level",
}


@click.command(cls=Sectioned, sections=_SECTIONS)
@click.argument("sglang", nargs=-1, type=click.UNPROCESSED, metavar="[-- SGLANG_ARGS]")
@click.option("--gpu", metavar="N|A-B|A,B", help="Which GPUs: a server and a worker group each.")
@spanned()
@click.option(
    "--model",
    envvar="HEADRACE_UP_MODEL",
    metavar="PATH",
    help="Model that the servers serve.  [HEADRACE_UP_MODEL]",
)
@click.option(
    "--python",
    metavar="VENV/bin/python",
    help="The interpreter of SGLang's own environment.",
)
@click.option(
    "--strategy",
    type=click.Choice(STRATEGIES),
    help="How the servers keep a hybrid model's states, as `workers serve` has it.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="Port of the first server; the others' follow by the numbers of their GPUs."
    f"  [default: {FIRST_PORT} + GPU]",
)
@click.option(
    "--attach",
    metavar="PORTS|URLS",
    help="SGLang servers that run, and are not touched: 30000-30007, or URLs divided by commas.",
)
@click.option(
    "--simulate",
    type=click.IntRange(1, 256),
    envvar="HEADRACE_UP_SIMULATE",
    metavar="N",
    help="For a trial: N simulated GPUs with their servers.",
)
@click.option(
    "--speed",
    type=click.FloatRange(min=0, min_open=True),
    envvar="HEADRACE_SIM_SPEED",
    metavar="X",
    help="How much faster than real ones the simulated servers are.",
)
@REDIS
@click.option(
    "--run",
    "runs",
    multiple=True,
    metavar="NAME",
    help="Serve and store only this run; repeatable.  [default: all]",
)
@click.option(
    "--concurrency",
    type=Concurrency(),
    help="Most requests open at a server.  [default: auto]",
)
@click.option(
    "--ramp",
    type=click.FloatRange(min=0, min_open=True),
    help="New requests a second until a server is full once.  [default: 8]",
)
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    metavar="S",
    help="Seconds that SIGTERM or Ctrl-C leaves for open requests.  [default: 25]",
)
@click.option("--no-sink", is_flag=True, help="Another machine stores the results.")
@click.option(
    "--until-done",
    is_flag=True,
    help="End when all named runs have: with 0 when all is completed, with 1 after failures.",
)
@click.option("--status", is_flag=True, help="Show the node that runs, and end.")
@click.option("--json", "as_json", is_flag=True, help="With --status: one JSON object.")
@state_dir("the parts' logs and records are")
@LOG_LEVEL
def up(
    *,
    redis: str | None,
    speed: float | None,
    status: bool,
    as_json: bool,
    state_dir: Path,
    log_level: str,
    port: int | None,
    no_sink: bool,
    concurrency: int | str | None,
    **told: Any,
) -> None:
    """Run a whole node: servers, worker groups, a sink.

    One process runs them all, with an embedded Redis if asked for, starts again what dies, and
    shows how each is. SIGTERM or Ctrl-C
    stops it: the worker groups first, within --grace; a second one does not wait. Each part reads
    its own flags from the environment and from its table in headrace.toml too ([workers.start],
    [workers.sink]); its log is in --state-dir.

    \b
    Example:
        workers up --attach 30000-30007 --redis redis://queue:6379/0
        workers up --simulate 2 --speed 60 --redis embedded:redis
        workers up --status
    """
    if status:
        raise SystemExit(_show_status(state_dir, as_json=as_json))
    if as_json:
        raise UsageError("--json goes with --status")
    if speed is not None and told["simulate"] is not None:
        os.environ["HEADRACE_SIM_SPEED"] = f"{speed:g}"
    host = this_host()
    wanted = Told(
        sink=not no_sink,
        first_port=port,
        concurrency=None if concurrency is None else str(concurrency),
        **told,
    )
    if wanted.simulate is not None:
        wanted = _simulated(wanted, state_dir / "simulated")
    parts = plan(wanted, host)
    with ExitStack() as stack:
        units = sorted({part.unit for part in parts if part.unit})
        stack.enter_context(only_one(state_dir, host, units))
        raise SystemExit(
            _run(parts, wanted, redis=redis, state_dir=state_dir, host=host, log_level=log_level)
        )


def _simulated(told: Told, folder: Path) -> Told:
    """Let servers be launched from an environment whose SGLang is the simulator."""
    return msgspec.structs.replace(
        told,
        python=told.python or str(simulated_python(folder)),
        model=told.model or str(simulated_model(folder)),
        sglang=("--served-model-name", "simulated", *told.sglang),
    )


def _refuse_unlaunchable(parts: list[Part]) -> None:
    """Let `workers serve` itself say what no server could be launched with, while none is."""
    servers = [part for part in parts if part.kind == "server"]
    if not servers:
        return
    name, *arguments = servers[0].arguments
    done = subprocess.run(  # noqa: S603 - our own program
        own_command(name, "--print-command", *arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.returncode)


def _run(
    parts: list[Part],
    told: Told,
    *,
    redis: str | None,
    state_dir: Path,
    host: str,
    log_level: str,
) -> int:
    graces = _graces(told)
    _refuse_unlaunchable(parts)
    address = connect.redis_url(redis)
    url = resolve_redis(redis)
    connect.connect(url).close()
    home = Path(address.removeprefix(EMBEDDED)) if address.startswith(EMBEDDED) else None
    own_log = PartLog(state_dir / "logs" / "up.log")
    screen = console(stderr=True)
    live = Live(console=screen, auto_refresh=False) if screen.is_terminal else None

    def show(record: NodeRecord) -> None:
        if live is not None:
            live.update(page(record, last=own_log.last_line()), refresh=True)

    stream = own_log.opened_as_text() if live is not None else None
    set_up_logs(log_level, stream)
    warn_of_shell()
    node = Node(
        parts,
        [_child(part, url, state_dir=state_dir, log_level=log_level, told=told) for part in parts],
        RedisSide(url, host=host, embedded=home),
        NodeTold(state_dir=state_dir, host=host, grace_s=graces),
        show,
    )
    tell(f"workers: {len(parts)} parts, their logs in {state_dir / 'logs'}; "
         "`workers up --status` shows them elsewhere")  # fmt: skip
    if live is None:
        return node.run()
    with live:
        return node.run()


def _child(part: Part, url: str, *, state_dir: Path, log_level: str, told: Told) -> Child:
    name, *arguments = part.arguments
    flags = ["--log-level", log_level, "--state-dir", str(state_dir)]
    return Child(
        part.name,
        own_command(name, *flags, *arguments),
        # The address may hold a password, and arguments can be read by anybody on the host.
        env={**os.environ, "HEADRACE_REDIS": url},
        log=PartLog(state_dir / "logs" / part.log),
        passing=PASSING_CODES,
        final=frozenset({0, 1}) if told.until_done and part.kind == "sink" else frozenset(),
    )


def _graces(told: Told) -> dict[Kind, float]:
    """Read what each part gives itself to end, by the same settings as the part does."""
    # It loads this module.
    from workers.cli import cli  # noqa: PLC0415

    start = values_of(cli, "start", defaults={"gpu": "0"})["grace_s"]
    serve = values_of(cli, "serve", defaults={"gpu": "0", "model": "any"})["drain_limit_s"]
    return {
        "server": serve + KILL_S,
        "worker group": start if told.grace_s is None else told.grace_s,
        "sink": values_of(cli, "sink", defaults={})["grace_s"],
    }


def _show_status(state_dir: Path, *, as_json: bool) -> int:
    record = read_node(state_dir, this_host())
    if record is None or not record.alive:
        ended = "" if record is None else f"; the last one was pid {record.pid}"
        tell(f"workers: no `workers up` runs here on {state_dir}{ended}")
        return 1
    if as_json:
        click.echo(msgspec.json.encode(record).decode())
        sys.stdout.flush()
    else:
        console(stderr=False).print(page(record))
    return 1 if any(row.state in {"failed", "away"} for row in record.rows) else 0
