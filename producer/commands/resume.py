"""`producer resume`: make a run go on."""

from collections.abc import Iterator

import click
import msgspec

from common.last_words import tell
from common.options import REDIS
from producer.locate import connected
from producer.options import ENDPOINT_URL, JSON, OUTPUT_IF_LOST, where_of
from producer.resume import Resumed, resume


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--seal", is_flag=True, help="Also close producers that died: no more will come.")
@OUTPUT_IF_LOST
@ENDPOINT_URL
@REDIS
@JSON
def command(
    run: str,
    *,
    seal: bool,
    output: str | None,
    endpoint_url: str | None,
    redis: str | None,
    json_: bool,
) -> int:
    """Lift the pause of RUN, and put back what was lost of it.

    What Redis or RQ's tools have lost comes from the store; a Redis that does not know the run
    gets all of it. What is done is not done again, and failed prompts stay failed: `producer
    retry RUN` tries them again. The same call again changes nothing.

    \b
    Example:
        producer resume prompts
        producer resume prompts --output s3://bucket/prefix --redis redis://new-host:6379
    """
    where = where_of(run, output=output, endpoint_url=endpoint_url, redis=redis)
    client = connected(redis, writes=True, create=output is not None)
    told = resume(client, where, seal=seal, say=lambda text: tell(f"producer: {text}"))
    if json_:
        click.echo(msgspec.json.encode(told))
    for line in _lines(told):
        tell(f"producer: {line}")
    return 1 if told.notes else 0


def _lines(told: Resumed) -> Iterator[str]:
    """Tell people what was done."""
    done = [
        ("was not in Redis and is there again", told.adopted),
        (f"it is no longer paused ({told.lifted})", told.lifted),
        (f"{told.added:,} accepted prompts were missing and are queued", told.added),
        (f"{told.taught:,} prompts were not known to have ended", told.taught),
        (f"{told.forgotten:,} results were nowhere and are queued again", told.forgotten),
        (f"{told.relisted:,} jobs were in no list and are queued again", told.relisted),
        (f"{told.restored:,} jobs had lost their request and have it again", told.restored),
        (f"{told.cancelled:,} jobs cancelled in RQ have ended", told.cancelled),
        (f"{told.closed:,} open producers were closed", told.closed),
    ]
    lines = [text for text, holds in done if holds]
    yield from (f"run {told.run}: {text}" for text in lines or ["nothing was missing"])
    yield from told.notes
    for producer in told.open_producers:
        yield (
            f"the producer {producer} began and did not end: the same enqueue again ends it and "
            f"adds what it had not accepted; `producer resume {told.run} --seal` goes without that"
        )
    if not told.sealed and not told.open_producers:
        yield (
            "more prompts are awaited (--keep-open): the run ends after an enqueue without it, or "
            f"`producer resume {told.run} --seal`"
        )
