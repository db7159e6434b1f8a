"""`producer pause`: stop a run's claims."""

import click
import msgspec

from common.advice import count_of
from common.connect import address_of
from common.crashpoints import reached
from common.errors import ConflictError, StateLostError
from common.last_words import tell
from common.marks.noting import note_of_run
from common.models import Counts
from common.options import REDIS
from common.queue import Runs
from producer.locate import connected, unknown
from producer.options import JSON


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--reason", default="by hand", show_default=True, help="Shown by `status`.")
@REDIS
@JSON
def command(run: str, *, reason: str, redis: str | None, json_: bool) -> int:
    """Start no more prompts of RUN.

    What is at the servers ends as usual, and is kept. A run pauses by itself after 20 faults in a
    row without a success; `status` says so.

    \b
    Example:
        producer pause prompts --reason "the servers get another model"
        producer resume prompts
    """
    client = connected(redis, writes=True)
    address = address_of(client)
    runs = Runs(client, where=address)
    state = runs.state(run)
    if state is None:
        raise StateLostError(unknown(run, address, known=runs.names()))
    if state.cancelled:
        raise ConflictError(f"run {run!r} was cancelled: there is nothing to pause")
    runs.pause(run, reason)
    reached("pause.set")
    if state.paused != reason:
        note_of_run(client, run, "paused", reason)
    counts = runs.counts(run)
    if json_:
        told = {
            "run": run,
            "paused": reason,
            "before": state.paused,
            "in_flight": counts.in_flight,
            "queued": counts.queued,
        }
        click.echo(msgspec.json.encode(told))
    tell(f"producer: {_text(run, counts, reason)}")
    return 0


def _text(run: str, counts: Counts, reason: str) -> str:
    lifted = f"`producer resume {run}` lifts it"
    if not counts.in_flight + counts.queued:
        return f"run {run} is paused ({reason}), though nothing of it is left to do; {lifted}"
    return (
        f"run {run} is paused ({reason}): {count_of(counts.in_flight, 'prompt')} at the servers, "
        f"which end, {counts.queued:,} wait; {lifted}"
    )
