"""Flags that several producer commands have, said once, and what they mean together."""

import click

from common import flags
from producer.locate import Where

RUN_MARK = "{run}"
"""In an output: stands for the run's name, so that one setting does for all runs."""

PRIORITY = click.IntRange(-9, 9)
"""What a run's place in the order of claims may be."""

JSON = click.option("--json", "json_", is_flag=True, help="Print one JSON object on stdout.")

ALL_GPUS = click.option(
    "--all-gpus", is_flag=True, help="A line for each worker group, however many."
)

ENDPOINT_URL = click.option(
    "--endpoint-url", metavar="URL", help="Another S3 than Amazon's, for --output."
)

OUTPUT_IN_PLACE_OF_REDIS = click.option(
    "--output",
    metavar="URL",
    help="Where its results are; then Redis is not asked. As a setting: if Redis does not know.",
)

OUTPUT_IF_LOST = click.option(
    "--output", metavar="URL", help="Where its results are, if Redis has lost the run."
)


def for_run(output: str | None, run: str) -> str | None:
    """Write a run's name into an output that holds {run}."""
    return output and output.replace(RUN_MARK, run)


def where_of(
    run: str, *, output: str | None, endpoint_url: str | None, redis: str | None
) -> Where:
    """Say where to look for a run, as the flags of a command say.

    An output on the command line is this run's. One in the environment or in headrace.toml holds
    for many runs and so proves nothing of this one: it is tried where nobody knows the run.
    """
    output = for_run(output, run)
    ctx = click.get_current_context(silent=True)
    if output is None or ctx is None or flags.is_given(ctx, "output"):
        return Where(run=run, output=output, endpoint_url=endpoint_url, redis=redis)
    return Where(run=run, redis=redis, else_output=output, else_endpoint_url=endpoint_url)
