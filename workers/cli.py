"""The command `workers`: worker groups, sinks, the simulator."""

import importlib
import sys
from typing import NoReturn

import click
from typing_extensions import override

from common.errors import HeadraceError

_COMMANDS = {
    "simulate": "workers.simulator.command",
    "sink": "workers.commands.sink",
    "start": "workers.commands.start",
}
"""Command -> the module that has it: imported when it is called, so that `--help` is quick."""


class _Lazy(click.Group):
    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = _COMMANDS.get(cmd_name)
        if module is None:
            return None
        command = getattr(importlib.import_module(module), cmd_name)
        return command if isinstance(command, click.Command) else None


@click.command(
    cls=_Lazy,
    context_settings={"auto_envvar_prefix": "HEADRACE", "help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="headrace")
def cli() -> None:
    """Serve queued prompts: worker groups beside SGLang servers, sinks to the store.

    \b
    Begin with:
        workers start --gpu 0-7        worker groups, one a GPU
        workers sink                   results to the store
    """


def main() -> NoReturn:
    """Run the command; an error of ours is one line on stderr and its own exit code."""
    try:
        cli(standalone_mode=False)
    except HeadraceError as error:
        click.echo(f"workers: {error}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.exceptions.Abort:
        sys.exit(130)
    sys.exit(0)


if __name__ == "__main__":
    main()
