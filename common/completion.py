"""What a shell completes beside commands and flags: files, directories, names of runs."""

import threading
from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class
from typing_extensions import override

SHELLS = ("bash", "zsh", "fish")

RUN_LIMIT_S = 0.5
"""A shell waits for nothing longer: where Redis does not answer by then, no run is named."""

_FILE_MARKS = ("FILE", "FILES...")


class RunName(click.types.StringParamType):
    """The name of a run; those that Redis knows are completed."""

    @override
    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """See click."""
        return [
            CompletionItem(name)
            for name in known_runs(ctx.params.get("redis"))
            if name.startswith(incomplete)
        ]


class PlaceName(click.types.StringParamType):
    """A file or a directory that need not be one: `-`, an address."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    @override
    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """See click."""
        return [CompletionItem(incomplete, type=self._kind)]


def complete_values(command: click.Command) -> None:
    """Let the shell complete a command's values by what they are called."""
    for parameter in command.params:
        if type(parameter.type) is not click.types.StringParamType:
            continue
        if parameter.name in {"run", "runs"}:
            parameter.type = RunName()
        elif parameter.metavar in _FILE_MARKS:
            parameter.type = PlaceName("file")
        elif parameter.name == "output":
            parameter.type = PlaceName("dir")


def known_runs(redis: str | None) -> list[str]:
    """Give the names of all runs, or none where Redis does not say so at once.

    Args:
        redis: As `--redis` or the settings say.
    """
    found: list[str] = []

    def ask() -> None:
        # Whoever only wants to type must not see why there is nothing to choose from.
        try:
            found.extend(_runs_at(redis))
        except Exception:  # noqa: BLE001
            found.clear()

    # Looking up a host may take minutes, and nothing ends that but the end of the process.
    asking = threading.Thread(target=ask, name="runs", daemon=True)
    asking.start()
    asking.join(RUN_LIMIT_S * 3)
    return [] if asking.is_alive() else sorted(found)


def _runs_at(redis: str | None) -> list[str]:
    # Only this one question needs Redis' client.
    from common import connect  # noqa: PLC0415
    from common.embedded import address, is_home  # noqa: PLC0415
    from common.queue import Runs  # noqa: PLC0415

    url = connect.redis_url(redis)
    if url.startswith("embedded:"):
        home = Path(url.removeprefix("embedded:")).expanduser().resolve()
        if not is_home(home):
            return []
        url = address(home)  # a server that is not running is not started for this
    with connect.impatient_client(url, RUN_LIMIT_S) as client:
        return Runs(client).names()


def command_for(program: click.Group) -> click.Command:
    """Make the command `completion` of a program."""
    name = program.name or ""

    @click.command("completion", help=_HELP.format(name=name))
    @click.argument("shell", type=click.Choice(SHELLS))
    def completion(shell: str) -> None:
        kind = get_completion_class(shell)
        assert kind is not None  # noqa: S101 - click has these three
        click.echo(kind(program, {}, name, f"_{name.upper()}_COMPLETE").source())

    return completion


_HELP = """Print what lets your shell complete this program.

It completes commands, flags, choices, files, and the names of runs, which it asks Redis for.

\b
Example:
    {name} completion bash >> ~/.bashrc
    {name} completion zsh >> ~/.zshrc
    {name} completion fish > ~/.config/fish/completions/{name}.fish
"""
