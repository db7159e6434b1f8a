"""The command `config` of both programs: which setting holds, and where it is from."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
from click.core import ParameterSource, augment_usage_errors

from common import flags
from common.last_words import tell
from common.program import Program, load_settings

OTHER_VARIABLES = ("API_KEY", "CONFIG", "CRASH_AT", "HOST", "TIMING")
"""HEADRACE_ and these are no flag's."""


_DEFAULT = "default"


class Setting(NamedTuple):
    """One flag of one command."""

    command: str
    flag: str
    value: str
    origin: str


def command_for(program: Program) -> click.Command:
    """Make the command `config` of a program."""
    name = program.name or ""

    @click.command("config", help=_HELP.format(name=name))
    @click.argument("of", required=False, metavar="[COMMAND]")
    @click.pass_context
    def config(ctx: click.Context, of: str | None) -> int:
        names = program.list_commands(ctx)
        if of is not None and of not in names:
            raise click.BadParameter(f"there is no command {of!r}: {', '.join(names)}")
        found = [
            setting
            for each in ([of] if of else names)
            for setting in settings_of(program, each, file=ctx.params[flags.CONFIG])
            if of or setting.origin != _DEFAULT
        ]
        for line in _lines(found, with_commands=of is None):
            click.echo(line)
        if not found:
            tell(f"{name}: nothing is set: no headrace.toml here, and no variable")
        if of is None and (unread := sorted(_unread(program))):
            tell(f"{name}: no flag of {name} reads {', '.join(unread)}")
        return 0

    return config


def settings_of(program: Program, name: str, *, file: str | None) -> Iterator[Setting]:
    """Give what each flag of a command would be if nothing were typed.

    Args:
        program: That has the command.
        name: The command's.
        file: headrace.toml, None where there is none.

    Raises:
        UsageError: The file says what cannot be.
        click.BadParameter: As that, or a variable does.
    """
    group = click.Context(program)
    command, known = program.get_command(group, name), program.list_commands(group)
    assert command is not None  # noqa: S101 - callers take names from the program's list
    with click.Context(command, info_name=f"{program.name} {name}") as ctx:
        load_settings(ctx, file, program=program.name or "", name=name, known=known)
        for option in flags.options_of(command).values():
            with augment_usage_errors(ctx, param=option):
                value, source = option.consume_value(ctx, {})
                ctx.set_parameter_source(str(option.name), source)
                if source is not ParameterSource.DEFAULT:
                    value = option.process_value(ctx, value)
            # Without a default click gives a mark of its own.
            plain = isinstance(value, str | int | float | list | tuple | Path) and value != ()
            text = flags.shown(option, value) if plain else "-"
            origin = flags.origin(ctx, option) or _DEFAULT
            yield Setting(name, flags.flag_of(option), text, origin)


def _lines(found: list[Setting], *, with_commands: bool) -> Iterator[str]:
    """Write settings in columns; one that several commands have alike stands once."""
    together: dict[tuple[str, str, str], list[str]] = {}
    for setting in found:
        together.setdefault(setting[1:], []).append(setting.command)
    rows = [(*key, ", ".join(names)) for key, names in together.items()]
    widths = [max((len(row[at]) for row in rows), default=0) for at in range(3)]
    for row in rows:
        padded = [text.ljust(width) for text, width in zip(row, widths, strict=False)]
        yield "  ".join([*padded, row[3]] if with_commands else padded).rstrip()


def _unread(program: Program) -> Iterator[str]:
    ctx = click.Context(program)
    read = {f"{flags.PREFIX}_{name}" for name in OTHER_VARIABLES}
    for name in program.list_commands(ctx):
        command = program.get_command(ctx, name)
        for option in flags.options_of(command).values() if command else ():
            read.update(flags.variables_of(option))
    for name in os.environ:
        if name.startswith(f"{flags.PREFIX}_") and name not in read:
            yield name


_HELP = """Show what environment and headrace.toml set.

Flag, value, where it is from, and the commands that it is for. With COMMAND: all flags of that
one, with their defaults. Secrets are not shown. Ends with 2 when a setting is wrong.

\b
Example:
    {name} config
    {name} config --config other.toml
"""
