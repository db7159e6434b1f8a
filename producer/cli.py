"""The `producer` command. Commands live in `producer/commands/`, and are imported when called.

Errors that we raise on purpose become one line on stderr and their exit code; a traceback is a
bug.
"""

import importlib
import importlib.util
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from common.errors import HeadraceError

if TYPE_CHECKING:
    from typing_extensions import override
else:
    # Python 3.11 has none of its own.
    def override(method: Any) -> Any:
        """Mark a method that takes the place of an inherited one."""
        return method


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
    "pause",
    "resume",
    "cancel",
    "runs",
    "forget",
)
"""In the order of their help."""

INTERRUPTED = 130
TERMINATED = 143


class CommandsByName(click.Group):
    """A group that imports a command's module when the command is asked for."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the commands that exist."""
        del ctx
        return [name for name in COMMANDS if importlib.util.find_spec(_module(name))]

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(_module(cmd_name)).command
        # HEADRACE_MAX_TOKENS, not HEADRACE_ENQUEUE_MAX_TOKENS: one name for one setting.
        command.context_settings.setdefault("auto_envvar_prefix", "HEADRACE")
        return command


def _module(name: str) -> str:
    return f"producer.commands.{name}"


@click.group(cls=CommandsByName, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="headrace")
def cli() -> None:
    """Queue prompts for a run, and ask about it.

    Every option may come from the environment as HEADRACE_…: --max-tokens from
    HEADRACE_MAX_TOKENS.

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
        The exit code: `common.errors`, 130 after Ctrl-C, 143 after SIGTERM.
    """
    signal.signal(signal.SIGTERM, _terminate)
    try:
        result: Any = cli.main(args=arguments, prog_name="producer", standalone_mode=False)
    except HeadraceError as error:
        click.echo(f"producer: {error}", err=True)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("producer: interrupted", err=True)
        return INTERRUPTED
    return result if isinstance(result, int) else 0


def _terminate(_number: int, _frame: FrameType | None) -> None:
    # An exception, so that temporary files and progress bars are cleared away.
    raise SystemExit(TERMINATED)
