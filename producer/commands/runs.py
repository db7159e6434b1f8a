"""`producer runs`: what runs there are."""

import time
from typing import Any

import click
import msgspec

from common import connect, snapshot
from common.last_words import tell
from common.options import REDIS
from common.queue import Groups, Runs
from producer.locate import connected
from producer.options import JSON
from producer.screen import show


@click.command()
@JSON
@REDIS
def command(*, json_: bool, redis: str | None) -> int:
    """List the runs of this Redis, in the order of claims.

    \b
    Example:
        producer runs
    """
    client = connected(redis)
    where = connect.address_of(client)
    groups = Groups(client, where=where).fresh()
    found = [
        snapshot.read(client, name, groups=groups) for name in Runs(client, where=where).names()
    ]
    every = [read for read in found if read is not None]
    if json_:
        click.echo(msgspec.json.encode({"runs": [_brief(read) for read in every]}))
    elif every:
        show([read.figures() for read in every], one=False)
    else:
        tell("producer: there is no run here; `producer enqueue FILE` makes one")
    return 0


def _brief(read: snapshot.Snapshot) -> dict[str, Any]:
    figures = read.figures()
    names = ("run", "status", "total", "completed", "failed", "cancelled", "output")
    age_s = max(time.time() - read.created_ms / 1000, 0.0)
    return {
        **{name: figures[name] for name in names},
        "created_at": read.record.created_at,
        "age_hours": round(age_s / 3600, 4),
    }
