"""`producer retry`: give failed prompts a new try."""

from collections.abc import Iterator, Mapping

import click
import msgspec

from common.advice import count_of
from common.last_words import tell
from common.options import REDIS
from producer.locate import connected
from producer.options import ENDPOINT_URL, JSON, OUTPUT_IF_LOST, where_of
from producer.retry import Retried, retry, wanted


@click.command()
@click.argument("run", metavar="RUN")
@click.option(
    "--reason",
    "reasons",
    multiple=True,
    metavar="R",
    help="Only those that failed for it: a word (timeout), a status (413), a class (5xx).",
)
@click.option("--cancelled", is_flag=True, help="Also prompts whose job was cancelled in RQ.")
@click.option("--id", "ids", multiple=True, metavar="ID", help="Only the prompt with this id.")
@click.option("--dry-run", is_flag=True, help="Only count them, by reason.")
@OUTPUT_IF_LOST
@ENDPOINT_URL
@REDIS
@JSON
def command(
    run: str,
    *,
    reasons: tuple[str, ...],
    cancelled: bool,
    ids: tuple[str, ...],
    dry_run: bool,
    output: str | None,
    endpoint_url: str | None,
    redis: str | None,
    json_: bool,
) -> int:
    """Give prompts of RUN that failed a new try, all of them or some.

    What is completed stays. A run that had ended goes on, and ends anew. --reason and --id may be
    repeated; any of them will do. The same call again finds what has failed since.

    \b
    Example:
        producer retry prompts --dry-run
        producer retry prompts --reason timeout --reason 5xx
    """
    where = where_of(run, output=output, endpoint_url=endpoint_url, redis=redis)
    asked = wanted(reasons, ids, cancelled=cancelled)
    told = retry(
        connected(redis, writes=True),
        where,
        asked,
        dry_run=dry_run,
        say=lambda text: tell(f"producer: {text}"),
    )
    if json_:
        click.echo(msgspec.json.encode(told))
    for line in _lines(told, some=bool(reasons or ids)):
        tell(f"producer: {line}")
    return 0


def _lines(told: Retried, *, some: bool) -> Iterator[str]:
    run, matched = told.run, sum(told.matched.values())
    there = told.failed + told.cancelled
    parts = [f"{told.failed:,} failed"] if told.failed or not told.cancelled else []
    parts += [f"{told.cancelled:,} cancelled"] if told.cancelled else []
    reasons = f" ({_counted(told.by_reason)})" if there else ""
    if told.dry_run or not matched:
        yield f"run {run}: {', '.join(parts)}{reasons}"
    if told.dry_run:
        yield f"{count_of(matched, 'prompt')} would get a new try"
    elif not matched:
        yield "none of them was asked for" if some and there else "there is nothing to try again"
    else:
        yield (
            f"run {run}: {count_of(told.retried, 'prompt')} of {there:,} "
            f"{'gets' if told.retried == 1 else 'get'} a new try ({_counted(told.matched)})"
        )
    if told.cancelled and matched < there and not told.matched.get("cancelled"):
        yield f"{told.cancelled:,} were cancelled: --cancelled tries them too"
    if told.bare:
        yield (
            f"{told.bare:,} have lost their request, in their row and in {told.output}/inputs: "
            "enqueue their file again with --retry-failed"
        )
    if told.retried and told.paused is not None:
        yield f"the run is paused ({told.paused}): `producer resume {run}` lifts it"


def _counted(by_reason: Mapping[str, int]) -> str:
    ordered = sorted(by_reason.items(), key=lambda each: (-each[1], each[0]))
    return ", ".join(f"{reason} {count:,}" for reason, count in ordered)
