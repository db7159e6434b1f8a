"""A flag's other names: its environment variable, its key in headrace.toml; where a value is from.

    --max-tokens    HEADRACE_MAX_TOKENS    max_tokens = 4096 in the table [producer.enqueue]

`common.program` gives every command these when it loads it, so a new flag needs nothing of its
own. Click settles the order: command line, environment, file (its `default_map`), default.
"""

import os
import re
from typing import Any

import click
from click.core import ParameterSource

PREFIX = "HEADRACE"
CONFIG = "config"
"""Name of the flag that every command has for the file."""

ALSO_READ = {"redis": ("RQ_REDIS_URL",)}
"""Variables of other programs that a flag reads after its own."""

_PLACES = "headrace.places"


def options_of(command: click.Command) -> dict[str, click.Option]:
    """Give a command's flags by their keys; --config and --help, which no file can set, not."""
    return {
        key_of(parameter): parameter
        for parameter in command.params
        if isinstance(parameter, click.Option) and parameter.name not in {CONFIG, "help"}
    }


def flag_of(option: click.Option) -> str:
    """Give a flag as it is typed; of several spellings the first long one."""
    return next((name for name in option.opts if name.startswith("--")), option.opts[0])


def key_of(option: click.Option) -> str:
    """Give a flag's key in headrace.toml: `max_tokens`."""
    return flag_of(option).lstrip("-").replace("-", "_")


def name_variables(command: click.Command) -> None:
    """Give each flag its variable: HEADRACE_ and its key, however the code names its value.

    A flag that names a variable itself keeps that one, and a command may have a prefix of its own:
    so that one variable never means two things.
    """
    prefix = command.context_settings.get("auto_envvar_prefix", PREFIX)
    for key, option in options_of(command).items():
        if option.envvar is None:
            option.envvar = [f"{prefix}_{key.upper()}", *ALSO_READ.get(key, ())]


def variables_of(option: click.Option) -> tuple[str, ...]:
    """Give the variables that a flag reads, the first that is set wins."""
    named = option.envvar or ()
    return (named,) if isinstance(named, str) else tuple(named)


def note_place(ctx: click.Context, places: dict[str, str]) -> None:
    """Remember where in the file each value stands.

    Args:
        ctx: Of the command.
        places: Name of the value -> file and key, for people.
    """
    ctx.meta[_PLACES] = places


def is_given(ctx: click.Context, name: str) -> bool:
    """Whether a value was typed on the command line, so that it means this very call."""
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def origin(ctx: click.Context, parameter: click.Parameter | None) -> str:
    """Say which variable or which key of the file a value is from; "" for flag and default."""
    if not isinstance(parameter, click.Option) or parameter.name is None:
        return ""
    source = ctx.get_parameter_source(parameter.name)
    if source is ParameterSource.ENVIRONMENT:
        return next((name for name in variables_of(parameter) if os.environ.get(name)), "")
    if source is ParameterSource.DEFAULT_MAP:
        places: dict[str, str] = ctx.meta.get(_PLACES, {})
        return places.get(parameter.name, "")
    return ""


def origins(ctx: click.Context, text: str) -> str:
    """Say where the flags that an error names were set, if not on the command line."""
    found = [
        f"{flag_of(option)} is from {place}"
        for option in options_of(ctx.command).values()
        if (place := origin(ctx, option)) and _names(text, option)
    ]
    return "; ".join(found)


def _names(text: str, option: click.Option) -> bool:
    spelled = [name for name in option.opts if name.startswith("--")]
    # A conflict with what the run has names the run's field.
    either = "|".join(map(re.escape, [*spelled, f"has {key_of(option)}"]))
    return bool(re.search(rf"(?<![\w-])({either})(?![\w-])", text))


def shown(option: click.Option, value: Any) -> str:
    """Write a value for people, without what may be secret in it."""
    if option.is_flag and isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple | list):
        return " ".join(shown(option, each) for each in value)
    if _is_secret(option):
        return "(set, not shown)"
    return re.sub(r"://[^/\s]*@", "://…@", re.sub(r"(?i)(password=)[^&\s]*", r"\1…", str(value)))


def _is_secret(option: click.Option) -> bool:
    # The address of a webhook is all that it takes to call it.
    return key_of(option) in {"api_key", "notify"}
