"""How a command's help reads: long lists of flags in sections, numbers named N, not INTEGER."""

from collections.abc import Mapping
from typing import Any

import click
from typing_extensions import override

from common import flags

Sections = Mapping[str, str]
"""Heading -> keys of flags, as in headrace.toml, with spaces between."""


class Sectioned(click.Command):
    """A command whose flags stand in the help by what they are about.

    Args:
        sections: In their order; a flag that is in none stands at the end, so none is forgotten.
    """

    def __init__(self, *args: Any, sections: Sections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections

    @override
    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See click."""
        left = {
            flags.key_of(parameter): record
            for parameter in self.get_params(ctx)
            if isinstance(parameter, click.Option)
            and (record := parameter.get_help_record(ctx)) is not None
        }
        for heading, keys in self.sections.items():
            if records := [left.pop(key) for key in keys.split() if key in left]:
                with formatter.section(heading):
                    formatter.write_dl(records)
        with formatter.section("Others"):
            formatter.write_dl(list(left.values()))


def name_values(command: click.Command) -> None:
    """Call a number N or X in the help where the command has no better word."""
    for parameter in command.params:
        if parameter.metavar is not None or not isinstance(parameter, click.Option):
            continue
        if isinstance(parameter.type, click.types.IntParamType):
            parameter.metavar = "N"
        elif isinstance(parameter.type, click.types.FloatParamType):
            parameter.metavar = "X"
