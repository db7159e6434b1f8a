"""`producer status`: what is done, what limits, how long."""

from typing import Any

import click
import msgspec

from common import flags
from common.errors import UsageError
from common.last_words import tell as say
from common.options import REDIS
from producer.locate import connected
from producer.options import ALL_GPUS, ENDPOINT_URL, JSON, OUTPUT_IF_LOST, where_of
from producer.screen import show
from producer.status import ended_with, figures_of, figures_of_all


@click.command()
@click.argument("run", required=False, metavar="[RUN]")
@JSON
@ALL_GPUS
@OUTPUT_IF_LOST
@ENDPOINT_URL
@REDIS
def command(
    run: str | None,
    *,
    json_: bool,
    all_gpus: bool,
    output: str | None,
    endpoint_url: str | None,
    redis: str | None,
) -> int:
    """Show what is done of RUN, what limits it, and the time left.

    Without RUN: of all runs. Ends with 0 when the run is done or goes on, 1 when it has ended
    otherwise or stalls, 4 when Redis or the store cannot be used, no server could be for a minute,
    or Redis and the store disagree.

    \b
    Reading it:
        limited by      enlarge that: KV or mamba pool, server queue, client, sink
        open/bound/cap  requests open there; the most that are sent; the most that run
        running queued  what the server itself says of them
        full            share of these slots in use over the last minute
        oldest          age of the oldest open request

    Below them stand the newest marks (`producer mark`), with the figures of the minutes before and
    after each: the servers' change at once, answers tell after as long as one takes.

    \b
    Example:
        producer status prompts
        producer status prompts --json | jq .eta_hours
    """
    client = connected(redis)
    if run is not None:
        where = where_of(run, output=output, endpoint_url=endpoint_url, redis=redis)
        return tell([figures_of(client, where)], json_=json_, one=True, all_gpus=all_gpus)
    if output is not None and flags.is_given(click.get_current_context(), "output"):
        raise UsageError("--output belongs to one run: `producer status RUN --output URL`")
    every = figures_of_all(client)
    if not every:
        say("producer: there is no run here; `producer enqueue FILE` makes one")
    return tell(every, json_=json_, one=len(every) == 1, all_gpus=all_gpus)


def tell(every: list[dict[str, Any]], *, json_: bool, one: bool, all_gpus: bool = False) -> int:
    """Print figures; returns the exit code of the worst run."""
    if json_:
        told = every[0] if one else {"runs": every}
        click.echo(msgspec.json.encode(told))
    else:
        show(every, one=one, all_gpus=all_gpus)
    return max((ended_with(figures) for figures in every), default=0)
