"""Flags that several commands of both programs have, said once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

REDIS = click.option(
    "--redis",
    "-u",
    "--url",
    metavar="URL",
    help="redis://HOST:PORT/DB, rediss://…, unix://PATH, or embedded:DIR for a trial."
    "  [default: HEADRACE_REDIS, RQ_REDIS_URL, localhost:6379]",
)

LOG_LEVEL = click.option(
    "--log-level",
    default="INFO",
    show_default=True,
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"]),
    help="Least severity of what is logged.",
)

NOTIFY = click.option(
    "--notify",
    metavar="CMD|URL",
    help="Tell this command (JSON on stdin) or http(s) address (JSON POST) when a run stalls, "
    "pauses, loses a server or ends. What holds a key belongs into HEADRACE_NOTIFY.",
)


def grace(default_s: float, what: str) -> Callable[[Command], Command]:
    """Give --grace of a process.

    Args:
        default_s: Seconds.
        what: What they are for.
    """
    return click.option(
        "--grace",
        "grace_s",
        type=click.FloatRange(min=0),
        default=default_s,
        show_default=True,
        metavar="S",
        help=f"Seconds that SIGTERM or Ctrl-C leaves for {what}.",
    )


def state_dir(holds: str) -> Callable[[Command], Command]:
    """Give --state-dir of a process.

    Args:
        holds: What is written or looked for there.
    """
    return click.option(
        "--state-dir",
        type=click.Path(path_type=Path),
        default=Path(".headrace"),
        show_default=True,
        metavar="DIR",
        help=f"Where {holds}.",
    )
