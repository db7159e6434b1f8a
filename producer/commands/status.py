"""`producer status`: what is done, what limits, how long."""

from typing import Any

import click
import msgspec

from common import flags
from common.errors import UsageError
from common.last_words import tell as say
from common.options import REDIS
from producer.locate import connected
from producer.options import ENDPOINT_URL, JSON, OUTPUT_IF_LOST, where_of
from producer.screen import show
from producer.status import ended_with, figures_of, figures_of_all


@click.command()
@click.argument("run", required=False, metavar="[RUN]")
@JSON
@OUTPUT_IF_LOST
@ENDPOINT_URL
@REDIS
def command(
    run: str | None,
    *,
    json_: bool,
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
        limited by  enlarge that: KV or mamba pool, server queue, client, sink
        server      16+2/16: requests running there + waiting / most that run
        open/bound  requests open there; the most that are sent at once
        full        share of these slots in use over the last minute

    \b
    Example:
        producer status prompts
        producer status prompts --json | jq .eta_hours
    """
    client = connected(redis)
    if run is not None:
        where = where_of(run, output=output, endpoint_url=endpoint_url, redis=redis)
        return tell([figures_of(client, where)], json_=json_, one=True)
    if output is not None and flags.is_given(click.get_current_context(), "output"):
        raise UsageError("--output belongs to one run: `producer status RUN --output URL`")
    every = figures_of_all(client)
    if not every:
        say("producer: there is no run here; `producer enqueue FILE` makes one")
    return tell(every, json_=json_, one=len(every) == 1)


def tell(every: list[dict[str, Any]], *, json_: bool, one: bool) -> int:
    """Print figures; returns the exit code of the worst run."""
    if json_:
        told = every[0] if one else {"runs": every}
        click.echo(msgspec.json.encode(told))
    else:
        show(every, one=one)
    return max((ended_with(figures) for figures in every), default=0)
