"""`producer pause`: stop a run's claims."""

import click

from common.advice import count_of
from common.connect import address_of
from common.errors import StateLostError
from common.options import REDIS
from common.queue import Runs
from producer.locate import connected, unknown


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--reason", default="by hand", show_default=True, help="Shown by `status`.")
@REDIS
def command(run: str, *, reason: str, redis: str | None) -> int:
    """Start no more prompts of RUN.

    What is at the servers ends as usual, and is kept.

    \b
    Example:
        producer pause prompts --reason "the servers get another model"
        producer resume prompts
    """
    client = connected(redis)
    address = address_of(client)
    runs = Runs(client, where=address)
    if runs.get(run) is None:
        raise StateLostError(unknown(run, address))
    runs.pause(run, reason)
    counts = runs.counts(run)
    click.echo(
        f"producer: run {run} is paused: {count_of(counts.in_flight, 'prompt')} at the servers, "
        f"which end, {counts.queued:,} wait; `producer resume {run}` lifts it",
        err=True,
    )
    return 0
