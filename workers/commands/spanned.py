"""The flag `--tp`, as each command has it that counts servers by GPUs."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def spanned(example: str = "") -> Callable[[Command], Command]:
    """Give --tp.

    Args:
        example: What it comes to, for the help; empty for none.
    """
    return click.option(
        "--tp",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help=f"GPUs that one server spans{f': {example}' if example else ''}.",
    )
