"""`producer verify`: prove a run from its store."""

import sys
import time
from typing import Literal

import click

from common.errors import InputError
from common.harmless import harmless
from common.options import REDIS
from producer.findings import Findings
from producer.locate import locate, waits_of_run_at_work
from producer.meter import Meter
from producer.options import ENDPOINT_URL, OUTPUT_IN_PLACE_OF_REDIS, where_of
from producer.prompts.rows import RowRules
from producer.verify import FileCheck, as_json, as_text, verify


@click.command()
@click.argument("run", metavar="RUN")
@OUTPUT_IN_PLACE_OF_REDIS
@ENDPOINT_URL
@REDIS
@click.option(
    "--input",
    "files",
    multiple=True,
    metavar="FILE",
    help="Also see that the run has every prompt of this file; may be repeated.",
)
@click.option("--id-field", metavar="NAME", help="For --input, as it was given to enqueue.")
@click.option("--raw-prompt", is_flag=True, help="For --input, as it was given to enqueue.")
@click.option("--private-addresses", is_flag=True, help="For --input, as it was given to enqueue.")
@click.option(
    "--turns",
    type=click.Choice(["last", "all"]),
    help="For --input, as it was given to enqueue.",
)
@click.option(
    "--samples",
    type=click.IntRange(1, 100_000),
    default=1,
    metavar="N",
    show_default=True,
    help="For --input, likewise: every row has so many samples.",
)
@click.option("--json", "json_", is_flag=True, help="Print one JSON object with all findings.")
def command(
    run: str,
    *,
    output: str | None,
    endpoint_url: str | None,
    redis: str | None,
    files: tuple[str, ...],
    id_field: str | None,
    raw_prompt: bool,
    private_addresses: bool,
    turns: Literal["last", "all"] | None,
    samples: int,
    json_: bool,
) -> int:
    """Prove from the store that RUN lacks and doubles nothing.

    Every prompt has exactly one result, its own. Reads every object: accepted prompts, results,
    lists of keys, manifests. Ends with 0 only if all is completed and proven; with 1 it names the
    keys that are missing, doubled or altered.

    \b
    Example:
        producer verify prompts
        producer verify prompts --output s3://bucket/prefix --input prompts.jsonl
    """
    began = time.monotonic()
    where = where_of(run, output=output, endpoint_url=endpoint_url, redis=redis)
    record, store = locate(where)
    rules = RowRules(
        id_field=id_field,
        raw_prompt=raw_prompt,
        private_addresses=private_addresses,
        turns=turns,
        model=record.params.model,
        max_tokens_given=record.params.max_tokens is not None,
    )
    check = FileCheck(files=files, rules=rules, samples=samples) if files else None
    with Findings(keep_all=json_) as findings:
        verdict = verify(record, store, findings, check=check, meter=Meter)
        verdict.seconds = time.monotonic() - began
        if set(findings.counts) <= {"missing"} and not verdict.proven and where.output is None:
            verdict.waits = waits_of_run_at_work(record, redis)
        if verdict.file is not None and verdict.file.refused:
            raise InputError(verdict.file.refused)
        if json_:
            for piece in as_json(verdict):
                sys.stdout.buffer.write(piece)
        else:
            for line in as_text(verdict):
                click.echo(harmless(line))
    return 0 if verdict.done else 1
