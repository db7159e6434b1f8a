"""The `producer` command. Commands live in `producer/commands/`, and are imported when called.

Whatever ends one is a line on stderr and an exit code (`common.last_words`); a traceback is a
bug.
"""

import importlib.util
import sys
from collections.abc import Sequence

import click

from common.last_words import run_program
from common.program import Program
from common.stops import end_on_stop

COMMANDS = (
    "enqueue",
    "status",
    "watch",
    "peek",
    "mark",
    "compare",
    "report",
    "verify",
    "export",
    "retry",
    "priority",
    "pause",
    "resume",
    "cancel",
    "runs",
    "forget",
    "config",
    "completion",
)
"""In the order of their help."""

_GOES_ON = "the same call again goes on"
_AFTER_A_STOP = {
    "watch": "the run goes on",
    "export": "the same call again begins anew; no file is left half-written",
    "verify": "nothing is proven; the same call again begins anew",
}
"""What people must know of a command that was stopped, where it is not `_GOES_ON`."""


_MODULES = {
    name: (module, "command")
    for name in COMMANDS
    if importlib.util.find_spec(module := f"producer.commands.{name}")
}


@click.command(
    name="producer",
    cls=Program,
    modules=_MODULES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="headrace")
def cli() -> None:
    """Queue prompts for a run, and ask about it.

    Every flag may also come from the environment (--max-tokens from HEADRACE_MAX_TOKENS) or from
    headrace.toml, where the command is called: shared keys (redis, output, endpoint_url) at the
    top, the others in the table of their command. The command line wins, then the environment.

    \b
    Example:
        producer enqueue prompts.jsonl --output s3://bucket/prefix --max-tokens 4096
        producer status prompts
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: `common.errors`; 128 and the signal's number after one that asks to stop,
        130 after Ctrl-C and 143 after SIGTERM.
    """
    end_on_stop()
    said = sys.argv[1:] if arguments is None else arguments
    return run_program(
        "producer",
        lambda: cli.main(args=arguments, prog_name="producer", standalone_mode=False),
        stopped=next((_AFTER_A_STOP[word] for word in said if word in _AFTER_A_STOP), _GOES_ON),
    )
