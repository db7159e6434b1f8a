"""`producer peek`: a few prompts with their answers, while the run goes."""

from collections.abc import Sequence

import click
import msgspec

from common.advice import count_of
from common.errors import BackendError, RedisUnusableError, StateLostError, UsageError
from common.last_words import tell
from common.options import REDIS
from common.quality import FLAGS
from producer.locate import Where, connected, known_in_redis, locate, open_output, read_record
from producer.meter import Meter
from producer.options import ENDPOINT_URL, OUTPUT_IN_PLACE_OF_REDIS, where_of
from producer.peek import Found, Source, Wanted, find, keys_of, take


@click.command()
@click.argument("run", metavar="RUN")
@click.option(
    "-n",
    "--count",
    type=click.IntRange(min=1, max=1_000),
    default=5,
    show_default=True,
    help="How many at most.",
)
@click.option("--id", "prompt_id", metavar="ID", help="Only the prompt with this id.")
@click.option(
    "--sample",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="With --id: which sample of it.",
)
@click.option("--failed", is_flag=True, help="Only what failed or was cancelled, and why.")
@click.option("--flag", type=click.Choice(list(FLAGS)), help="Only answers with this flag.")
@click.option("--spread", is_flag=True, help="From all over the run, instead of the newest.")
@click.option(
    "--chars",
    type=click.IntRange(min=0),
    default=800,
    show_default=True,
    help="Of each text so many characters; 0 for all.",
)
@click.option("--json", "json_", is_flag=True, help="Print one JSON object with whole rows.")
@OUTPUT_IN_PLACE_OF_REDIS
@ENDPOINT_URL
@REDIS
def command(
    run: str,
    *,
    count: int,
    prompt_id: str | None,
    sample: int,
    failed: bool,
    flag: str | None,
    spread: bool,
    chars: int,
    json_: bool,
    output: str | None,
    endpoint_url: str | None,
    redis: str | None,
) -> int:
    """Show a few prompts of RUN with their answers, the newest first.

    Also what no sink has stored yet, so it works from the first answer on. Reads a few objects,
    never the whole run. What a terminal would act on is shown as its number (\\x1b). Ends with 1
    when there is nothing to show.

    \b
    Reading a line:
        134 -> 2,019 tokens   of the prompt, of the answer with its thinking
        truncated             cut off at its token limit
        repeating             ends in a loop
        same_answer           the long text of another prompt's answer
        unparsed_reasoning    its thinking stands in the content: no reasoning parser
        reasoning_cut         cut off before it began to answer
        prompt_cut            the server cut the prompt
        clamped               limit lowered to what the context leaves

    \b
    Example:
        producer peek prompts
        producer peek prompts --id q17 --chars 0
        producer peek prompts -n 20 --flag truncated --spread
    """
    if flag and failed:
        raise click.UsageError("--flag is of answers: failures have none")
    where = where_of(run, output=output, endpoint_url=endpoint_url, redis=redis)
    source = _source(where)
    if prompt_id is None:
        wanted = Wanted(count=count, failed=failed, flag=flag, spread=spread)
        found = take(source, wanted)
    else:
        one = find(source, prompt_id, sample, meter=Meter)
        found = [one] if one else []
    if json_:
        rows = [{"from": each.where, "row": each.row} for each in found]
        click.echo(msgspec.json.encode({"run": run, "rows": rows}))
    else:
        _show(found, chars)
    if found:
        return 0
    if prompt_id is None:
        tell(f"producer: {_nothing(source, failed=failed, flag=flag)}")
        return 1
    tell(f"producer: {_not_ended(source, prompt_id, sample)}")
    return 1


def _source(where: Where) -> Source:
    """Find what there is to look into: a store that this machine cannot read is no hindrance."""
    if where.output is not None:
        record, store = locate(where)
        return Source(record=record, store=store)
    try:
        known = known_in_redis(where)
    except RedisUnusableError:
        known = None  # said, with the way out, by what comes next
    if known is None:
        record, store = locate(where)
        return Source(record=record, store=store)
    client = connected(where.redis)
    try:
        _, store = read_record(open_output(known.output, known.endpoint_url), where.run, known)
    except (BackendError, StateLostError) as error:
        tell(f"producer: only what waits in Redis is shown: {error}")
        return Source(record=known, client=client)
    return Source(record=known, client=client, store=store)


def _show(found: Sequence[Found], chars: int) -> None:
    # rich takes longer to import than --json to end.
    from producer.peek_view import of_found  # noqa: PLC0415
    from producer.screen import console  # noqa: PLC0415

    screen = console()
    for each in found:
        screen.print(of_found(each, width=screen.width, chars=chars))


def _nothing(source: Source, *, failed: bool, flag: str | None) -> str:
    """Say why there is nothing to show."""
    run = source.record.run
    if failed:
        return f"run {run}: no failure was found"
    if flag is not None:
        return f"run {run}: none of the answers that were looked at is {flag}"
    if source.client is None:
        return f"run {run} has no answers in its store yet"
    from common.queue import Runs  # noqa: PLC0415

    counts = Runs(source.client).counts(run)
    return (
        f"run {run} has no answers yet: {count_of(counts.in_flight, 'request')} in flight, "
        f"{counts.queued:,} queued; `producer status {run}` says what it waits for"
    )


def _not_ended(source: Source, prompt_id: str, sample: int) -> str:
    """Say how a prompt stands that has no record.

    Raises:
        UsageError: The run has no such prompt.
    """
    run = source.record.run
    if source.client is None:
        return f"the store has no record of a prompt {prompt_id!r} of run {run}"
    from common.queue import Ledger  # noqa: PLC0415

    ledger = Ledger(source.client, source.record)
    entries = [entry for entry in ledger.lookup(keys_of(run, prompt_id, sample)) if entry]
    if not entries:
        raise UsageError(f"run {run} has no prompt with the id {prompt_id!r}, sample {sample}")
    if entries[0].state == "queued":
        return f"prompt {prompt_id!r} of run {run} has not ended yet: it is queued or in flight"
    return f"prompt {prompt_id!r} of run {run} is {entries[0].state}; its row was not found"
