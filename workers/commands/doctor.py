"""`workers doctor`: whether all is fit for the work."""

import threading
from contextlib import suppress
from pathlib import Path

import click
import msgspec

from common.address import resolve_redis
from common.errors import BackendError, UsageError
from common.options import REDIS, state_dir
from workers.commands.spanned import spanned
from workers.node.doctor.examine import Asked, examine
from workers.node.doctor.lines import summary
from workers.node.doctor.machine_part import records_of
from workers.node.doctor.redis_part import servers_of_groups
from workers.node.doctor.server_part import Target
from workers.node.doctor.view import show
from workers.options import group_name, parse_gpus, server_url, this_host

LIMIT_S = 30.0
_AWAY = {"stopped", "starting", "draining"}
"""States of a server that answers nobody, as its record says already."""

GROUPS_S = 3.0
"""How long Redis may take to tell which worker groups are here; the parts are asked after it."""


@click.command()
@click.option(
    "--gpu",
    metavar="N|A-B|A,B",
    help="Look at the servers of these GPUs.  [default: those that workers serve launched here, "
    "and those of the worker groups here]",
)
@spanned()
@click.option(
    "--server",
    metavar="URL",
    help="A server; {gpu} stands for the GPU's number.  [default: http://127.0.0.1:{30000+gpu}]",
)
@REDIS
@click.option(
    "--output",
    metavar="URL",
    help="The store to try: s3://BUCKET/PREFIX or a directory.  [default: the runs' own]",
)
@click.option("--endpoint-url", metavar="URL", help="Another S3 than Amazon's.")
@state_dir("workers serve and the sink keep what is this machine's own")
@click.option(
    "--time-limit",
    "limit_s",
    type=click.FloatRange(min=1),
    default=LIMIT_S,
    show_default=True,
    metavar="S",
    help="Seconds that Redis, the store and the servers each may take.",
)
@click.option("--json", "json_", is_flag=True, help="One JSON object on stdout.")
def doctor(
    *,
    gpu: str | None,
    tp: int,
    server: str | None,
    redis: str | None,
    output: str | None,
    endpoint_url: str | None,
    state_dir: Path,
    limit_s: float,
    json_: bool,
) -> int:
    """Look whether all that the work needs is fit for it.

    Redis, the store, the servers and this machine. Changes nothing: what it writes it removes.
    Each line is ok, a warning (it costs time, or will) or a fault (it does not work, or loses
    something), with what to do. Ends with 4 on a fault, 0 else. The servers' key comes from
    HEADRACE_API_KEY.

    \b
    Example:
        workers doctor --gpu 0-7 --redis redis://queue:6379/0 --output s3://bucket/prefix
        workers doctor --json | jq '.lines[] | select(.level != "ok")'
    """
    lines = examine(
        Asked(
            redis=redis,
            output=output,
            endpoint_url=endpoint_url,
            targets=_targets(gpu, tp=tp, server=server, state_dir=state_dir, redis=redis),
            state_dir=state_dir,
            limit_s=limit_s,
        )
    )
    found = summary(lines)
    if json_:
        click.echo(msgspec.json.encode(found).decode())
    else:
        show(lines)
    return 0 if found["ok"] else BackendError.exit_code


def _targets(
    gpu: str | None, *, tp: int, server: str | None, state_dir: Path, redis: str | None
) -> tuple[Target, ...]:
    if gpu is not None:
        sets = parse_gpus(gpu, tp)
        if len(sets) > 1 and server is not None and "{gpu}" not in server:
            raise UsageError(
                f"--server names one server for {len(sets)} worker groups: write {{gpu}} in it"
            )
        return tuple(
            Target(group_name(gpus, this_host()), server_url(server, gpus[0])) for gpus in sets
        )
    if server is not None:
        if "{gpu}" in server:
            raise UsageError("--server holds {gpu}: say which with --gpu")
        return (Target("server", server_url(server, 0)),)
    records, _ = records_of(state_dir)  # what is wrong with them is told by the machine's part
    found = {record.name: record.url for record in records if record.state not in _AWAY}
    # What somebody stopped or restarts is no fault, though its worker group waits for it.
    away = {record.name for record in records} - found.keys()
    for name, url in _driven_here(redis).items():
        if name not in away:
            found.setdefault(name, url)
    return tuple(Target(name, url) for name, url in found.items())


def _driven_here(redis: str | None) -> dict[str, str]:
    """Give the servers of the worker groups here; none where Redis does not tell of any."""
    found: dict[str, str] = {}

    def ask() -> None:
        # Whatever it is, the part of Redis meets it again, and says it.
        with suppress(Exception):
            found.update(servers_of_groups(resolve_redis(redis), this_host()))

    # A daemon, as the parts are: a Redis that hangs hides no other.
    asking = threading.Thread(target=ask, name="doctor-groups", daemon=True)
    asking.start()
    asking.join(GROUPS_S)
    return dict(found)
