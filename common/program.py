"""The frame of both programs: commands loaded when called, each with all ways to set its flags."""

import difflib
import functools
import importlib
import signal
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem
from typing_extensions import override

from common import completion, flags, settings
from common.errors import ConflictError, UsageError
from common.help import name_values

CONFIG_VARIABLE = f"{flags.PREFIX}_CONFIG"


class Program(click.Group):
    """A group of commands that imports a command's module when the command is asked for.

    Args:
        modules: Command -> module and the name in it.
    """

    def __init__(self, *args: Any, modules: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._modules = modules

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the commands, in the order of the help."""
        return list(self._modules)

    @override
    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a command's name without importing the commands, as their help would need."""
        names = [name for name in self._modules if name.startswith(incomplete)]
        flags_of_group = click.Command.shell_complete(self, ctx, incomplete)
        return [*map(CompletionItem, names), *flags_of_group]

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that was typed, and name the nearest where there is none."""
        typed = args[0]
        if typed not in self._modules and typed.isidentifier():
            near = difflib.get_close_matches(typed, self._modules, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(self._modules)}."
            ctx.fail(f"No such command {typed!r}. {hint}")
        return super().resolve_command(ctx, args)

    @override
    def invoke(self, ctx: click.Context) -> Any:
        """Run what was asked; a reader that has seen enough (`| head`) ends it quietly.

        click would end it with 1, which says that something has failed.
        """
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise SystemExit(128 + signal.SIGPIPE) from None

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command, and give it all ways to set its flags."""
        if cmd_name not in self._modules:
            return None
        module, attribute = self._modules[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            return None
        return prepared(command, program=self.name or "", name=cmd_name, known=self._modules)


def prepared(
    command: click.Command, *, program: str, name: str, known: Iterable[str]
) -> click.Command:
    """Let a command's flags come from the environment and from headrace.toml too.

    Args:
        command: Changed in place, once.
        program: `producer` or `workers`.
        name: The command's.
        known: Names of all commands of the program.
    """
    if any(parameter.name == flags.CONFIG for parameter in command.params):
        return command
    flags.name_variables(command)
    completion.complete_values(command)
    name_values(command)
    command.params.append(_config_option(program, name, tuple(known)))
    if command.callback is not None:
        command.callback = _called(command.callback)
    return command


def values_of(program: Program, name: str, *, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Give what a command would get when called without arguments but our --config.

    For whoever is not started by that command and yet is told by the same settings.

    Args:
        program: That has the command.
        name: The command's.
        defaults: For this caller, where neither environment nor file says anything.

    Raises:
        UsageError: A variable or the file says what cannot be.
    """
    command = program.get_command(click.Context(program), name)
    assert command is not None  # noqa: S101 - callers name a command of their own program
    try:
        with command.make_context(name, config_arguments(), default_map=dict(defaults)) as ctx:
            return dict(ctx.params)
    except click.ClickException as error:
        raise UsageError(f"{error.format_message()} {_origin(error)}".rstrip()) from None


def config_arguments() -> list[str]:
    """Give the arguments by which a command that we start reads the file that we were given."""
    ctx = click.get_current_context(silent=True)
    named = ctx.params.get(flags.CONFIG) if ctx is not None else None
    return [f"--{flags.CONFIG}", named] if named else []


def show(error: click.ClickException) -> None:
    """Print click's error, and which variable or key of the file it is about."""
    error.show()
    if found := _origin(error):
        click.echo(found, err=True)


def _origin(error: click.ClickException) -> str:
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return ""
    option = getattr(error, "param", None)
    if isinstance(option, click.Option) and (place := flags.origin(error.ctx, option)):
        return f"{flags.flag_of(option)} is from {place}"
    return flags.origins(error.ctx, error.message)


def load_settings(
    ctx: click.Context, file: str | None, *, program: str, name: str, known: Iterable[str]
) -> settings.Settings | None:
    """Let headrace.toml say what a command gets where neither flag nor variable does.

    Args:
        ctx: Of the command.
        file: As --config says, None for the one here.
        program: `producer` or `workers`.
        name: The command's.
        known: Names of all commands of the program.

    Returns:
        The file as read, None where there is none.

    Raises:
        UsageError: The file says what cannot be.
    """
    path = settings.find(file)
    if path is None:
        return None
    found = settings.Settings(path)
    values, places = found.values_for(ctx.command, program=program, name=name, known=known)
    flags.note_place(ctx, places)
    ctx.default_map = {**(ctx.default_map or {}), **values}
    return found


def _config_option(program: str, name: str, known: tuple[str, ...]) -> click.Option:
    def load(ctx: click.Context, _parameter: click.Parameter, given: str | None) -> str | None:
        found = load_settings(ctx, given, program=program, name=name, known=known)
        if found is None:
            return None
        if found.holds_open_secret() and not ctx.resilient_parsing:
            click.echo(
                f"{program}: {found.path} holds a password that others on this machine can read: "
                f"chmod 600 {found.path}",
                err=True,
            )
        return str(found.path)

    return click.Option(
        [f"--{flags.CONFIG}"],
        metavar="FILE",
        envvar=CONFIG_VARIABLE,
        # Before the others, whose values may stand in it.
        is_eager=True,
        callback=load,
        help=f"File that sets flags.  [default: {settings.FILE} here, if there is one]",
    )


def _called(callback: Callable[..., Any]) -> Callable[..., Any]:
    """Call a command without --config; an error about a flag says where its value is from."""

    @functools.wraps(callback)
    def call(*args: Any, **kwargs: Any) -> Any:
        ctx = click.get_current_context()
        kwargs.pop(flags.CONFIG, None)
        try:
            return callback(*args, **kwargs)
        except (ConflictError, UsageError) as error:
            if not (found := flags.origins(ctx, str(error))):
                raise
            raise type(error)(f"{error} ({found})") from error.__cause__

    return call
