"""`producer mark`: name an instant of a run, or list them."""

import click
import msgspec

from common.errors import UsageError
from common.last_words import tell
from common.marks.mark import told as as_told
from common.options import REDIS
from producer import mark as marks
from producer.locate import Where, connected
from producer.marks_view import of_marks
from producer.options import ENDPOINT_URL, JSON, OUTPUT_IF_LOST, where_of
from producer.screen import console


@click.command()
@click.argument("run", metavar="RUN")
@click.argument("text", nargs=-1, metavar="[TEXT]")
@click.option(
    "--at",
    metavar="TIME",
    help="When it was, if not now: 14:02, 10m (ago), 2026-11-30T14:02:05+01:00.",
)
@OUTPUT_IF_LOST
@ENDPOINT_URL
@REDIS
@JSON
def command(
    run: str,
    *,
    text: tuple[str, ...],
    at: str | None,
    output: str | None,
    endpoint_url: str | None,
    redis: str | None,
    json_: bool,
) -> int:
    """Name an instant of RUN, or list those that have a name.

    A change that you have just made, for example: `producer status` shows how the figures changed
    there. Restarts of servers, changes of their strategy or cap, worker groups that come or go,
    and what commands do to the run mark themselves. Without TEXT all marks are listed.

    \b
    Example:
        producer mark prompts no_buffer on
        producer mark prompts "driver updated on node 7" --at 14:02
        producer mark prompts
    """
    where = where_of(run, output=output, endpoint_url=endpoint_url, redis=redis)
    if text:
        return _set(where, " ".join(text), at=at, json_=json_)
    if at is not None:
        raise UsageError('--at needs a text: `producer mark RUN "TEXT" --at TIME`')
    every = marks.listed(connected(redis), where)
    if json_:
        click.echo(msgspec.json.encode({"run": run, "marks": every}))
    elif every:
        screen = console()
        screen.print(of_marks(every, width=screen.width))
    else:
        tell(f'producer: run {run} has no marks; `producer mark {run} "TEXT"` sets one')
    return 0


def _set(where: Where, text: str, *, at: str | None, json_: bool) -> int:
    client = connected(where.redis, writes=True)
    done = marks.mark(client, where, text, at=at)
    if json_:
        click.echo(
            msgspec.json.encode({"run": done.run, **as_told(done.mark), "stored": not done.why})
        )
    tell(f"producer: run {done.run} is marked: {done.mark.text}")
    if done.why:
        tell(f"producer: Redis has the mark, and a sink stores it later: {done.why}")
    if done.lost:
        tell(
            "producer: Redis does not know the run: the store has the mark, and Redis gets it "
            f"with `producer resume {done.run}`"
        )
    return 0
