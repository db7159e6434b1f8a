"""`workers restart`: launch the servers of this machine anew, one by one and under load."""

import os
import threading
from pathlib import Path

import click
import msgspec
from rich.console import Console

from common import connect
from common.address import resolve_redis
from common.errors import RedisUnusableError
from common.last_words import tell
from common.logs import set_up_logs
from common.marks.events import Event
from common.marks.noting import note_at_servers
from common.options import LOG_LEVEL, REDIS, state_dir
from common.queue.rights import refuse_missing_rights
from common.stops import Stopped
from workers.node.restart.choice import Asked, Outcome, choose, has_already, refuse_impossible
from workers.node.restart.rolling import roll
from workers.node.restart.server import ServerRestart, Told
from workers.node.restart.view import View, summary
from workers.options import parse_gpus, this_host
from workers.supervisor.launch_line import API_KEY, STRATEGIES
from workers.supervisor.records import ServerRecord, read_records, read_wanted

REDIS_LIMIT_S = 5.0


@click.command()
@click.option(
    "--gpu",
    envvar="HEADRACE_RESTART_GPU",
    metavar="N|A-B|A,B",
    help="On which GPUs.  [default: all that have a server of ours here]",
)
@click.option(
    "--strategy",
    envvar="HEADRACE_RESTART_STRATEGY",
    type=click.Choice(STRATEGIES),
    help="How a hybrid model's states are kept from now on.  [default: as it is]",
)
@click.option(
    "--drain-limit",
    "drain_limit_s",
    envvar="HEADRACE_RESTART_DRAIN_LIMIT",
    type=click.FloatRange(min=0),
    default=300.0,
    show_default=True,
    metavar="S",
    help="Seconds that open requests get; the rest is given back, uncharged, and asked again.",
)
@click.option(
    "--start-limit",
    "start_limit_s",
    envvar="HEADRACE_RESTART_START_LIMIT",
    type=click.FloatRange(min=0, min_open=True),
    default=1800.0,
    show_default=True,
    metavar="S",
    help="Launch a server as it was when it has given no token by then, and stop there.",
)
@click.option(
    "--at-once",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="How many servers are away at a time.",
)
@click.option("--force", is_flag=True, help="Restart also the servers that have it already.")
@click.option(
    "--no-drain",
    is_flag=True,
    help="Do without Redis: what is open gets the --drain-limit of `workers serve` alone.",
)
@REDIS
@state_dir("the servers' records are: as `workers serve` or `workers up` were told")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout at the end.")
@LOG_LEVEL
@click.argument("arguments", nargs=-1, metavar="[-- MORE OF SGLANG'S OWN FLAGS]")
def restart(
    *,
    gpu: str | None,
    strategy: str | None,
    drain_limit_s: float,
    start_limit_s: float,
    at_once: int,
    force: bool,
    no_drain: bool,
    redis: str | None,
    state_dir: Path,
    as_json: bool,
    log_level: str,
    arguments: tuple[str, ...],
) -> None:
    """Restart the servers of a machine one by one, under load.

    For servers that `workers serve` or `workers up` runs here. Each is emptied (its worker group
    claims nothing, what is open ends within --drain-limit), launched anew, and at work again
    before the next. One that does not start is launched as it was, and the others are left alone
    (exit 4). Interrupted, the same call again goes on. What is asked for holds until the server's
    own command is called with other flags.

    \b
    Example:
        workers restart --strategy no_buffer
        workers restart --gpu 3 --force
        workers restart --strategy no_radix -- --max-running-requests 96
    """
    set_up_logs(log_level)
    host = this_host()
    asked = Asked(strategy=strategy, arguments=arguments or None, force=force)
    gpus = None if gpu is None else [each for (each,) in parse_gpus(gpu, 1)]
    records = choose(read_records(state_dir, host), gpus)
    refuse_impossible(records, asked)
    url = None if no_drain else resolve_redis(redis)
    if url is not None:
        _look_at_redis(url, _to_do(records, asked, state_dir), asked)
    told = Told(
        state_dir=state_dir,
        host=host,
        drain_limit_s=drain_limit_s,
        start_limit_s=start_limit_s,
        api_key=os.environ.get(API_KEY),
    )
    outcomes = _roll(records, asked, told, url=url, at_once=at_once)
    raise SystemExit(_tell(outcomes, as_json=as_json))


def _to_do(records: list[ServerRecord], asked: Asked, state_dir: Path) -> list[ServerRecord]:
    """Leave out what runs by it already."""
    return [
        record
        for record in records
        if not has_already(record, read_wanted(state_dir, record.name), asked)
    ]


def _look_at_redis(url: str, records: list[ServerRecord], asked: Asked) -> None:
    """See that Redis answers and lets us, and mark what is about to happen, if anything is."""
    client = connect.connect(url)
    refuse_missing_rights(client, connect.address_of(client))
    if not records:
        return
    servers = f"{len(records)} servers" if len(records) > 1 else records[0].name
    try:
        note_at_servers(client, Event(kind="servers", detail=f"{servers}, {asked.text}"))
    except RedisUnusableError as error:
        tell(f"workers: this restart is not marked: {error}")
    finally:
        client.close()


def _roll(
    records: list[ServerRecord], asked: Asked, told: Told, *, url: str | None, at_once: int
) -> list[Outcome]:
    client = None if url is None else connect.impatient_client(url, REDIS_LIMIT_S)
    view = View([record.name for record in records], Console(stderr=True, highlight=False))
    stop = threading.Event()

    def one(record: ServerRecord) -> Outcome:
        return ServerRestart(
            record,
            asked,
            told,
            client=client,
            say=lambda step, detail: view.say(record.name, step, detail),
            stop=stop,
        ).run()

    def work() -> list[Outcome]:
        return roll(records, one, at_once=at_once, stop=stop, look=view.show)

    try:
        if view.live is None:
            return work()
        with view.live:
            return work()
    except Stopped:
        tell(
            "workers: interrupted: what was ordered is carried out; the same call goes on with it"
        )
        raise


def _tell(outcomes: list[Outcome], *, as_json: bool) -> int:
    wrong = [each for each in outcomes if each.state in {"failed", "stopped"}]
    if as_json:
        done = {"ok": not wrong, "servers": outcomes}
        click.echo(msgspec.json.encode(done).decode())
    for line in summary(outcomes):
        tell(f"workers: {line}")
    return max((each.code for each in wrong), default=0)
