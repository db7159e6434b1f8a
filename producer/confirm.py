"""Ask before something that cannot be undone; a program says `--yes`."""

import sys

import click

from common.errors import UsageError


def confirmed(question: str, *, yes: bool) -> bool:
    """Ask on a terminal.

    Args:
        question: What would be done, ending with a question mark.
        yes: The caller has said so: nobody is asked.

    Raises:
        UsageError: There is nobody to ask.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(
            f"{question} There is no terminal to ask on, so nothing was changed: --yes says so"
        )
    return click.confirm(f"producer: {question}", default=False, err=True)
