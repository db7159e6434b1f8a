"""`producer priority`: change a run's place in the order of claims."""

import click
import msgspec

from common.connect import address_of
from common.crashpoints import reached
from common.errors import StateLostError
from common.last_words import tell
from common.options import REDIS
from common.queue import Runs
from producer.locate import connected, unknown
from producer.options import JSON, PRIORITY


# Otherwise a negative N is taken for an option.
@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("run", metavar="RUN")
@click.argument("priority", type=PRIORITY, metavar="N")
@REDIS
@JSON
def command(run: str, priority: int, *, redis: str | None, json_: bool) -> int:
    """Give RUN the priority N: runs with a higher one go first.

    N is from -9 to 9. Among equals the older run goes first. What is at the servers goes on; the
    next claims follow the new order.

    \b
    Example:
        producer priority prompts 5
        producer priority prompts -1
    """
    client = connected(redis, writes=True)
    address = address_of(client)
    runs = Runs(client, where=address)
    if runs.get(run) is None:
        raise StateLostError(unknown(run, address, known=runs.names()))
    before = runs.set_priority(run, priority)
    reached("priority.set")
    order = runs.names()
    if json_:
        told = {"run": run, "priority": priority, "before": before, "order": order}
        click.echo(msgspec.json.encode(told))
    ahead = ", ".join(order[: order.index(run)]) if run in order else ""
    tell(
        f"producer: run {run} has priority {priority} (before: {before}), "
        + (f"behind {ahead}" if ahead else "the first in line")
    )
    return 0
