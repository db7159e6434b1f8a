"""`producer forget`: take a run out of Redis."""

from collections.abc import Iterator

import click
import msgspec

from common.advice import count_of
from common.last_words import tell
from common.options import REDIS
from producer.confirm import confirmed
from producer.forget import Forgotten, Plan, forget, plan
from producer.locate import connected
from producer.meter import Meter
from producer.options import JSON

REFUSED = 1


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--yes", is_flag=True, help="Do not ask; needed where there is no terminal.")
@click.option("--lose-results", is_flag=True, help="Also results that are not in the store yet.")
@REDIS
@JSON
def command(run: str, *, yes: bool, lose_results: bool, redis: str | None, json_: bool) -> int:
    """Take RUN out of Redis; its store stays as it is.

    Removes what Redis holds of this run and nothing else. Refuses while worker groups are at work
    on it, and where results are not in the store yet. For a day its late results are dropped, and
    no new run takes its name; `producer resume RUN --output URL` brings it back from the store.

    \b
    Example:
        producer forget prompts
        producer forget prompts --yes --json
    """
    client = connected(redis, writes=True)
    asked = plan(client, run, lose_results=lose_results)
    # What was begun can only be ended.
    if asked.record is not None and not confirmed(_question(asked), yes=yes):
        tell("producer: nothing was changed")
        return REFUSED
    told = forget(client, asked, lose_results=lose_results, meter=Meter)
    if json_:
        click.echo(msgspec.json.encode(told))
    for line in _lines(told):
        tell(f"producer: {line}")
    return 0


def _question(asked: Plan) -> str:
    left = asked.counts.queued + asked.counts.in_flight
    parts = [f"{left:,} not done"] if left else []
    if asked.look.waiting:
        parts.append(f"{count_of(asked.look.waiting, 'result')} that only Redis has")
    if asked.look.set_aside:
        entries = "entry" if asked.look.set_aside == 1 else "entries"
        parts.append(f"{asked.look.set_aside:,} {entries} set aside")
    among = f", {' and '.join(parts)}" if parts else ""
    return (
        f"forget run {asked.run} ({count_of(asked.counts.total, 'prompt')}{among})? Its store "
        "stays as it is."
    )


def _lines(told: Forgotten) -> Iterator[str]:
    if told.already:
        yield f"run {told.run} was forgotten before: nothing was left to do"
        return
    yield f"run {told.run} is forgotten: {count_of(told.prompts, 'prompt')}"
    if told.lost_results:
        yield f"{count_of(told.lost_results, 'result')} went with it"
    if told.output:
        yield (
            f"{told.output} is as it was: `producer resume {told.run} --output {told.output}` "
            "brings the run back"
        )
