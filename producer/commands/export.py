"""`producer export`: a run's results as one file."""

import os
import sys

import click

from common.advice import count_of
from common.last_words import tell
from common.options import REDIS
from producer.export import Exported, Order, Target, export
from producer.formats import FORMATS
from producer.locate import locate
from producer.meter import Meter
from producer.options import ENDPOINT_URL, OUTPUT_IN_PLACE_OF_REDIS, where_of
from producer.outfile import is_stdout


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--to", required=True, metavar="FILE", help="- for stdout; .gz or .zst compresses.")
@click.option(
    "--format",
    "row_format",
    type=click.Choice(FORMATS),
    default="jsonl",
    show_default=True,
    envvar="HEADRACE_EXPORT_FORMAT",  # HEADRACE_FORMAT is how a run's shards are written
    help="What the file is for; see above.",
)
@click.option(
    "--order",
    type=click.Choice(["input", "completed"]),
    default="input",
    show_default=True,
    help="As the prompts stand in their files, or as the results came.",
)
@click.option(
    "--failures",
    metavar="FILE",
    help="Also write what failed or was cancelled there, as JSON lines.",
)
@click.option(
    "--no-token-ids", is_flag=True, help="Training files of conversations, whatever the run keeps."
)
@click.option("--partial", is_flag=True, help="End with 0 though not all is in the file.")
@OUTPUT_IN_PLACE_OF_REDIS
@ENDPOINT_URL
@REDIS
def command(
    run: str,
    *,
    to: str,
    row_format: str,
    order: Order,
    failures: str | None,
    no_token_ids: bool,
    partial: bool,
    output: str | None,
    endpoint_url: str | None,
    redis: str | None,
) -> int:
    """Write the completions of RUN to one file, each prompt once.

    Of a run that goes on it writes what is in the store by now, and says how many are missing.
    Ends with 1 when a completion of a prompt of the run is not in the file, unless --partial says
    that this is as wanted. The file appears under its name when it is whole.

    \b
    Formats:
        jsonl        every row as it is in the store
        openai       output file of an OpenAI batch; --failures gets its error file
        specforge    SpecForge's training file: id, conversations, tools
        speculators  what `speculators prepare-data` of vLLM reads
        sharegpt     from/value; reasoning as <think>, calls as <tool_call> in the text
        parquet      flat columns, messages as lists; needs pyarrow

    Of a run enqueued with --keep-token-ids the files of specforge and speculators hold input_ids
    and loss_mask, which both take as they are; --no-token-ids gives conversations.

    Each choice and each sample is a line of its own where a line is a conversation. Completions
    that a format cannot hold (no conversation, no text) are left out and counted.

    \b
    Example:
        producer export prompts --to answers.jsonl
        producer export prompts --to - --failures failed.jsonl | head -n 3
        producer export prompts --format openai --to out.jsonl --failures errors.jsonl
        producer export prompts --format specforge --to train.jsonl
        producer export prompts --format speculators --to train.jsonl
        producer export prompts --format sharegpt --to train.jsonl.gz
        producer export prompts --format parquet --to answers.parquet --order completed
    """
    if failures and is_stdout(failures):
        raise click.UsageError("--failures needs a file of its own: stdout is for --to -")
    target = Target(
        to=to, failures=failures, format=row_format, order=order, token_ids=not no_token_ids
    )
    where = where_of(run, output=output, endpoint_url=endpoint_url, redis=redis)
    record, store = locate(where)
    try:
        told = export(record, store, target, meter=Meter)
    except BrokenPipeError:
        # Whoever reads has seen enough; Python would complain once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    for sentence in (_text(run, to, told), *_asides(told)):
        tell(f"producer: {sentence}")
    return 0 if told.whole or partial else 1


def _text(run: str, to: str, told: Exported) -> str:
    text = f"wrote {count_of(told.written, 'completion')} of run {run} to {to}"
    if told.lines != told.written:
        text = f"{text} as {told.lines:,} lines"
    if told.whole:
        return text
    left = told.accepted - told.completed - told.failed
    parts = [f"{left:,} have not ended or are not stored yet"] if left else []
    parts += [f"{told.failed:,} failed or were cancelled"] if told.failed else []
    parts += [f"{count:,} {why}: left out" for why, count in told.skipped.items()]
    parts += ["more prompts may come"] if not told.sealed else []
    return f"{text}, of {count_of(told.accepted, 'prompt')}: {', '.join(parts)}"


def _asides(told: Exported) -> list[str]:
    if told.skipped:
        return [*told.notes, "what is left out here stands in --format jsonl and parquet"]
    return told.notes
