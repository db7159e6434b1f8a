"""`producer export`: a run's results as one file, in the order of its input."""

import os
import sys

import click

from common.advice import count_of
from common.options import REDIS
from producer.export import Exported, export
from producer.locate import locate
from producer.meter import Meter
from producer.options import ENDPOINT_URL, OUTPUT_IN_PLACE_OF_REDIS, where_of
from producer.outfile import STDOUT


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--to", required=True, metavar="FILE", help="- for stdout; .gz or .zst compresses.")
@click.option(
    "--format",
    "row_format",
    type=click.Choice(["jsonl"]),
    default="jsonl",
    show_default=True,
    envvar="HEADRACE_EXPORT_FORMAT",  # HEADRACE_FORMAT is how a run's shards are written
    help="The only choice: a JSON object a line.",
)
@click.option("--failures", metavar="FILE", help="Also write what failed or was cancelled there.")
@click.option("--partial", is_flag=True, help="End with 0 though not all is completed.")
@OUTPUT_IN_PLACE_OF_REDIS
@ENDPOINT_URL
@REDIS
def command(
    run: str,
    *,
    to: str,
    row_format: str,
    failures: str | None,
    partial: bool,
    output: str | None,
    endpoint_url: str | None,
    redis: str | None,
) -> int:
    """Write the completions of RUN to a file, in input order.

    Each prompt once. Of a run that goes on it writes what is in the store by now. Ends with 1 when
    a prompt of the run has no completion, unless --partial says that this is as wanted.

    \b
    Example:
        producer export prompts --to answers.jsonl
        producer export prompts --to - --failures failed.jsonl | head -n 3
    """
    del row_format  # the only one as yet
    if failures == STDOUT:
        raise click.UsageError("--failures needs a file of its own: stdout is for --to -")
    where = where_of(run, output=output, endpoint_url=endpoint_url, redis=redis)
    record, store = locate(where)
    try:
        told = export(record, store, to=to, failures=failures, meter=Meter)
    except BrokenPipeError:
        # Whoever reads has seen enough; Python would complain once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    click.echo(f"producer: {_text(run, to, told)}", err=True)
    return 0 if told.whole or partial else 1


def _text(run: str, to: str, told: Exported) -> str:
    text = f"wrote {count_of(told.completed, 'completion')} of run {run} to {to}"
    if told.whole:
        return text
    left = told.accepted - told.completed - told.failed
    parts = [f"{left:,} have not ended"] if left else []
    parts += [f"{told.failed:,} failed or were cancelled"] if told.failed else []
    parts += ["more prompts may come"] if not told.sealed else []
    return f"{text}, of {count_of(told.accepted, 'prompt')}: {', '.join(parts)}"
