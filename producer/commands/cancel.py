"""`producer cancel`: end a run for good."""

from collections.abc import Iterator

import click
import msgspec

from common.advice import count_of
from common.last_words import tell
from common.options import REDIS
from producer.cancel import Cancelled, Plan, cancel, connected_or_marked, plan
from producer.confirm import confirmed
from producer.meter import Meter
from producer.options import ENDPOINT_URL, JSON, OUTPUT_IF_LOST, where_of

REFUSED = 1


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--yes", is_flag=True, help="Do not ask; needed where there is no terminal.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    default=20.0,
    show_default=True,
    metavar="S",
    help="How long to wait for what is at the servers; a sink ends the rest.",
)
@OUTPUT_IF_LOST
@ENDPOINT_URL
@REDIS
@JSON
def command(
    run: str,
    *,
    yes: bool,
    wait_s: float,
    output: str | None,
    endpoint_url: str | None,
    redis: str | None,
    json_: bool,
) -> int:
    """End RUN for good: what is not done of it ends as cancelled.

    What is completed stays. Requests at the servers are aborted within some seconds, unless their
    answer comes first. The run cannot go on afterwards; `producer pause` only stops it. The same
    call again goes on where one was interrupted, and changes nothing of a run that has ended.

    \b
    Example:
        producer cancel prompts
        producer cancel prompts --yes --json
    """
    where = where_of(run, output=output, endpoint_url=endpoint_url, redis=redis)
    client = connected_or_marked(where, marks=yes)
    asked = plan(client, where)
    if not (asked.finished or asked.already or confirmed(_question(asked), yes=yes)):
        tell("producer: nothing was changed")
        return REFUSED
    told = cancel(
        client,
        asked,
        wait_s=wait_s,
        meter=Meter,
        say=lambda text: tell(f"producer: {text}"),
    )
    if json_:
        click.echo(msgspec.json.encode(told))
    for line in _lines(told):
        tell(f"producer: {line}")
    return 0


def _question(asked: Plan) -> str:
    run, counts = asked.record.run, asked.counts
    if counts is None:
        return f"cancel run {run} for good? Redis does not know it; {asked.store.url} does."
    return (
        f"cancel run {run} for good? {count_of(counts.queued, 'prompt')} waiting and "
        f"{counts.in_flight:,} at the servers end as cancelled, {counts.completed:,} completed "
        "stay."
    )


def _lines(told: Cancelled) -> Iterator[str]:
    run = told.run
    parts = [("completed", told.completed), ("failed", told.failed), ("cancelled", told.cancelled)]
    counts = ", ".join(f"{count:,} {word}" for word, count in parts if count)
    if told.finished:
        yield f"run {run} has ended by itself ({counts}): there is nothing to cancel"
        return
    had = " already" if told.already and not told.ended else ""
    yield (
        f"run {run} is cancelled{had}: {count_of(told.total, 'prompt')}"
        f"{': ' if counts else ''}{counts}"
    )
    if told.left == "in_flight":
        yield (
            f"{told.in_flight + told.queued:,} are at the servers or were a moment ago: a sink, "
            "or the same call again, ends them when their worker groups have let go"
        )
    elif told.left == "no_room":
        yield (
            f"{told.queued:,} have not ended yet: their records wait for room in the result "
            "streams, and a sink ends them as it makes room"
        )
    elif told.left == "lost":
        yield (
            f"{told.queued:,} prompts have lost their request, in Redis and in {told.output}: "
            "put the objects of its inputs/ back and call this again"
        )
    if (told.waiting or told.left) and not told.sinks:
        yield f"{told.waiting:,} records wait for a sink and none runs: `workers sink` stores them"
